"""Barriers between the same block of every GPU, and the buffer of counters they use.

A rank's `Signal` has, for every domain (a bank of counters for groups of one width), block and GPU, a counter of how often this block has
come to a barrier, and two sets of words that the peers write. Two, because a fast peer may come to the next barrier before this block has
left the last. Words are compared for equality, so counters may wrap.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

import epdsl as ep

from .layout import DEFAULT_TIMEOUT_NS

if TYPE_CHECKING:
    from epdsl_runtime.rank import Rank, Symmetric

NUM_BARRIER_DOMAINS = 8
MAX_NUM_BLOCKS = 1024
MAX_GPUS = 8
LAMPORT_GENERATIONS = 3
LAMPORT_SLOT_BYTES = 1 << 20
LAMPORT_REGION_BYTES = LAMPORT_GENERATIONS * MAX_GPUS * LAMPORT_SLOT_BYTES
LAMPORT_EMPTY = 0x80000000
"""A word nobody has written: -0.0, which a sender never sends."""

STATE_FLAG, STATE_PREV_NUM_PACKS, STATE_ARRIVAL, STATE_RESERVED = range(4)


@ep.struct
class Signal:
    """One rank's signal buffer.

    self_counter    [domain][block][gpu]: barriers this rank's block has come to with each GPU
    peer_counter    [domain][2][block][gpu]: what that GPU's block has come to, in the set of that barrier's parity
    lamport_state   flag, previous packs, arrivals, reserved: for the barrier-free all-reduce, which is still to come
    lamport_region  [3 generations][gpu][slot]: likewise; every word LAMPORT_EMPTY at first
    """

    self_counter: ep.Array[ep.u32, 65536]  # pyright: ignore[reportGeneralTypeIssues, reportInvalidTypeArguments]
    peer_counter: ep.Array[ep.u32, 131072]  # pyright: ignore[reportGeneralTypeIssues, reportInvalidTypeArguments]
    lamport_state: ep.Array[ep.u32, 4]  # pyright: ignore[reportGeneralTypeIssues, reportInvalidTypeArguments]
    lamport_region: ep.Array[ep.u8, 25165824]  # pyright: ignore[reportGeneralTypeIssues, reportInvalidTypeArguments]


@ep.func
def unsafe_ptr_from(signal_buffer: ep.Ptr[ep.u8]) -> ep.Ptr[Signal]:
    """A rank's signal buffer as a Signal. It must have `Signal.nbytes` bytes and have been through `init_signal_buffer`."""
    return signal_buffer.cast(Signal)


@ep.func
def lamport_state_ptr(signal: ep.Ptr[Signal]) -> ep.Ptr[ep.u32]:
    """The Lamport state; index it with STATE_*."""
    return signal.lamport_state


@ep.func
def lamport_region_ptr(signal: ep.Ptr[Signal], dtype):
    """The start of the Lamport region, as elements of `dtype`."""
    return signal.lamport_region.cast(dtype)


