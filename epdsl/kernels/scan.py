"""Running sums over a class of warps."""

from __future__ import annotations

import epdsl as ep

from .layout import ceildiv


@ep.func
def inclusive_prefix_sum(values: ep.Ptr[ep.i32], warp_sums: ep.Ptr[ep.i32], n: int, group):
    """Replaces `n` shared values by their running sums. All threads of `group` call it after a barrier; it ends with one.

    `warp_sums` is room in shared memory for one value a warp.
    """
    per_thread = ceildiv(n, group.num_threads)
    lane = ep.lane_id()
    tid = ep.thread_idx.x - group.thread_base
    warp = tid // ep.warp_size()
    begin = tid * per_thread
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
        warp_sums[warp] = running
    ep.group_barrier(group)
    total = running - own
    for w in range(warp):
        total += warp_sums[w]
    for i in range(begin, end):
        total += values[i]
        values[i] = total
    ep.group_barrier(group)
