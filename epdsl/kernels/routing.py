"""Which of a token's selections are sent."""

from __future__ import annotations

import epdsl as ep

from .layout import ROUTE_NONE, ROUTE_OUT_OF_RANGE, ROUTE_REPEATED


@ep.func
def appears_before(topk_ids: ep.Ptr[ep.i32], first: ep.i64, k: ep.i32, expert: ep.i32) -> ep.i32:
    """1 when one of the token's selections before `k` is `expert` too; `first` is the index of the token's selection 0."""
    repeated = ep.i32(0)
    for j in range(k):
        if topk_ids[first + j] == expert:
            repeated = ep.i32(1)
    return repeated


@ep.func
def route_of(topk_ids: ep.Ptr[ep.i32], first: ep.i64, k: ep.i32, n_experts: int) -> ep.i32:
    """The expert selection `k` is sent to, or ROUTE_NONE, ROUTE_OUT_OF_RANGE, ROUTE_REPEATED."""
    expert = topk_ids[first + k]
    if expert < -1 or expert >= n_experts:
        expert = ep.i32(ROUTE_OUT_OF_RANGE)
    elif expert == -1:
        expert = ep.i32(ROUTE_NONE)
    elif appears_before(topk_ids, first, k, expert) != 0:
        expert = ep.i32(ROUTE_REPEATED)
    return expert
