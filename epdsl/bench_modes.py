"""The exchange modes, set up to be timed: each case's outputs are checked against NumPy before its launches are handed out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from .bench import Stopwatch
from .bench_job import Job, Settings, parts
from .bench_routing import Floor, combine_floor, dispatch_floor
from .sm_budget import FORMATS, MODES, Mode

if TYPE_CHECKING:
    from epdsl_runtime.rank import Rank

    from .moe_low_latency import Protocol


@dataclass(frozen=True)
class Case:
    """One measurement. blocks, send_blocks (dispatch, combine), protocol (latency mode): None for the layer's own choice."""

    mode: Mode
    tokens: int
    fp8: bool
    blocks: int | None = None
    send_blocks: tuple[int, int] | None = None
    protocol: Protocol | None = None


@dataclass(frozen=True)
class Phase:
    """A launch to time. phase: "dispatch" or "combine"; format: of its rows on the link."""

    phase: str
    format: str
    launch: Callable[[], object]
    floor: Floor


def bench_rank(rank: Rank, settings: Settings, cases: Sequence[Case], progress: str | None = None) -> list[dict[str, Any]]:
    """Times every case, every rank together. Rows of numbers and text; the first two say what the machine does.

    progress: a file that rank 0 appends a byte to for every case done.

    Raises AssertionError naming rank and rows when an output is wrong, and what the layers raise.
    """
    watch = Stopwatch(rank, settings.repetitions, settings.flush_bytes)

    def done() -> None:
        if progress is not None and rank.index == 0:
            with open(progress, "ab") as file:
                file.write(b".")

    return [*about(watch), *time_cases(watch, settings, cases, done)]


def about(watch: Stopwatch) -> list[dict[str, Any]]:
    """What an empty kernel takes and what link and memory do, as rows of the same table."""
    rates = watch.rates()
    link = {"link_gb_s": rates.link} if watch.rank.size > 1 else {}
    return [
        {"name": "empty kernel", "median_us": watch.empty_us, "least_us": watch.empty_us, "less_empty": 0.0},
        {"name": "16-byte stores to peers; copy in memory", "memory_gb_s": rates.memory, **link},
    ]


def time_cases(
    watch: Stopwatch, settings: Settings, cases: Sequence[Case], done: Callable[[], None] = lambda: None, job: Job | None = None
) -> Iterator[dict[str, Any]]:
    """A row for each phase of each case. Cases of the same number of tokens should follow one another: they share tokens and routing.

    job: of these settings, for the first cases if it has as many tokens
    """
    rank, rates = watch.rank, watch.rates()
    for case in cases:
        if job is None or job.per_rank != case.tokens:
            job = Job(rank, case.tokens, settings)
        layer = LAYERS[case.mode](rank, settings, case)
        k = layer.kernel
        protocol = (layer.protocol,) if case.mode == "latency" else ()
        for phase in PHASES[case.mode](rank, settings, layer, job):
            timing = watch.time(phase.launch)
            floor = phase.floor.us(rates.link, rates.memory)
            yield {
                "name": ", ".join((f"{case.mode} {phase.phase} {phase.format.upper()}", f"{case.tokens} tokens", *protocol)),
                "mode": case.mode,
                "protocol": "".join(protocol) or None,
                "phase": phase.phase,
                "format": phase.format,
                "case_format": FORMATS[case.fp8],
                "tokens": case.tokens,
                "routing": str(settings.routing),
                "blocks": k.n_blocks,
                "threads": threads(k, phase.phase),
                "send_blocks": sends(k, phase.phase),
                **vars(timing),
                "remote_gb_s": phase.floor.link_bytes / timing.less_empty / 1e3,
                "link_floor_us": phase.floor.link_bytes / rates.link / 1e3,
                "memory_floor_us": phase.floor.memory_bytes / rates.memory / 1e3,
                "share_of_floor": floor / timing.less_empty,
            }
        rank.barrier()
        layer.close()
        done()


def threads(kernel: Any, phase: str) -> int:
    """Threads of a block of a phase."""
    found = kernel.num_threads
    return found[phase == "combine"] if isinstance(found, tuple) else found


