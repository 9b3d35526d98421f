"""How a rank knows, before a launch ends, that every peer has ended the launch before. Device functions for buffers of two banks.

Rank s writes bank n % 2 of rank d in launch n + 2; d reads it in launch n. s ends launch n + 1 only after d has said that its launch n + 1
has begun, so after d's launch n has ended.
"""

from __future__ import annotations

import epdsl as ep


@ep.func
def begin_launch(begun: ep.Peers[ep.u32], epoch: ep.u32, my_rank: ep.i32):
    """Block 0 tells every rank that this rank has begun launch `epoch`. begun [n_ranks]: the last launch that each rank has begun."""
    if ep.block_idx.x == 0 and ep.thread_idx.x < begun.size:
        # Pairs with the wait in end_launch on that rank.
        ep.store(begun[ep.thread_idx.x] + my_rank, epoch, order=ep.RELEASE, scope=ep.SYSTEM)


@ep.func
def end_launch(begun: ep.Peers[ep.u32], epoch: ep.u32, my_rank: ep.i32, timeout_ns: int):
    """Block 0 waits until every rank has begun launch `epoch`."""
    if ep.block_idx.x == 0 and ep.thread_idx.x < begun.size:
        # Pairs with the release in begin_launch on that rank; a peer may already be one launch ahead.
        ep.wait(
            begun[my_rank] + ep.thread_idx.x,
            until=lambda v: ep.i32(v - epoch) >= 0,
            order=ep.ACQUIRE,
            scope=ep.SYSTEM,
            timeout_ns=timeout_ns,
        )
