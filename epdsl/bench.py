"""Timing of the exchange kernels on GPUs: device events, ranks lined up on the device, caches flushed, outputs checked in the same run."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

import epdsl as ep

if TYPE_CHECKING:
    from epdsl_runtime.rank import Rank

FLUSH_BYTES = 256 << 20
WARM_UP = 10
# Long enough for the host to queue the launch that is timed.
LINE_UP_NS = 150_000


@ep.kernel
def line_up(flags: ep.Peers[ep.u32], me: ep.i32, number: ep.u32, pause_ns: ep.i32):
    """All ranks leave together: they meet, pause while their hosts queue what follows, and meet again."""
    if ep.thread_idx.x < flags.size:
        # Pairs with the wait of the other ranks; nothing but the meeting is ordered, so SEQ_CST is not needed.
        ep.store(flags[ep.thread_idx.x] + me, 2 * number, order=ep.RELEASE, scope=ep.SYSTEM)
        ep.wait(
            flags[me] + ep.thread_idx.x,
            until=lambda v: ep.i32(v - 2 * number) >= 0,
            order=ep.ACQUIRE,
            scope=ep.SYSTEM,
            timeout_ns=20 * 10**9,
        )
    ep.barrier()
    start = ep.globaltimer()
    while ep.globaltimer() - start < ep.u64(pause_ns):
        ep.sleep_ns(200)
    ep.barrier()
    if ep.thread_idx.x < flags.size:
        ep.store(flags[ep.thread_idx.x] + me, 2 * number + 1, order=ep.RELEASE, scope=ep.SYSTEM)
        ep.wait(
            flags[me] + ep.thread_idx.x,
            until=lambda v: ep.i32(v - 2 * number - 1) >= 0,
            order=ep.ACQUIRE,
            scope=ep.SYSTEM,
            timeout_ns=20 * 10**9,
        )


@ep.kernel
def nothing(never: ep.i32):
    """What two events around a launch cost."""
    if never != 0:
        ep.trap()


@dataclass(frozen=True)
class Timing:
    """Microseconds between two events around a launch: the slowest rank of each repetition, then the median over repetitions.

    less_empty   the same, less an empty kernel measured the same way
    """

    name: str
    median_us: float
    least_us: float
    most_us: float
    less_empty: float = 0.0
    note: str = ""

    def row(self) -> dict[str, Any]:
        return asdict(self)


class Stopwatch:
    """Times launches on one rank, together with the other ranks."""

    def __init__(self, rank: Rank, repetitions: int = 50) -> None:
        self.rank = rank
        self.repetitions = repetitions
        self._flags = rank.symmetric("u32", max(32, rank.size), name="line up")
        self._number = 0
        self._flush = rank.empty("u8", FLUSH_BYTES)
        self._events = [(rank.device.event(), rank.device.event()) for _ in range(repetitions + WARM_UP)]
        self.empty_us = 0.0
        self._line_up = line_up.prepare(rank, grid=1, block=32, args=(self._flags.peers, rank.index, 0, LINE_UP_NS))
        self.empty_us = self.time("empty", nothing.prepare(rank, grid=1, block=32, args=(0,))).median_us

    def time(self, name: str, launch: Callable[[], object], note: str = "") -> Timing:
        """Times `launch`, a prepared launch into the default stream. Every rank calls this together."""
        rank = self.rank
        found: list[float] = []
        for first, last in self._events:
            self._number += 1
            rank.device.memset(self._flush.address, self._number & 0xFF, FLUSH_BYTES)
            self._line_up.set(number=self._number)()
            first.record()
            launch()
            last.record()
            rank.device.synchronize()
            found.append(last.elapsed_ms(first) * 1e3)
        slowest = [max(each) for each in zip(*rank.allgather(found), strict=True)][WARM_UP:]
        median = statistics.median(slowest)
        return Timing(name, median, min(slowest), max(slowest), median - self.empty_us, note)


def uniform_routing(rank: int, tokens: int, experts: int, top_k: int, seed: int) -> np.ndarray:
    """top_k different experts a token, all equally likely: [tokens, top_k] i32."""
    rng = np.random.default_rng([seed, rank])
    return np.argsort(rng.random((tokens, experts)), axis=1)[:, :top_k].astype(np.int32)


def latency_rank(
    rank: Rank, shapes: Sequence[tuple[int, int | None]], hidden: int, experts: int, top_k: int, seed: int, repetitions: int
) -> list[dict[str, Any]]:
    """The latency mode: dispatch FP8 and combine BF16 at each (tokens, blocks)."""
    from epdsl.moe_low_latency import LowLatencyMoE

    watch = Stopwatch(rank, repetitions)
    rows = [Timing("empty kernel", watch.empty_us, watch.empty_us, watch.empty_us).row()]
    for tokens, n_blocks in shapes:
        layer = LowLatencyMoE(rank, hidden=hidden, n_experts=experts, top_k=top_k, max_tokens_per_rank=tokens, n_blocks=n_blocks)
        rng = np.random.default_rng([seed, rank.index, tokens])
        x = rng.standard_normal((tokens, hidden)).astype(ml_dtypes.bfloat16)
        ids = uniform_routing(rank.index, tokens, experts, top_k, seed)
        weights = rng.random((tokens, top_k), np.float32)
        arrays = (rank.array(x, "bf16"), rank.array(ids, "i32"), rank.array(weights, "f32"))
        k = layer.kernel
        y = rank.array(rng.standard_normal((k.n_local_experts, k.capacity, hidden)).astype(ml_dtypes.bfloat16), "bf16")
        out = rank.empty("bf16", (tokens, hidden))
        handle = layer.dispatch(*arrays)
        rank.synchronize()
        check_latency(rank, layer, handle, seed, tokens, experts, top_k, hidden)
        blocks = f"{k.n_blocks} blocks x {k.num_threads}"
        dispatch, handle = layer.prepare_dispatch(*arrays)
        rows.append(watch.time(f"dispatch FP8, {tokens} tokens", dispatch, blocks).row())
        rows.append(watch.time(f"combine BF16, {tokens} tokens", layer.prepare_combine(y, handle, out), blocks).row())
        rank.barrier()
    return rows


def check_latency(rank: Rank, layer: Any, handle: Any, seed: int, tokens: int, experts: int, top_k: int, hidden: int) -> None:
    """Every row is the token it should be, within FP8's rounding. Raises AssertionError."""
    local = experts // rank.size
    counts = handle.expert_counts.numpy()
    row_of = handle.row_of.numpy()
    seen = 0
    inputs = [
        np.random.default_rng([seed, r, tokens]).standard_normal((tokens, hidden)).astype(ml_dtypes.bfloat16) for r in range(rank.size)
    ]
    routes = [uniform_routing(r, tokens, experts, top_k, seed) for r in range(rank.size)]
    rows = handle.rows.numpy().reshape(-1, hidden)
    scales = handle.scales.numpy().reshape(-1, hidden // 128)
    for r in range(rank.size):
        here = routes[r] // local == rank.index
        assert ((row_of[r] >= 0) == here).all(), f"rank {rank.index}: rows of rank {r}'s tokens are not where the routing says"
        where = row_of[r][here]
        seen += len(where)
        got = rows[where].astype(np.float32).reshape(len(where), -1, 128) * scales[where][..., None]
        wanted = np.repeat(inputs[r][:, None, :], top_k, axis=1)[here].astype(np.float32).reshape(len(where), -1, 128)
        assert (np.abs(got - wanted) <= np.abs(wanted) / 16 + scales[where][..., None] * 2**-9).all(), "rows differ beyond FP8's rounding"
    assert seen == counts.sum() == len(set(np.concatenate([row_of[r][row_of[r] >= 0] for r in range(rank.size)]).tolist()))


def throughput_rank(
    rank: Rank,
    shapes: Sequence[tuple[int, int, bool]],
    hidden: int,
    experts: int,
    top_k: int,
    seed: int,
    repetitions: int,
    **options: Any,
) -> list[dict[str, Any]]:
    """The throughput mode at each (tokens, blocks, fp8): rows once a destination rank out, one row a destination rank back."""
    from epdsl.moe_throughput import ThroughputMoE

    watch = Stopwatch(rank, repetitions)
    rows = [Timing("empty kernel", watch.empty_us, watch.empty_us, watch.empty_us).row()]
    for tokens, n_blocks, fp8 in shapes:
        layer = ThroughputMoE(
            rank, hidden=hidden, n_experts=experts, top_k=top_k, max_tokens_per_rank=tokens, n_blocks=n_blocks, fp8=fp8, **options
        )
        x, scales = throughput_input(rank.index, tokens, hidden, fp8, seed)
        ids = uniform_routing(rank.index, tokens, experts, top_k, seed)
        weights = np.random.default_rng([seed, rank.index]).random((tokens, top_k), np.float32)
        kind = "f8e4m3" if fp8 else "bf16"
        arrays = (rank.array(x, kind), rank.array(ids, "i32"), rank.array(weights, "f32"), rank.array(scales, "f32") if fp8 else None)
        name = f"{'FP8' if fp8 else 'BF16'}, {tokens} tokens, {n_blocks} blocks"
        layer.dispatch(*arrays)
        handle = layer.dispatch(*arrays)
        rank.synchronize()
        check_throughput(rank, handle, tokens, hidden, experts, top_k, fp8, seed)
        timing = watch.time(f"dispatch {name}", layer.prepare_dispatch(*arrays), "rows once a rank")
        remote = remote_rows(rank, ids, experts) * (layer.kernel.payload_bytes + layer.kernel.scale_bytes)
        rows.append({**timing.row(), "remote_gb_s": remote / timing.less_empty / 1e3})
        if not fp8:
            handle = layer.dispatch(*arrays)
            rank.synchronize()
            out = rank.empty("bf16", (tokens, hidden))
            rank.device.memset(out.address, 0xFF, out.nbytes)
            layer.combine(handle.rows, handle, out)
            rank.synchronize()
            # The rows went out and come back as they are, so a token's sum is itself, once for each rank it went to.
            ranks_of = np.array([len(set(row // (experts // rank.size))) for row in ids], np.float32)
            expected = (x.astype(np.float32) * ranks_of[:, None]).astype(ml_dtypes.bfloat16)
            wrong = np.flatnonzero((out.numpy() != expected).any(axis=1))
            assert not len(wrong), (
                f"rank {rank.index}: combine differs from its reference for {len(wrong)} tokens, first {wrong[:8].tolist()}"
            )
            timing = watch.time(f"combine {name}", layer.prepare_combine(handle.rows, handle, out), "rows once a rank")
            rows.append({**timing.row(), "remote_gb_s": remote_rows(rank, ids, experts) * 2 * hidden / timing.less_empty / 1e3})
        rank.barrier()
        layer.close()
    return rows


def remote_rows(rank: Rank, ids: np.ndarray, experts: int) -> int:
    """Rows that tokens with these selections send over the link, once for each other rank."""
    local = experts // rank.size
    return sum(int((ids // local == r).any(axis=1).sum()) for r in range(rank.size) if r != rank.index)


def throughput_input(rank: int, tokens: int, hidden: int, fp8: bool, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng([seed, rank, tokens])
    x = rng.standard_normal((tokens, hidden), np.float32)
    return x.astype(ml_dtypes.float8_e4m3fn if fp8 else ml_dtypes.bfloat16), rng.random((tokens, hidden // 128), np.float32)


def check_throughput(rank: Rank, handle: Any, tokens: int, hidden: int, experts: int, top_k: int, fp8: bool, seed: int) -> None:
    """Every row is the token it should be, bit for bit. Raises AssertionError."""
    local = experts // rank.size
    starts = handle.rank_rows.numpy()
    rows, token = handle.rows.numpy(), handle.token.numpy()
    for r in range(rank.size):
        x, scales = throughput_input(r, tokens, hidden, fp8, seed)
        routes = uniform_routing(r, tokens, experts, top_k, seed)
        chosen = np.flatnonzero((routes // local == rank.index).any(axis=1))
        mine = slice(int(starts[r]), int(starts[r + 1]))
        assert (token[mine] == chosen).all(), f"rank {rank.index}: rows of rank {r} are not the tokens the routing sends here"
        assert rows[mine].tobytes() == x[chosen].tobytes(), f"rank {rank.index}: rows of rank {r} differ"
        if fp8:
            assert handle.scales.numpy()[mine].tobytes() == scales[chosen].tobytes(), f"rank {rank.index}: scales of rank {r} differ"
