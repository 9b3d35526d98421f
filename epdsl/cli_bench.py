"""`epdsl bench`: the exchange kernels timed on GPUs, and the table of block counts that is made of such times."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from .cli_tools import Failure, Json, progress_of, show_table

LATENCY_TOKENS, THROUGHPUT_TOKENS = "1,32,128", "4096"


class Mode(StrEnum):
    """Which kernels: `latency` for decode-sized batches, `throughput` and `expert-major` for thousands of tokens."""

    latency = "latency"
    throughput = "throughput"
    expert_major = "expert-major"
    all = "all"


def numbers(text: str, what: str) -> list[int]:
    """A comma list of positive integers. Raises Failure for anything else."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        raise Failure(f"{what} is a comma list of numbers, got {text!r}") from None
    if min(found) < 1:
        raise Failure(f"{what} holds {min(found)}; every number must be at least 1")
    return found


def bench(
    mode: Annotated[Mode, typer.Option(help="Which kernels.")] = Mode.all,
    device: Annotated[str, typer.Option(help="cuda or hip; the simulator's times mean nothing.")] = "cuda",
    ranks: Annotated[int, typer.Option(min=1, help="Ranks, a GPU each.")] = 2,
    tokens: Annotated[
        str, typer.Option(help="Tokens of each rank, a comma list; by default 1,32,128 (latency) and 4096 (the others).")
    ] = "",
    blocks: Annotated[str, typer.Option(help="Blocks of a throughput launch, a comma list; by default 24,64 and the layer's own.")] = "",
    routing: Annotated[str, typer.Option(help="uniform, zipf:EXPONENT (zipf:1.2), or one-rank: all tokens to rank 0.")] = "uniform",
    hidden: Annotated[int, typer.Option(min=128, help="Elements of a token.")] = 7168,
    experts: Annotated[int, typer.Option(min=1)] = 256,
    topk: Annotated[int, typer.Option("--topk", min=1)] = 8,
    seed: Annotated[int, typer.Option(min=0, help="Of routing and tokens.")] = 1,
    repetitions: Annotated[int, typer.Option(min=5, help="Timed launches; the median of the slowest rank's is shown.")] = 50,
    tune: Annotated[bool, typer.Option("--tune", help="Try block counts and keep the best as this device's table.")] = False,
    out: Annotated[Path | None, typer.Option(dir_okay=False, help="The table of --tune; by default in EPDSL_TUNED_DIR.")] = None,
    as_json: Json = False,
) -> None:
    """Time the exchange kernels on GPUs: medians of device events, caches flushed, outputs checked in the same run.

    A share of the floor is what the busiest direction of a link or the memory needs at the rates measured in the same run, of what it took.
    """
    from epdsl_runtime.devices import device_count, open_spec, parse_spec
    from epdsl_runtime.driver_device import DeviceUnavailable
    from epdsl_runtime.spawn import spawn

    from .bench_job import Settings
    from .bench_modes import bench_rank
    from .bench_routing import parse_routing

    spec = parse_spec(device)
    if spec.kind == "sim":
        raise Failure("bench needs GPUs: times on the simulator mean nothing; use --device cuda")
    if out is not None and not tune:
        raise Failure("--out is where --tune writes its table; add --tune, or use --json for the times")
    if out is not None and not out.parent.is_dir():
        raise Failure(f"--out {out}: {out.parent} is no directory; make it first")
    try:
        chosen = parse_routing(routing)
    except ValueError as error:
        raise Failure(f"--{error}") from None
    try:
        present = device_count(spec.kind)
    except DeviceUnavailable as error:
        raise Failure(f"bench needs GPUs: {error}") from None
    if spec.index is not None and ranks > 1:
        raise Failure(f"bench with {ranks} ranks on {spec}: times of ranks that take turns on one GPU mean nothing; name the kind alone")
    if present < ranks:
        raise Failure(f"bench with {ranks} ranks needs {ranks} GPUs, this machine has {present}")
    opened = open_spec(spec)
    info = opened.info
    opened.close()
    table = table_path(info.name, out) if tune else None
    settings = Settings(hidden, experts, topk, chosen, seed, repetitions)
    cases = cases_of(mode, tokens, blocks, tune, info.num_sms)
    with progress_of("timing", len(cases)) as path:
        rows = spawn(bench_rank, ranks, device=device, args=(settings, cases, path))[0]
    about = {
        "driver": driver_version(spec.kind),
        "date": datetime.date.today().isoformat(),
        "ranks": ranks,
        "hidden": hidden,
        "experts": experts,
        "topk": topk,
        "routing": str(chosen),
        "seed": seed,
        "repetitions": repetitions,
    }
    if table is not None:
        write_table(info.name, about, rows, table, as_json)
        return
    if as_json:
        typer.echo(json.dumps({"device": info.name, **about, "rows": rows}, indent=1))
        return
    show(f"{ranks} ranks, hidden {hidden}, top-{topk} of {experts} experts, routing {chosen}; slowest rank, median of {repetitions}", rows)


