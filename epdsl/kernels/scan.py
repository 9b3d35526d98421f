"""Running sums over a block."""

from __future__ import annotations

import epdsl as ep

from .layout import ceildiv


@ep.func
def inclusive_prefix_sum(values: ep.Ptr[ep.i32], warp_sums: ep.Ptr[ep.i32], n: int, num_threads: int):
    """Replaces `n` shared values by their running sums. The whole block of `num_threads` calls it after a barrier; it ends with one.

    `warp_sums` is room in shared memory for one value a warp.
    """
    per_thread = ceildiv(n, num_threads)
    lane = ep.lane_id()
    begin = ep.thread_idx.x * per_thread
    end = ep.min(begin + per_thread, n)
    own = ep.i32(0)
    for i in range(begin, end):
        own += values[i]
    running = own
    for step in ep.unroll(range(ep.warp_size().bit_length() - 1)):
        below = ep.shfl_up(running, 1 << step)
        if lane >= 1 << step:
            running += below
    if lane == ep.warp_size() - 1:
        warp_sums[ep.warp_id()] = running
    ep.barrier()
    total = running - own
    for w in range(ep.warp_id()):
        total += warp_sums[w]
    for i in range(begin, end):
        total += values[i]
        values[i] = total
    ep.barrier()
