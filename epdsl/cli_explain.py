"""`epdsl explain`: what an error's code means."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from .cli_tools import Json, show_table, usage
from .error_codes import CODES, ErrorCode, markdown, nearest


def explain(
    code: Annotated[str, typer.Argument(metavar="[CODE]", help="Such as EP014; left out: all of them.")] = "",
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print the whole catalogue as Markdown.")] = False,
    as_json: Json = False,
) -> None:
    """Say what an error's code means: the cause, what to do, and a program that raises it."""
    if as_markdown:
        typer.echo(markdown(), nl=False)
    elif not code:
        if as_json:
            typer.echo(json.dumps([row.as_dict() for row in CODES.values()], indent=1))
        else:
            show_table("", ("code", "meaning"), [(row.code, row.title) for row in CODES.values()])
    else:
        found = CODES.get(code.upper())
        if found is None:
            close = CODES[nearest(code.upper())]
            usage(f"there is no error {code}; the nearest is {close.code}: {close.title}")
        if as_json:
            typer.echo(json.dumps(found.as_dict(), indent=1))
        else:
            _show(found)


def _show(row: ErrorCode) -> None:
    """The page of a code; on a pipe the same words without colour."""
    from rich.console import Console, Group
    from rich.padding import Padding
    from rich.syntax import Syntax
    from rich.text import Text

    wide = sys.stdout.isatty()
    console = Console(highlight=False) if wide else Console(width=100, color_system=None, highlight=False)
    example = Syntax(row.example.rstrip(), "python", background_color="default") if wide else Text(row.example.rstrip())
    page = Group(
        Text(f"{row.code}: {row.title}", style="bold"),
        Text(""),
        Text(row.cause),
        Text(""),
        Text("What to do", style="bold"),
        Padding(Text(row.fix), (0, 2)),
        Text(""),
        Text("A program that raises it", style="bold"),
        Padding(example, (0, 2)),
    )
    with console.capture() as made:
        console.print(page)
    # Rich fills each line up to the width.
    typer.echo("\n".join(line.rstrip() for line in made.get().splitlines()))