def init_signal_buffer(rank: Rank, name: str = "signals") -> Symmetric:
    """Collective: every rank's signal buffer, counters 0 and the Lamport region empty, ready on all ranks when it returns."""
    signals = rank.symmetric("u8", Signal.nbytes, name)  # pyright: ignore[reportAttributeAccessIssue]
    region = signals.local[Signal.nbytes - LAMPORT_REGION_BYTES :].view("u32")  # pyright: ignore[reportAttributeAccessIssue]
    region.copy_from(np.full(LAMPORT_REGION_BYTES // 4, LAMPORT_EMPTY, np.uint32))
    rank.synchronize()
    rank.barrier()
    return signals


@ep.func
def multi_gpu_barrier(
    rank_sigs: ep.Peers[ep.u8],
    my_rank: ep.i32,
    *,
    ngpus: int,
    is_start: bool,
    need_fence: bool,
    timeout_ns: int,
    domain: int = 0,
    group: Any = None,
):
    """The same-numbered block of every GPU meets. All threads of `group` (by default the block) call it, with at least `ngpus` threads.

    is_start    the start form holds back what follows until all have come; the end form waits for what precedes
    need_fence  with it, what any thread of any of the blocks wrote before is seen by every thread after; without, it orders nothing but
                the arrivals, which is enough where kernel boundaries order the memory
    domain      every group width that uses one buffer takes a domain of its own, since its counters advance on their own

    Every rank must make the same calls in the same order.
    """
    assert 1 <= ngpus <= MAX_GPUS, f"multi_gpu_barrier: {ngpus} GPUs, a signal buffer is for 1 to {MAX_GPUS}"
    assert 0 <= domain < NUM_BARRIER_DOMAINS, f"multi_gpu_barrier: domain {domain}, there are {NUM_BARRIER_DOMAINS}"
    base = 0
    if group is not None:
        base = group.thread_base
    block = ep.block_idx.x + ep.grid_dim.x * (ep.block_idx.y + ep.grid_dim.y * ep.block_idx.z)
    tid = ep.thread_idx.x - base
    if not is_start or need_fence:
        join(group)
    if tid >= 0 and tid < ngpus:
        own = unsafe_ptr_from(rank_sigs[my_rank])
        slot = own.self_counter + ((domain * MAX_NUM_BLOCKS + block) * MAX_GPUS + tid)
        # Plain: this thread of this block alone uses it.
        arrival = slot[0] + 1
        slot[0] = arrival
        bank = ((domain * 2 + ep.i32(arrival % 2)) * MAX_NUM_BLOCKS + block) * MAX_GPUS
        theirs = unsafe_ptr_from(rank_sigs[tid]).peer_counter + (bank + my_rank)
        mine = own.peer_counter + (bank + tid)
        if need_fence:
            # Pairs with the wait of the same block on GPU `tid`; the block's other threads' accesses happen before it by the join above.
            ep.store(theirs, arrival, order=ep.RELEASE, scope=ep.SYSTEM)
            ep.wait(mine, until=lambda v: v == arrival, order=ep.ACQUIRE, scope=ep.SYSTEM, timeout_ns=timeout_ns)
        else:
            # Relaxed: the arrival is all it says.
            ep.store(theirs, arrival, order=ep.RELAXED, scope=ep.SYSTEM)
            ep.wait(mine, until=lambda v: v == arrival, order=ep.RELAXED, scope=ep.SYSTEM, timeout_ns=timeout_ns)
    if is_start or need_fence:
        join(group)


@ep.func
def join(group):
    if group is None:
        ep.barrier()
    else:
        ep.group_barrier(group)


@dataclass(frozen=True)
class MultiGpuAllReduce:
    """A one-stage all-reduce: every rank reads every rank's part. It adds up the partial sums of a layer with skip_a2a.

    domain, named_barrier   of the multi-GPU barriers; named_barrier 0 is the block's
    """

    ngpus: int
    num_threads: int = 256
    domain: int = 0
    named_barrier: int = 0
    timeout_ns: int = DEFAULT_TIMEOUT_NS

    def __post_init__(self) -> None:
        if not 1 <= self.ngpus <= MAX_GPUS or not 0 <= self.domain < NUM_BARRIER_DOMAINS:
            raise ValueError(
                f"MultiGpuAllReduce: ngpus={self.ngpus} of at most {MAX_GPUS}, domain={self.domain} of {NUM_BARRIER_DOMAINS} domains"
            )

    @ep.kernel(max_threads=lambda self: self.num_threads)
    def all_reduce(self, output: ep.Ptr[ep.f32], parts: ep.Peers[ep.f32], signals: ep.Peers[ep.u8], n: ep.i32, my_rank: ep.i32):
        """output[i] = sum over ranks, in their order, of parts[rank][i], i < n. At most 1024 blocks, all resident."""
        group = None
        if self.named_barrier:
            group = ep.Group(0, self.num_threads, self.named_barrier)
        multi_gpu_barrier(
            signals, my_rank, ngpus=self.ngpus, is_start=True, need_fence=True, timeout_ns=self.timeout_ns, domain=self.domain, group=group
        )
        for i in range(ep.block_idx.x * self.num_threads + ep.thread_idx.x, n, ep.grid_dim.x * self.num_threads):
            total = ep.f32(0.0)
            for r in range(self.ngpus):
                total += parts[r][i]
            output[i] = total
        # Nobody may change its part before all have read it.
        multi_gpu_barrier(
            signals, my_rank, ngpus=self.ngpus, is_start=False, need_fence=True, timeout_ns=self.timeout_ns, domain=self.domain, group=group
        )
