"""Errors a kernel author sees: file, line, source with a caret, what was wrong, what to write instead."""

from __future__ import annotations

from dataclasses import dataclass

from epdsl_runtime.errors import CodedError

# The code of what is a fault of the compiler and not of the kernel.
FAULT_OF_OURS = "EP199"


@dataclass(frozen=True)
class Place:
    """A span of one source line. Columns count from 0."""

    file: str
    line: int
    column: int
    end_column: int
    function: str
    text: str

    def render(self) -> str:
        stripped = self.text.lstrip()
        shift = len(self.text) - len(stripped)
        start = max(0, self.column - shift)
        width = max(1, min(self.end_column - self.column, len(stripped) - start))
        return f'  File "{self.file}", line {self.line}, in {self.function}\n    {stripped}\n    {" " * start}{"^" * width}'


class CompileError(CodedError):
    """The kernel cannot be built.

    code     its kind, for `epdsl explain`
    message  what was wrong
    fix      what to write instead
    also     other lines that matter, each with a label
    about    the parameter of the operation or function called whose argument is at fault, "" for none
    places   from the kernel's own line to the line at fault, through @ep.func calls
    """

    def __init__(self, code: str, message: str, fix: str = "", also: tuple[tuple[str, Place], ...] = (), about: str = "") -> None:
        super().__init__(code, message)
        self.fix = fix
        self.also = also
        self.about = about
        self.places: tuple[Place, ...] = ()

    def at(self, places: tuple[Place, ...]) -> CompileError:
        """The same error with its place, unless it already has one."""
        if not self.places:
            self.places = places
        return self

    @property
    def line(self) -> int:
        return self.places[-1].line if self.places else 0

    @property
    def column(self) -> int:
        return self.places[-1].column if self.places else 0

    def __str__(self) -> str:
        parts = [super().__str__()]
        parts += [place.render() for place in self.places]
        for label, place in self.also:
            parts += [f"  {label}:", place.render()]
        if self.fix:
            parts.append(f"  write: {self.fix}" if "\n" not in self.fix else f"  {self.fix}")
        return "\n".join(parts)
