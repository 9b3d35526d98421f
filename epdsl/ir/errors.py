"""Errors a kernel author sees: file, line, source with a caret, what was wrong, what to write instead."""

from __future__ import annotations

from dataclasses import dataclass


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


class CompileError(Exception):
    """The kernel cannot be built.

    message  what was wrong
    fix      what to write instead
    also     other lines that matter, each with a label
    about    the parameter of the operation or function called whose argument is at fault, "" for none
    places   from the kernel's own line to the line at fault, through @ep.func calls
    """

    def __init__(self, message: str, fix: str = "", also: tuple[tuple[str, Place], ...] = (), about: str = "") -> None:
        self.message = message
        self.fix = fix
        self.also = also
        self.about = about
        self.places: tuple[Place, ...] = ()
        super().__init__(message)

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
        parts = [self.message]
        parts += [place.render() for place in self.places]
        for label, place in self.also:
            parts += [f"  {label}:", place.render()]
        if self.fix:
            parts.append(f"  write: {self.fix}" if "\n" not in self.fix else f"  {self.fix}")
        return "\n".join(parts)
