"""`epdsl bench`: the exchange kernels timed on GPUs."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated, Any

import typer

from .cli_tools import Failure, Json, show_table


class Mode(StrEnum):
    """Which kernels: `latency` for decode-sized batches, `throughput` and `expert_major` for thousands of tokens."""

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
    blocks: Annotated[str, typer.Option(help="Blocks of a throughput launch, a comma list.")] = "24,64,132",
    hidden: Annotated[int, typer.Option(min=128, help="Elements of a token.")] = 7168,
    experts: Annotated[int, typer.Option(min=1)] = 256,
    topk: Annotated[int, typer.Option("--topk", min=1)] = 8,
    seed: Annotated[int, typer.Option(min=0, help="Of routing and tokens.")] = 1,
    repetitions: Annotated[int, typer.Option(min=5, help="Timed launches; the median of the slowest rank's is shown.")] = 50,
    as_json: Json = False,
) -> None:
    """Time the exchange kernels on GPUs: medians of device events, caches flushed, outputs checked in the same run."""
    from epdsl_runtime.devices import device_count, parse_spec
    from epdsl_runtime.driver_device import DeviceUnavailable
    from epdsl_runtime.spawn import spawn

    from . import bench as timing
    from .bench_expert_major import expert_major_rank

    spec = parse_spec(device)
    if spec.kind == "sim":
        raise Failure("bench needs GPUs: times on the simulator mean nothing; use --device cuda")
    try:
        present = device_count(spec.kind)
    except DeviceUnavailable as error:
        raise Failure(f"bench needs GPUs: {error}") from None
    if present < ranks:
        raise Failure(f"bench with {ranks} ranks needs {ranks} GPUs, this machine has {present}")
    rows: list[dict[str, Any]] = []
    if mode in (Mode.latency, Mode.all):
        shapes = [(n, None) for n in numbers(tokens or "1,32,128", "--tokens")]
        rows += spawn(timing.latency_rank, ranks, device=device, args=(shapes, hidden, experts, topk, seed, repetitions))[0]
    if mode is not Mode.latency:
        counts, shares = numbers(tokens or "4096", "--tokens"), numbers(blocks, "--blocks")
        shapes = [(n, b, fp8) for n in counts for fp8 in (False, True) for b in shares]
        for wanted, main in ((Mode.throughput, timing.throughput_rank), (Mode.expert_major, expert_major_rank)):
            if mode in (wanted, Mode.all):
                rows += spawn(main, ranks, device=device, args=(shapes, hidden, experts, topk, seed, repetitions))[0]
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
        return
    show_table(
        f"{ranks} ranks, hidden {hidden}, top-{topk} of {experts} experts, uniform routing; slowest rank, median of {repetitions}",
        ("kernel", "median us", "least", "less an empty kernel", "remote GB/s", "note"),
        [
            (
                row["name"],
                f"{row['median_us']:.2f}",
                f"{row['least_us']:.2f}",
                f"{row['less_empty']:.2f}",
                f"{row['remote_gb_s']:.0f}" if "remote_gb_s" in row else "",
                row["note"],
            )
            for row in rows
        ],
    )