def sends(kernel: Any, phase: str) -> int:
    """Blocks of a phase that only send; 0 where there are none."""
    found = getattr(kernel, "send_blocks", 0)
    if isinstance(found, tuple):
        return found[phase == "combine"]
    return found if phase == "combine" else 0


# ---- latency


def _latency_layer(rank: Rank, settings: Settings, case: Case) -> Any:
    from .moe_low_latency import LowLatencyMoE

    return LowLatencyMoE(rank, **_shape(settings, case), protocol=case.protocol)


def _latency(rank: Rank, settings: Settings, layer: Any, job: Job) -> Iterator[Phase]:
    k, kind = layer.kernel, FORMATS[layer.kernel.fp8]
    arrays = _given(rank, job)
    handle = layer.dispatch(*arrays)
    rank.synchronize()
    token, expert = job.expert_major(own_first=True)
    counts = np.bincount(expert, minlength=k.n_local_experts)
    assert handle.expert_counts.numpy().tolist() == counts.tolist(), f"rank {rank.index}: expert_counts differ"
    y = rank.empty("bf16", (k.n_local_experts, k.capacity, k.hidden))
    # Rows that are not in use are NaN: one that a combine reads shows.
    rank.device.memset(y.address, 0xFF, y.nbytes)
    for e, end in enumerate(np.cumsum(counts).tolist()):
        used = slice(end - int(counts[e]), end)
        _check_expert(job, handle.rows[e], handle.scales[e] if k.fp8 else None, token[used])
        if counts[e]:
            y[e][: int(counts[e])].copy_from(job.answer(token[used], expert[used]))
    out = _poisoned(rank, (job.per_rank, k.hidden))
    dispatch, handle = layer.prepare_dispatch(*arrays)
    dispatch()
    combine = layer.prepare_combine(y, handle, out)
    combine()
    rank.synchronize()
    job.check_sums(out)
    yield Phase("dispatch", kind, dispatch, dispatch_floor(job.traffic, _wire_bytes(k), True, 2 * k.hidden))
    yield Phase("combine", "bf16", combine, combine_floor(job.traffic, 2 * k.hidden, True))


# ---- throughput, rows once a rank


def _throughput_layer(rank: Rank, settings: Settings, case: Case) -> Any:
    from .moe_throughput import ThroughputMoE

    return ThroughputMoE(rank, **_shape(settings, case), send_blocks=case.send_blocks[1] if case.send_blocks else None)