def cases_of(mode: Mode, tokens: str, blocks: str, tune: bool, num_sms: int) -> list[Any]:
    """What to measure. Raises Failure for options that are no numbers."""
    from .bench_modes import Case
    from .bench_tune import candidates
    from .sm_budget import MODES
    from .sm_budget import Mode as OneMode

    modes: tuple[OneMode, ...] = tuple(each for each in MODES if mode in (Mode.all, each))
    if tune:
        return list(candidates(num_sms, modes, numbers(tokens, "--tokens") if tokens else ()))
    counts: list[int | None] = [*numbers(blocks, "--blocks")] if blocks else [24, 64, None]
    made: list[Any] = []
    if "latency" in modes:
        made += [Case("latency", n, True) for n in numbers(tokens or LATENCY_TOKENS, "--tokens")]
    for n in numbers(tokens or THROUGHPUT_TOKENS, "--tokens"):
        made += [Case(each, n, fp8, b) for each in modes if each != "latency" for fp8 in (False, True) for b in counts]
    return made


def show(title: str, rows: Sequence[dict[str, Any]]) -> None:
    """Prints the measurements, the machine's rates in the title."""
    rates = next(row for row in rows if "memory_gb_s" in row)
    link = f"link {rates['link_gb_s']:.0f} GB/s a direction, " if "link_gb_s" in rates else ""
    show_table(
        f"{title}; {link}memory {rates['memory_gb_s']:.0f} GB/s, empty kernel {rows[0]['median_us']:.2f} us",
        (
            "kernel",
            "blocks",
            "of them send",
            "median us",
            "least",
            "less empty",
            "remote GB/s",
            "link floor us",
            "memory floor us",
            "of floor",
        ),
        [
            (
                row["name"],
                f"{row['blocks']}",
                f"{row['send_blocks'] or ''}",
                f"{row['median_us']:.2f}",
                f"{row['least_us']:.2f}",
                f"{row['less_empty']:.2f}",
                f"{row['remote_gb_s']:.0f}",
                f"{row['link_floor_us']:.1f}",
                f"{row['memory_floor_us']:.1f}",
                f"{row['share_of_floor']:.0%}",
            )
            for row in rows
            if "mode" in row
        ],
    )


def table_path(device: str, out: Path | None) -> Path:
    """Where a device's table goes, its folder made. Raises Failure where that cannot be: before anything is measured."""
    from .env import TUNED_DIR
    from .sm_budget import file_name

    path = out or Path(TUNED_DIR.get()) / file_name(device)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Failure(f"the table would go to {path}, whose folder cannot be made: {error}; name a file with --out") from None
    return path


def write_table(device: str, about: dict[str, Any], rows: Sequence[dict[str, Any]], path: Path, as_json: bool) -> None:
    """The best block counts of what was measured, as this device's table."""
    from .bench_tune import choose
    from .sm_budget import document

    tuned = choose(rows)
    made = document(device, about, tuned)
    path.write_text(json.dumps(made, indent=1) + "\n")
    if as_json:
        typer.echo(json.dumps({"file": str(path), **made, "measured": rows}, indent=1))
        return
    columns = ("mode", "format", "tokens", "blocks", "dispatch sends", "combine sends", "dispatch us", "combine us")
    show_table(
        f"{device}: written to {path}",
        columns,
        [
            (
                row.mode,
                row.format,
                str(row.tokens),
                str(row.blocks),
                *(str(count or "") for count in row.send_blocks),
                *("" if time is None else f"{time:.2f}" for time in (row.dispatch_us, row.combine_us)),
            )
            for row in tuned
        ],
    )


def driver_version(kind: str) -> str:
    """The kernel driver's version, as it says itself; "unknown" where it says nothing."""
    path, pattern = {
        "cuda": ("/proc/driver/nvidia/version", r"Kernel Module.*?\s(\d+\.[\d.]+)"),
        "hip": ("/sys/module/amdgpu/version", r"(\S+)"),
    }[kind]
    try:
        found = re.search(pattern, Path(path).read_text())
    except OSError:
        return "unknown"
    return found[1] if found else "unknown"
