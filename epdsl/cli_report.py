"""`epdsl report`: a kernel from its Python lines to its machine code, on one page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from .cli_dump import Constants, constants_of
from .cli_tools import Failure, Json, byte_text, load_kernel, usage
from .lang.errors import CompileError


def report(
    kernel: Annotated[str, typer.Argument(help="FILE.py:KERNEL")],
    targets: Annotated[str, typer.Option(help="Comma list: sm_90, gfx942, sim:nvidia, ...")] = "sm_90,gfx942",
    output: Annotated[Path, typer.Option("-o", "--output", dir_okay=False, help="The page, which needs no other file.")] = Path(
        "report.html"
    ),
    const: Constants = [],  # noqa: B006
    as_json: Json = False,
) -> None:
    """Write a page that shows a kernel's source beside its stages for several targets, and which line came from which."""
    from .report.collect import collect, page

    names = [name.strip() for name in targets.split(",") if name.strip()]
    if not names:
        usage("report needs --targets, such as --targets sm_90,gfx942")
    try:
        found = load_kernel(kernel)
        data = collect([found.request(name, **dict(constants_of(const))) for name in names])
    except CompileError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    except (Failure, ValueError) as error:
        usage(str(error))
    text = page(data)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(text)
    if as_json:
        stages = {target["name"]: [stage["name"] for stage in target["stages"]] for target in data["targets"]}
        typer.echo(json.dumps({"output": str(output), "bytes": len(text), "stages": stages}, indent=1))
    else:
        typer.echo(f"{output}, {byte_text(len(text))}")