def _throughput(rank: Rank, settings: Settings, layer: Any, job: Job) -> Iterator[Phase]:
    k = layer.kernel
    x, ids, weights = _given(rank, job)
    codes, scales = job.quantised if k.fp8 else (job.tokens, None)
    arrays = (x if scales is None else rank.array(codes[job.mine], "f8e4m3"), ids, weights)
    if scales is not None:
        arrays = (*arrays, rank.array(scales[job.mine], "f32"))
    layer.dispatch(*arrays)
    handle = layer.dispatch(*arrays)
    rank.synchronize()
    tokens = job.once_a_rank
    starts = np.searchsorted(tokens, np.arange(rank.size + 1) * job.per_rank)
    assert handle.rank_rows.numpy().tolist() == starts.tolist(), f"rank {rank.index}: rank_rows differ"
    assert (handle.token[: len(tokens)].numpy() == tokens % job.per_rank).all(), f"rank {rank.index}: row tokens differ"
    job.check_rows("elements", handle.rows, codes, tokens)
    if scales is not None:
        job.check_rows("scales", handle.scales, scales, tokens)
    wire = k.payload_bytes + k.scale_bytes
    yield Phase("dispatch", FORMATS[k.fp8], layer.prepare_dispatch(*arrays), dispatch_floor(job.traffic, wire, False))
    if k.fp8:
        return
    handle = layer.dispatch(*arrays)
    rank.synchronize()
    out = _poisoned(rank, (job.per_rank, k.hidden))
    layer.combine(handle.rows, handle, out)
    rank.synchronize()
    # The rows went out and come back as they are, so a token's sum is itself, once for each rank it went to.
    chosen = job.ids[job.mine]
    there = [((chosen >= 0) & (chosen // job.local == r)).any(axis=1) for r in range(rank.size)]
    n_ranks: np.ndarray = np.array(there, np.float32).sum(axis=0)
    for part in parts(job.per_rank):
        wanted = (job.tokens[job.mine][part].astype(np.float32) * n_ranks[part, None]).astype(ml_dtypes.bfloat16)
        wrong = int((out[part].numpy() != wanted).any(axis=1).sum())
        assert not wrong, f"rank {rank.index}: combine differs for {wrong} tokens of {len(wanted)}"
    yield Phase("combine", "bf16", layer.prepare_combine(handle.rows, handle, out), combine_floor(job.traffic, 2 * k.hidden, False))


# ---- throughput, expert-major rows


def _expert_major_layer(rank: Rank, settings: Settings, case: Case) -> Any:
    from .moe_expert_major import ExpertMajorMoE

    return ExpertMajorMoE(rank, **_shape(settings, case), send_blocks=case.send_blocks)


def _expert_major(rank: Rank, settings: Settings, layer: Any, job: Job) -> Iterator[Phase]:
    k = layer.kernel
    arrays = _given(rank, job)
    rank.device.memset(layer.rows.address, 0xFF, layer.rows.nbytes)
    layer.dispatch(*arrays)
    handle = layer.dispatch(*arrays)
    rank.synchronize()
    token, expert = job.expert_major(own_first=False)
    ends = np.searchsorted(expert, np.arange(k.n_local_experts + 1))
    assert handle.expert_rows.numpy().tolist() == ends.tolist(), f"rank {rank.index}: expert_rows differ"
    _check_expert(job, handle.rows, handle.scales, token)
    launch, handle = layer.prepare_dispatch(*arrays)
    yield Phase("dispatch", FORMATS[k.fp8], launch, dispatch_floor(job.traffic, _wire_bytes(k), True, 2 * k.hidden))
    if k.fp8:
        return
    y = _poisoned(rank, (k.max_rows, k.hidden))
    for part in parts(len(token)):
        y[part].copy_from(job.answer(token[part], expert[part]))
    out = _poisoned(rank, (job.per_rank, k.hidden))
    layer.combine(y, handle, out)
    rank.synchronize()
    job.check_sums(out)
    yield Phase("combine", "bf16", layer.prepare_combine(y, handle, out), combine_floor(job.traffic, 2 * k.hidden, True))


# ---- what they share


def _shape(settings: Settings, case: Case) -> dict[str, Any]:
    """What a layer of any mode is made with."""
    return {
        "hidden": settings.hidden,
        "n_experts": settings.experts,
        "top_k": settings.top_k,
        "max_tokens_per_rank": case.tokens,
        "n_blocks": case.blocks,
        "fp8": case.fp8,
    }


def _given(rank: Rank, job: Job) -> tuple[Any, Any, Any]:
    return rank.array(job.tokens[job.mine], "bf16"), rank.array(job.ids[job.mine], "i32"), rank.array(job.weights[job.mine], "f32")


def _poisoned(rank: Rank, shape: tuple[int, int]) -> Any:
    made = rank.empty("bf16", shape)
    rank.device.memset(made.address, 0xFF, made.nbytes)
    return made


def _wire_bytes(kernel: Any) -> int:
    return 4 * kernel.payload_words


def _check_expert(job: Job, rows: Any, scales: Any, token: np.ndarray) -> None:
    codes, factors = (job.tokens, None) if scales is None else job.quantised
    job.check_rows("elements", rows, codes, token)
    if factors is not None:
        job.check_rows("scales", scales, factors, token)


# A layer of a mode for a case; and its phases, which check before they yield.
LAYERS: dict[Mode, Callable[[Rank, Settings, Case], Any]] = dict(
    zip(MODES, (_latency_layer, _throughput_layer, _expert_major_layer), strict=True)
)
PHASES: dict[Mode, Callable[[Rank, Settings, Any, Job], Iterator[Phase]]] = dict(
    zip(MODES, (_latency, _throughput, _expert_major), strict=True)
)
