"""Timing of launches on GPUs: device events, ranks lined up on the device, caches flushed; and what the machine can do, measured alike."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import epdsl as ep

if TYPE_CHECKING:
    from epdsl_runtime.rank import Rank

FLUSH_BYTES = 256 << 20
WARM_UP = 10
# Long enough for the host to queue the launch that is timed.
LINE_UP_NS = 150_000
PUSH_BYTES = 64 << 20
# A warp of either vendor, or two.
BLOCK = 64


@ep.kernel
def line_up(flags: ep.Peers[ep.u32], me: ep.i32, number: ep.u32, pause_ns: ep.i32):
    """All ranks leave together: they meet, pause while their hosts queue what follows, and meet again."""
    for r in range(ep.thread_idx.x, flags.size, ep.block_dim.x):
        # Pairs with the wait of the other ranks; nothing but the meeting is ordered, so SEQ_CST is not needed.
        ep.store(flags[r] + me, 2 * number, order=ep.RELEASE, scope=ep.SYSTEM)
        ep.wait(
            flags[me] + r, until=lambda v: ep.i32(v - 2 * number) >= 0, order=ep.ACQUIRE, scope=ep.SYSTEM, timeout_ns=20 * 10**9
        )  # fmt: skip
    ep.barrier()
    start = ep.globaltimer()
    while ep.globaltimer() - start < ep.u64(pause_ns):
        ep.sleep_ns(200)
    ep.barrier()
    for r in range(ep.thread_idx.x, flags.size, ep.block_dim.x):
        # Pairs with the wait of the other ranks, as above.
        ep.store(flags[r] + me, 2 * number + 1, order=ep.RELEASE, scope=ep.SYSTEM)
        ep.wait(
            flags[me] + r, until=lambda v: ep.i32(v - 2 * number - 1) >= 0, order=ep.ACQUIRE, scope=ep.SYSTEM, timeout_ns=20 * 10**9
        )  # fmt: skip


@ep.kernel
def nothing(never: ep.i32):
    """What two events around a launch cost."""
    if never != 0:
        ep.trap()


@ep.kernel
def push(target: ep.Peers[ep.u32], me: ep.i32, pieces: ep.i32):
    """`pieces` of 16 bytes to each other rank: what the links carry when every rank sends to all at once."""
    first = ep.block_idx.x * ep.block_dim.x + ep.thread_idx.x
    value = ep.vec(ep.u32, 4)(ep.u32(me))
    for step in range(1, target.size):
        to = target[(me + step) % target.size]
        for i in range(first, pieces, ep.block_dim.x * ep.grid_dim.x):
            ep.store(to + ep.i64(i) * 4, value)


@ep.kernel
def copy(source: ep.Ptr[ep.u32], target: ep.Ptr[ep.u32], pieces: ep.i32):
    """`pieces` of 16 bytes, four in flight a thread; pieces is a multiple of four times the threads of the launch."""
    threads = ep.block_dim.x * ep.grid_dim.x
    for first in range(ep.block_idx.x * ep.block_dim.x + ep.thread_idx.x, pieces, 4 * threads):
        found = tuple(ep.load(source + (ep.i64(first) + i * threads) * 4, width=4) for i in range(4))
        for i in ep.unroll(range(4)):
            ep.store(target + (ep.i64(first) + i * threads) * 4, found[i])


@dataclass(frozen=True)
class Timing:
    """Microseconds between two events around a launch: the slowest rank of each repetition, then the median over repetitions.

    less_empty   the same, less an empty kernel measured the same way
    """

    median_us: float
    least_us: float
    most_us: float
    less_empty: float


@dataclass(frozen=True)
class Rates:
    """What the machine does at best, in GB/s of one GPU.

    link    16-byte stores of all multiprocessors to all peers, in every direction at once; infinite for a rank alone
    memory  bytes read and written by a copy inside a GPU
    """

    link: float
    memory: float


class Stopwatch:
    """Times launches on one rank, together with the other ranks.

    repetitions  timed launches, after WARM_UP of them
    flush_bytes  written before each launch, so that nothing is left in the caches; the rates are measured on as many
    """

    def __init__(self, rank: Rank, repetitions: int = 50, flush_bytes: int = FLUSH_BYTES) -> None:
        self.rank = rank
        self.repetitions = repetitions
        self.flush_bytes = flush_bytes
        self._flags = rank.symmetric("u32", rank.size, name="line up")
        self._number = 0
        self._flush = rank.empty("u8", flush_bytes)
        self._events = [(rank.device.event(), rank.device.event()) for _ in range(repetitions + WARM_UP)]
        self.empty_us = 0.0
        self._rates: Rates | None = None
        self._line_up = line_up.prepare(rank, grid=1, block=BLOCK, args=(self._flags.peers, rank.index, 0, LINE_UP_NS))
        self.empty_us = self.time(nothing.prepare(rank, grid=1, block=BLOCK, args=(0,))).median_us

    def time(self, launch: Callable[[], object], pause_ns: int = LINE_UP_NS) -> Timing:
        """Times `launch`, work for the default stream that is queued within `pause_ns`. Every rank calls this together."""
        rank = self.rank
        found: list[float] = []
        for first, last in self._events:
            self._number += 1
            rank.device.memset(self._flush.address, self._number & 0xFF, self.flush_bytes)
            self._line_up.set(number=self._number, pause_ns=pause_ns)()
            first.record()
            launch()
            last.record()
            rank.device.synchronize()
            found.append(last.elapsed_ms(first) * 1e3)
        slowest = [max(each) for each in zip(*rank.allgather(found), strict=True)][WARM_UP:]
        median = statistics.median(slowest)
        return Timing(median, min(slowest), max(slowest), median - self.empty_us)

    def rates(self) -> Rates:
        """Measured when first asked for. Every rank asks together."""
        if self._rates is None:
            self._rates = self._measure()
        return self._rates

    def _measure(self) -> Rates:
        rank, threads = self.rank, 1024
        blocks = min(rank.device.info.num_sms, self.flush_bytes // (16 * 4 * threads))
        link = float("inf")
        if rank.size > 1:
            pieces = min(PUSH_BYTES, self.flush_bytes) // 16 // (rank.size - 1)
            target = rank.symmetric("u32", pieces * 4, name="push")
            timing = self.time(push.prepare(rank, grid=blocks, block=threads, args=(target.peers, rank.index, pieces)))
            link = pieces * 16 * (rank.size - 1) / timing.less_empty / 1e3
            rank.release(target)
        unit = 4 * threads * blocks
        pieces = self.flush_bytes // 16 // unit * unit
        other = rank.empty("u32", pieces * 4)
        timing = self.time(copy.prepare(rank, grid=blocks, block=threads, args=(self._flush.view("u32"), other, pieces)))
        return Rates(link, 2 * 16 * pieces / timing.less_empty / 1e3)
