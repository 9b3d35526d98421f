"""`epdsl dump` and `epdsl cache`: what the compiler made, and what it kept."""

from __future__ import annotations

import ast
import difflib
import json
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .cli_tools import Failure, Json, byte_text, load_kernel, show_table, usage
from .lang.errors import CompileError
from .targets import parse_target

if TYPE_CHECKING:
    from epdsl_runtime.artifact import Artifact

Constants = Annotated[list[str], typer.Option("--const", metavar="NAME=VALUE", help="An ep.Const parameter; may be repeated.")]

_PASS = re.compile(r"(passes/)?\d\d_\S+$")
_COLOURS = {"+": "\x1b[32m", "-": "\x1b[31m", "@": "\x1b[36m"}
_PLAIN = "\x1b[0m"


@dataclass(frozen=True)
class Choice:
    """One text of one compilation."""

    kernel: str
    target: str
    stage: str
    constants: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return ",".join((self.kernel, self.target, self.stage, *(f"{name}={value!r}" for name, value in self.constants)))

    def artifact(self) -> Artifact:
        return load_kernel(self.kernel).compile(self.target, **dict(self.constants))


def constants_of(given: list[str]) -> tuple[tuple[str, Any], ...]:
    """`NAME=VALUE` as Python values. Raises Failure."""
    found: list[tuple[str, Any]] = []
    for text in given:
        name, equals, value = text.partition("=")
        try:
            if not equals:
                raise ValueError
            found.append((name.strip(), ast.literal_eval(value)))
        except (ValueError, SyntaxError):
            raise Failure(f"--const {text}: write NAME=VALUE, with a Python literal for the value") from None
    return tuple(found)


def varied(base: Choice, text: str) -> Choice:
    """`base` with what a comma list names in place: a kernel, a target, a stage, constants. Raises Failure."""
    from .stages import MEANING

    for part in text.split(","):
        if ".py:" in part:
            base = replace(base, kernel=part)
        elif "=" in part:
            changed = constants_of([part])
            base = replace(base, constants=(*(c for c in base.constants if c[0] != changed[0][0]), *changed))
        elif part in (*MEANING, "ptx", "gcn") or _PASS.match(part):
            base = replace(base, stage=part)
        else:
            try:
                base = replace(base, target=parse_target(part).name)
            except ValueError as error:
                raise Failure(f"--diff {text}: {part} is neither a stage ({', '.join(MEANING)}) nor a target; {error}") from None
    return base


def text_of(choice: Choice) -> str:
    """Raises Failure where the stage does not exist or a tool is absent."""
    try:
        return choice.artifact().text(choice.stage)
    except KeyError as error:
        raise Failure(str(error.args[0])) from None
    except (LookupError, ValueError) as error:
        raise Failure(str(error)) from None


def difference(a: Choice, b: Choice) -> list[str]:
    """The unified diff of two texts, as lines without ends."""
    return list(difflib.unified_diff(text_of(a).splitlines(), text_of(b).splitlines(), str(a), str(b), lineterm=""))


def coloured(lines: list[str]) -> str:
    """A diff for a terminal."""
    return "\n".join(f"{_COLOURS[line[0]]}{line}{_PLAIN}" if line[:1] in _COLOURS else line for line in lines)


def dump(
    kernel: Annotated[str, typer.Argument(help="FILE.py:KERNEL")],
    target: Annotated[str, typer.Option(help="sm_90, gfx942, sim:nvidia, ...")] = "sim:nvidia",
    stage: Annotated[
        str, typer.Option(help="all, or some of source, ep, ep-pretty, passes (or one: 03_NAME), llvm, llvm-opt, asm, sass, resources.")
    ] = "ep",
    output: Annotated[
        Path | None, typer.Option("-o", "--output", file_okay=False, help="Write files to DIR/KERNEL-HASH/RANK/ instead of printing.")
    ] = None,
    diff: Annotated[
        tuple[str, str] | None,
        typer.Option(metavar="A B", help="Compare two: each a comma list of a stage, a target, NAME=VALUE, FILE.py:KERNEL."),
    ] = None,
    const: Constants = [],  # noqa: B006
    as_json: Json = False,
) -> None:
    """Show what the compiler made of a kernel, stage by stage, or how two of them differ."""
    try:
        base = Choice(kernel, parse_target(target).name, stage, constants_of(const))
        if diff is not None:
            _show_difference(varied(base, diff[0]), varied(base, diff[1]), as_json)
        elif output is not None:
            _write(base, output, as_json)
        else:
            _show(base, as_json)
    except CompileError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    except (Failure, LookupError, ValueError) as error:
        usage(str(error))


def _show_difference(a: Choice, b: Choice, as_json: bool) -> None:
    lines = difference(a, b)
    if as_json:
        typer.echo(json.dumps({"a": str(a), "b": str(b), "diff": lines}))
    else:
        typer.echo(coloured(lines) if sys.stdout.isatty() else "\n".join(lines))


def _show(base: Choice, as_json: bool) -> None:
    from .stages import MEANING, exists

    target = parse_target(base.target)
    stages = [s for s in MEANING if exists(s, target)] if base.stage == "all" else base.stage.split(",")
    texts: dict[str, str] = {}
    for each in stages:
        try:
            texts[each] = text_of(replace(base, stage=each))
        except Failure as error:
            if base.stage != "all":
                raise
            # The others are there all the same.
            typer.echo(f"epdsl: no {each}: {error}", err=True)
    if as_json:
        name = base.artifact().name
        found = [{"kernel": name, "target": base.target, "stage": each, "text": text} for each, text in texts.items()]
        typer.echo(json.dumps(found[0] if len(found) == 1 else found))
        return
    for each, text in texts.items():
        typer.echo(text if len(texts) == 1 else f"==== {each}\n{text}")


def _write(base: Choice, output: Path, as_json: bool) -> None:
    from .dump import write_stages

    directory = write_stages(load_kernel(base.kernel), base.target, dict(base.constants), base.stage, output)
    files = sorted(str(path) for path in directory.iterdir() if path.is_file())
    typer.echo(json.dumps({"directory": str(directory), "files": files}, indent=1) if as_json else str(directory))


cache = typer.Typer(help="The compiled code that is kept between runs.", no_args_is_help=True)


@cache.command()
def path(as_json: Json = False) -> None:
    """Print the directory it is in (EPDSL_CACHE_DIR)."""
    from .cache import directory

    typer.echo(json.dumps({"path": str(directory())}) if as_json else str(directory()))


@cache.command("list")
def list_entries(as_json: Json = False) -> None:
    """List what is kept, the latest first."""
    from .cache import entries

    found = entries()
    if as_json:
        rows = [{"what": e.what, "bytes": e.nbytes, "written": e.written, "key": e.key, "damaged": not e.what} for e in found]
        typer.echo(json.dumps(rows, indent=1))
        return
    show_table("", ("what", "size", "key"), [(e.what or "damaged", byte_text(e.nbytes), e.key[:16]) for e in found])


@cache.command()
def clear(as_json: Json = False) -> None:
    """Remove all of it."""
    from .cache import clear as clear_entries

    count, nbytes = clear_entries()
    typer.echo(json.dumps({"entries": count, "bytes": nbytes}) if as_json else f"{count} entries, {byte_text(nbytes)} removed")
