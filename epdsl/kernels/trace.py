"""Records of what a kernel did when: a policy that emits nothing, and one that keeps the last events of each block in a ring.

A ring in global memory is `2 + 2 * capacity` u64 words: how many events were stamped, the block, then (time, event << 32 | argument) each.
One thread writes a ring, so it needs no atomics; an event is two stores and a clock read, and old ones are overwritten.
"""

# A device function of a subclass takes the subclass as self, which a descriptor cannot say.
# pyright: reportIncompatibleVariableOverride=false

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import epdsl as ep


class Event(IntEnum):
    """What is stamped. BEGIN events have their END one higher."""

    HANDSHAKE = 0
    SEND_BEGIN = 2
    SEND_END = 3
    MONITOR_BEGIN = 4
    MONITOR_END = 5
    ARRIVALS_BEGIN = 6
    ARRIVALS_END = 7
    SCATTER_BEGIN = 8
    SCATTER_END = 9
    SHARED_BEGIN = 10
    SHARED_END = 11
    COMBINE_SEND_BEGIN = 12
    COMBINE_SEND_END = 13
    COMBINE_WAIT_BEGIN = 14
    COMBINE_WAIT_END = 15
    REDUCE_BEGIN = 16
    REDUCE_END = 17
    L1_RELEASE = 18
    CONSUME = 20


NAMES = {
    Event.SEND_BEGIN: "dispatch: copy and send tokens",
    Event.MONITOR_BEGIN: "dispatch: monitor and signal completion",
    Event.ARRIVALS_BEGIN: "dispatch: wait for arrivals, compute offsets",
    Event.SCATTER_BEGIN: "dispatch: copy received tokens",
    Event.SHARED_BEGIN: "dispatch: pack shared expert inputs",
    Event.COMBINE_SEND_BEGIN: "combine: send tokens back",
    Event.COMBINE_WAIT_BEGIN: "combine: wait for all arrivals",
    Event.REDUCE_BEGIN: "combine: reduce",
    Event.L1_RELEASE: "dispatch: L1 release",
    Event.CONSUME: "consume",
}


@dataclass(frozen=True)
class TraceBuf:
    """What a sink of trace events does. `stamp` is called by any one thread of a ring's writers."""

    @property
    def enabled(self) -> bool:
        return False

    def words(self, n_blocks: int) -> int:
        """u64 words of memory for a launch of that many blocks."""
        return 1

    @ep.func
    def ring(self, block: ep.i32, which: int) -> ep.i32:
        """Number of a block's ring."""
        return block

    @ep.func
    def stamp(self, memory: ep.Ptr[ep.u64], ring: ep.i32, event: int, argument):
        pass


@dataclass(frozen=True)
class NullTrace(TraceBuf):
    """Emits nothing: a kernel is the same as without its stamps."""


NO_TRACE = NullTrace()


@dataclass(frozen=True)
class RingTrace(TraceBuf):
    """Keeps the last `capacity` events of every ring; there are `rings_per_block` for each block."""

    capacity: int = 256
    rings_per_block: int = 1

    def __post_init__(self) -> None:
        if self.capacity < 1 or self.rings_per_block < 1:
            raise ValueError(f"RingTrace: capacity={self.capacity} and rings_per_block={self.rings_per_block} must be at least 1")

    @property
    def enabled(self) -> bool:
        return True

    @property
    def ring_words(self) -> int:
        return 2 + 2 * self.capacity

    def words(self, n_blocks: int) -> int:
        return n_blocks * self.rings_per_block * self.ring_words

    @ep.func
    def ring(self, block: ep.i32, which: int) -> ep.i32:
        return block * self.rings_per_block + which

    @ep.func
    def stamp(self, memory: ep.Ptr[ep.u64], ring: ep.i32, event: int, argument):
        words = memory + ep.i64(ring) * self.ring_words
        count = words[0]
        place = words + (2 + 2 * (count % self.capacity))
        place[0] = ep.globaltimer()
        place[1] = (ep.u64(int(event)) << 32) | ep.u64(ep.u32(argument))
        words[1] = ep.u64(ep.block_idx.x)
        words[0] = count + 1
