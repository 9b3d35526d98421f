"""Jobs of two ranks in which something goes wrong, for processes that a test starts: each rank says what became of it."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import numpy as np
from test_graphs import TOP_K, Step, layer_of, scale_ranges, scale_slots, scale_summed

import epdsl as ep
from epdsl.moe import ExpertParallel
from epdsl.moe_low_latency import LowLatencyMoE

DEADLINE = float(os.environ.get("FAULT_DEADLINE", "1.5"))


@ep.kernel
def check_row(row: ep.i32, rows: ep.i32):
    """Fails in the last thread."""
    ep.device_assert(row + ep.i32(ep.thread_idx.x) < rows, "row {} of {}", row + ep.i32(ep.thread_idx.x), rows)


def said(error: BaseException) -> tuple[str, Any, str]:
    return type(error).__name__, tuple(getattr(error, "peers", ())) or getattr(error, "rank", None), str(error)


def exchange_once(rank: ep.Rank, mode: str) -> Step:
    """A layer that has worked once on every rank, so that everything is compiled, loaded and mapped."""
    layer = layer_of(rank, mode, timeout_ns=int(DEADLINE * 1e9))
    step = Step(rank, layer, mode, 4)
    # Compiling may take one rank longer than the deadline.
    for kernel in kernels_of(layer, mode):
        kernel.compile(rank.device.info.target, **({"top_k": TOP_K} if kernel is scale_summed else {}))
    rank.barrier()
    expected = step.fill(1, 0)
    step()
    rank.synchronize()
    step.check(expected, "before the fault")
    rank.barrier()
    return step


def kernels_of(layer: Any, mode: str) -> tuple[Any, ...]:
    """Every kernel of a step."""
    if mode == "base":
        return layer.config.dispatch_kernel.dispatch, layer.config.combine_kernel.combine, scale_ranges
    return layer.kernel.dispatch, layer.kernel.combine, scale_slots if mode in ("latency", "stamps") else scale_summed


def die(note: str) -> None:
    """Ends this process as a failing machine would, after writing down when."""
    with open(note, "w") as file:
        file.write(str(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)


def outcome_of(rank: ep.Rank, step: Step) -> tuple[tuple[str, Any, str], float]:
    """What a rank that goes on sees, and seconds from its next launch on."""
    start = time.monotonic()
    try:
        step()
        rank.synchronize()
        rank.barrier()
    except Exception as error:
        return said(error), time.monotonic() - start
    return ("nothing", None, ""), time.monotonic() - start


def killed(rank: ep.Rank, when: str, mode: str, note: str) -> Any:
    step = exchange_once(rank, mode)
    step.fill(1, 1)
    if rank.index == 1:
        if when == "during":
            step.layer.dispatch(step.x, step.ids, step.weights)
        elif when == "after":
            step.layer.dispatch(step.x, step.ids, step.weights)
            rank.synchronize()
        die(note)
    return outcome_of(rank, step)


def absent(rank: ep.Rank, mode: str) -> Any:
    """Rank 1 never launches, and stays until rank 0 has seen it."""
    step = exchange_once(rank, mode)
    if rank.index == 1:
        rank.allgather("late")
        return None
    found = outcome_of_one(rank, step)
    rank.allgather("seen")
    return found


def outcome_of_one(rank: ep.Rank, step: Step) -> Any:
    start = time.monotonic()
    try:
        step()
        rank.synchronize()
    except Exception as error:
        return said(error), time.monotonic() - start
    return ("nothing", None, ""), 0.0


def disagreeing(rank: ep.Rank, what: str) -> Any:
    try:
        if what == "hidden":
            LowLatencyMoE(rank, hidden=256 << rank.index, n_experts=8, top_k=2, max_tokens_per_rank=4)
        elif what == "experts":
            ExpertParallel(rank, hidden=256, n_experts=8 << rank.index, top_k=2, max_tokens_per_rank=4)
        else:
            rank.symmetric("u32", 4 + rank.index)
    except Exception as error:
        return said(error)
    return "nothing"


def asserting(rank: ep.Rank) -> Any:
    try:
        check_row.launch(rank, grid=1, block=32, args=(64 * rank.index, 64 + 31))
        rank.synchronize()
    except Exception as error:
        return said(error)
    return "nothing"


def out_of_memory(rank: ep.Rank, at: int) -> Any:
    """The `at`-th buffer of rank 1 cannot be made; then, with enough memory, all goes well."""
    device, allocate = rank.device, rank.device.allocate_shared
    count = 0

    def limited(nbytes: int, kind: str) -> tuple[int, int]:
        nonlocal count
        count += 1
        if count == at:
            raise MemoryError(f"{nbytes} bytes asked for, 0 are left")
        return allocate(nbytes, kind)

    rank.barrier()
    if rank.index == 1:
        device.allocate_shared = limited  # pyright: ignore[reportAttributeAccessIssue]
    try:
        layer_of(rank, "latency")
        return "nothing"
    except Exception as error:
        found = said(error)
    device.allocate_shared = allocate  # pyright: ignore[reportAttributeAccessIssue]
    held = len(rank._symmetric)
    exchange_once(rank, "latency")
    return found, held


def launched(index: int, size: int, port: int, results: Any, name: str, args: tuple[Any, ...], device: str) -> None:
    """A process as a launcher starts it. Puts (index, what the job returned)."""
    os.environ.update(RANK=str(index), WORLD_SIZE=str(size), LOCAL_RANK=str(index), EPDSL_PORT=str(port), EPDSL_TOKEN=f"test {port}")
    rank = ep.init(device, timeout=20)
    results.put((index, globals()[name](rank, *args)))
    if rank.bootstrap.size > 1 and name not in ("killed",):
        rank.close()


def too_much(rank: ep.Rank, nbytes: int) -> Any:
    """More memory than there is, asked for by rank 1 of a machine whose other ranks ask for as much."""
    try:
        rank.symmetric("u8", nbytes)
    except Exception as error:
        return said(error)
    return "nothing"


def sums(rank: ep.Rank) -> Any:
    """An exchange of numbers through symmetric memory, by the host."""
    made = rank.symmetric("i32", rank.size)
    for address in made.peers.addresses:
        rank.device.upload(address + 4 * rank.index, np.array([10 + rank.index], np.int32))
    rank.barrier()
    return made.local.numpy().tolist(), rank.size
