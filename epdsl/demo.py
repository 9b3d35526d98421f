"""The main job: an expert-parallel layer on every rank, launch after launch, each compared with the NumPy reference."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from . import reference
from .reference_layer import ReferenceLayer

if TYPE_CHECKING:
    from epdsl_runtime.rank import Rank

COMBINE_BYTES_PER_ELEMENT = 2
TRACE_EVENTS = 1024
"""Events kept of each block by `epdsl run --trace`."""


@dataclass(frozen=True)
class RunConfig:
    """What `epdsl run` does. Pickled to every rank.

    tokens     tokens of each rank
    routing    path of an .npz with a real router's topk_idx and topk_weights, None for the seeded skewed one
    input_scale   the global scale of a format that has one; None for 1
    fused      one launch each for dispatch and combine, instead of two
    layer      further options of `ExpertParallel`, by their names
    trace      file for the merged events; each rank writes its own beside it (see `rank_trace_path`). None not to trace
    progress   file that gets one byte for every launch rank 0 has verified
    """

    ranks: int
    tokens: int
    hidden: int
    experts: int
    topk: int
    seed: int = 0
    launches: int = 3
    completion: Literal["rank", "expert", "every"] = "rank"
    fused: bool = True
    output_type: Literal["bf16", "f32"] = "bf16"
    blocks: int | None = None
    threads: int | None = None
    routing: str | None = None
    input_scale: float | None = None
    layer: dict[str, Any] = field(default_factory=dict[str, Any])
    trace: str | None = None
    progress: str | None = None

    @property
    def reference(self) -> ReferenceLayer:
        return ReferenceLayer(
            self.experts,
            self.ranks,
            self.layer.get("token_format", "bf16"),
            1.0 if self.input_scale is None else self.input_scale,
            skip_a2a=self.layer.get("skip_a2a", False),
            shared=self.layer.get("fused_shared_expert", False),
            unreduced=self.layer.get("unreduced", False),
            any_order=self.layer.get("ep_prod_reserve", False),
        )


@dataclass(frozen=True)
class RankResult:
    """What one rank found.

    device           name of what it ran on
    tokens           tokens it dispatched in the last launch, `received` rows it received
    dispatch_bytes   sent to other ranks by the last dispatch, `combine_bytes` by the last combine; `local_bytes` stayed here in both
    dispatch_us, expert_us, combine_us   a launch each
    largest_error    of any combine, absolute; `error_ratio` the same divided by its bound
    problems         what was wrong, empty when all agreed
    """

    rank: int
    device: str
    target: str
    grid: int
    block: int
    tokens: int
    received: int
    dispatch_bytes: int
    combine_bytes: int
    local_bytes: int
    dispatch_us: list[float] = field(default_factory=list[float])
    expert_us: list[float] = field(default_factory=list[float])
    combine_us: list[float] = field(default_factory=list[float])
    largest_error: float = 0.0
    error_ratio: float = 0.0
    problems: list[str] = field(default_factory=list[str])


def rank_trace_path(trace: str | Path, rank: int) -> Path:
    """Where a rank writes its own events: OUT.rank0.json beside OUT.json."""
    path = Path(trace)
    return path.with_name(f"{path.stem}.rank{rank}.json")


def load_routing(path: str | Path, ranks: int) -> list[reference.Routing]:
    """Reads topk_idx [tokens, K] and topk_weights from an .npz: split over the ranks in order, or [ranks, tokens, K] as one pair per rank.

    Also one pair per rank under the names topk_idx_0, topk_weights_0, topk_idx_1, ...
    Raises ValueError saying what the file lacks.
    """
    try:
        with np.load(path) as data:
            arrays = {name: data[name] for name in data.files}
    except (ValueError, OSError, AttributeError, TypeError, BadZipFile) as error:
        raise ValueError(f"{path} is no .npz of plain arrays; write it with numpy.savez(path, topk_idx=..., topk_weights=...)") from error
    pairs: list[tuple[NDArray[Any], NDArray[Any]]]
    if "topk_idx_0" in arrays:
        missing = [n for r in range(ranks) for n in (f"topk_idx_{r}", f"topk_weights_{r}") if n not in arrays]
        if missing:
            raise ValueError(f"{path}: {ranks} ranks need {', '.join(missing)} as well; it has {', '.join(arrays)}")
        pairs = [(arrays[f"topk_idx_{r}"], arrays[f"topk_weights_{r}"]) for r in range(ranks)]
    elif "topk_idx" in arrays and "topk_weights" in arrays:
        ids, weights = arrays["topk_idx"], arrays["topk_weights"]
        if ids.ndim == 3:
            if ids.shape[0] != ranks:
                raise ValueError(f"{path}: topk_idx has shape {ids.shape}, so {ids.shape[0]} ranks, but there are {ranks}")
            pairs = list(zip(ids, weights, strict=True))
        else:
            pairs = list(zip(np.array_split(ids, ranks), np.array_split(weights, ranks), strict=True))
    else:
        raise ValueError(f"{path}: needs arrays topk_idx and topk_weights; it has {', '.join(arrays) or 'none'}")
    for rank, (ids, weights) in enumerate(pairs):
        if ids.ndim != 2 or ids.shape != weights.shape or ids.dtype.kind not in "iu":
            raise ValueError(
                f"{path}: rank {rank}'s topk_idx is {ids.dtype} {ids.shape}, topk_weights {weights.dtype} {weights.shape}; "
                "both must be [tokens, top_k], the ids integers"
            )
    return [reference.Routing(np.ascontiguousarray(i, np.int32), np.ascontiguousarray(w, np.float32)) for i, w in pairs]


def check_routing(path: str, routings: list[reference.Routing], n_experts: int) -> None:
    """Raises ValueError for ids that are no experts of the layer or repeat one in a row, and for ranks with unlike top_k."""
    for rank, routing in enumerate(routings):
        ids, first = routing.topk_idx, routings[0].topk_idx
        if ids.shape[1] != first.shape[1]:
            raise ValueError(f"{path}: rank {rank} has {ids.shape[1]} experts a token and rank 0 has {first.shape[1]}; make them equal")
        wrong = np.argwhere((ids < -1) | (ids >= n_experts))
        if len(wrong):
            row, column = (int(v) for v in wrong[0])
            raise ValueError(
                f"{path}: rank {rank}'s topk_idx[{row}, {column}] is {ids[row, column]}, but the layer has {n_experts} experts; "
                f"use --experts {int(ids.max()) + 1} or more, and -1 for none"
            )
        ordered = np.sort(ids, axis=1)
        repeated = np.flatnonzero(((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(axis=1))
        if len(repeated):
            row = int(repeated[0])
            raise ValueError(f"{path}: rank {rank}'s topk_idx[{row}] is {ids[row].tolist()}; each expert may be named once in a row")


def routings_of(config: RunConfig, launch: int, loaded: list[reference.Routing] | None) -> list[reference.Routing]:
    """Every rank's routing of one launch; with skip_a2a all ranks have rank 0's."""
    sources = [0 if config.layer.get("skip_a2a") else r for r in range(config.ranks)]
    if loaded is not None:
        return [loaded[r] for r in sources]
    return [reference.skewed_routing(config.seed, r, launch, config.tokens, config.experts, config.topk) for r in sources]


def tokens_of(config: RunConfig, launch: int, routings: list[reference.Routing]) -> list[NDArray[Any]]:
    """Every rank's tokens of one launch; with skip_a2a all ranks have rank 0's."""
    sources = [0 if config.layer.get("skip_a2a") else r for r in range(config.ranks)]
    return [reference.sample_tokens(config.seed, r, launch, routings[i].n_tokens, config.hidden) for i, r in enumerate(sources)]


def run_rank(rank: Rank, config: RunConfig) -> RankResult:
    """Runs the job on one rank and checks every launch there: what it received bit for bit, and its combine within the bound."""
    from .kernels.expert import SampleExperts
    from .kernels.trace import NullTrace, RingTrace
    from .moe import ExpertParallel
    from .trace import RankTrace, compare_clocks, read_rings, write_rank

    loaded = load_routing(config.routing, config.ranks) if config.routing else None
    most = max(r.n_tokens for r in loaded) if loaded else config.tokens
    trace = RingTrace(TRACE_EVENTS) if config.trace else NullTrace()
    layer = ExpertParallel(
        rank,
        hidden=config.hidden,
        n_experts=config.experts,
        top_k=config.topk,
        max_tokens_per_rank=max(most, 1),
        num_threads=config.threads,
        n_sms=config.blocks,
        completion=config.completion,
        output_type=config.output_type,
        trace=trace,
        **config.layer,
    )
    clock = compare_clocks(rank) if config.trace else (0.0, 0.0)
    right = config.reference
    local = layer.config.n_local_experts
    experts = SampleExperts(layer.config.format, local, right.shared)
    y = rank.empty("bf16", (layer.config.max_recv_tokens, config.hidden))
    times: dict[str, list[float]] = {"dispatch": [], "expert": [], "combine": []}
    problems: list[str] = []
    largest, ratio = 0.0, 0.0
    routings: list[reference.Routing] = []
    received = 0
    for launch in range(config.launches):
        routings = routings_of(config, launch, loaded)
        tokens = tokens_of(config, launch, routings)
        mine = routings[rank.index]
        x, ids, weights = rank.array(tokens[rank.index]), rank.array(mine.topk_idx), rank.array(mine.topk_weights)
        marks = [rank.device.event() for _ in range(4)]
        rank.barrier()
        marks[0].record()
        options: dict[str, Any] = {"shared_tokens": right.shared_part(rank.index, mine.n_tokens), "input_scale": config.input_scale}
        if config.fused:
            handle = layer.dispatch(x, ids, weights, **options)
        else:
            handle = layer.dispatch_wait(layer.dispatch_async(x, ids, weights, **options))
        marks[1].record()
        experts.scale.launch(rank, grid=layer.config.n_sms, block=layer.config.num_threads, args=(y, handle.received, rank.index * local))
        marks[2].record()
        if config.fused:
            combined = layer.combine(y, handle)
        else:
            layer.combine_async(y, handle)
            combined = layer.combine_wait(handle)
        marks[3].record()
        rank.synchronize()
        for name, start, end in zip(times, marks, marks[1:], strict=False):
            times[name].append(1e3 * end.elapsed_ms(start))
        received = int(handle.row_offsets.numpy()[-1])
        problems += right.check_dispatch(layer, handle, rank.index, tokens, routings)
        error = right.check_combine(tokens[rank.index], routings, rank.index, combined.numpy())
        largest, ratio = max(largest, error.largest), max(ratio, error.ratio)
        if not error.ratio <= 1:
            token, column = error.place
            problems.append(
                f"rank {rank.index}, launch {launch}: the combine of token {token} column {column} is {error.ratio:.3g} times its bound "
                "away from the exact sum"
            )
        if rank.index == 0 and config.progress:
            with Path(config.progress).open("ab") as file:
                file.write(b".")
    if config.trace and isinstance(trace, RingTrace):
        events, dropped = read_rings(layer.trace_memory.numpy(), trace)
        write_rank(rank_trace_path(config.trace, rank.index), RankTrace(rank.index, rank.device.info.name, *clock, dropped, events))
    routings = right.sent(routings, rank.index)
    sent = reference.sent_selections(routings[rank.index].topk_idx, config.experts)
    owner = routings[rank.index].topk_idx // local
    away = int((sent & (owner != rank.index)).sum())
    here = int((sent & (owner == rank.index)).sum())
    returned = int(reference.expected_counts(routings, config.experts, rank.index).sum()) - here
    row_bytes = COMBINE_BYTES_PER_ELEMENT * config.hidden
    info = rank.device.info
    return RankResult(
        rank=rank.index,
        device=info.name,
        target=info.target,
        grid=layer.config.n_sms,
        block=layer.config.num_threads,
        tokens=routings[rank.index].n_tokens,
        received=received,
        dispatch_bytes=away * layer.config.dispatch_kernel.msg_bytes,
        combine_bytes=returned * row_bytes,
        local_bytes=here * (layer.config.dispatch_kernel.msg_bytes + row_bytes),
        dispatch_us=times["dispatch"],
        expert_us=times["expert"],
        combine_us=times["combine"],
        largest_error=largest,
        error_ratio=ratio,
        problems=problems,
    )
