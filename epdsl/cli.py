"""The `epdsl` command."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import typer

from .cli_bench import bench
from .cli_build import build
from .cli_check import check
from .cli_dump import cache, dump
from .cli_explain import explain
from .cli_kernels import kernels
from .cli_report import report
from .cli_run import run, trace
from .cli_tools import Failure, Json, show_table

app = typer.Typer(
    name="epdsl",
    help="Expert-parallel communication kernels in Python, for NVIDIA, AMD and a simulator.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

app.command()(run)
app.command()(trace)
app.command()(build)


@app.command()
def devices(as_json: Json = False) -> None:
    """List the devices of this machine, and why a kind has none."""
    from epdsl_runtime.devices import list_devices

    found = list_devices()
    if as_json:
        typer.echo(
            json.dumps(
                [
                    {"device": d.spec, "info": asdict(d.info) if d.info else None, "reason": d.reason, "peer_memory": dict(d.peer_memory)}
                    for d in found
                ],
                indent=1,
            )
        )
        return
    rows = [
        (
            d.spec,
            d.info.name,
            d.info.target,
            str(d.info.num_sms),
            str(d.info.warp_size),
            f"{d.info.total_memory / 2**30:.1f} GiB",
            ", ".join(kind for kind, why in d.peer_memory if why is None),
        )
        if d.info
        else (d.spec, "not available", "", "", "", "", "")
        for d in found
    ]
    show_table("", ("device", "name", "target", "SMs", "warp", "memory", "peer memory"), rows)
    # Reasons are sentences: no column of a terminal is wide enough for them.
    for d in found:
        for text in (*([d.reason] if d.reason else ()), *(f"no peer memory of kind {kind}: {why}" for kind, why in d.peer_memory if why)):
            typer.echo(f"{d.spec}: {text}")


@app.command()
def env(as_json: Json = False) -> None:
    """Print the environment variables epdsl reads, and the values in force."""
    from . import env as table

    rows = table.describe()
    if as_json:
        typer.echo(json.dumps([asdict(row) for row in rows], indent=1))
    else:
        show_table("", ("variable", "value", "default", "meaning"), [(r.name, str(r.value), str(r.default), r.meaning) for r in rows])


app.command()(kernels)
app.command()(check)
app.command()(bench)
app.command()(dump)
app.command()(report)
app.command()(explain)
app.add_typer(cache, name="cache")


def main() -> None:
    """Entry point of the `epdsl` command."""
    try:
        app()
    except Failure as error:
        typer.echo(f"epdsl: {error}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
