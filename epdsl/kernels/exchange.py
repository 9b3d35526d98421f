"""What `low_latency`, `throughput` and `expert_major` have in common: checks of a configuration, and a token's selections."""

from __future__ import annotations

from typing import Any

import epdsl as ep

from .blockwise import GROUP

GROUP_THREADS = 128
"""Threads that move a token together."""


def check_experts(n_experts: int, n_ranks: int, top_k: int) -> None:
    """Raises ValueError for experts that do not divide among the ranks, and for more selections than there are or a warp has lanes."""
    if n_experts % n_ranks:
        raise ValueError(f"n_experts={n_experts} does not divide among n_ranks={n_ranks}")
    if not 1 <= top_k <= min(32, n_experts):
        raise ValueError(f"top_k={top_k} of {n_experts} experts; it must be from 1 to {min(32, n_experts)}")


def check_hidden(hidden: int, fp8: bool) -> None:
    """Raises ValueError for a token that is not moved in whole pieces of 16 bytes."""
    unit = 4 * GROUP if fp8 else GROUP
    if hidden < unit or hidden % unit:
        raise ValueError(f"hidden={hidden} is not a multiple of {unit}, so that a token and its scales are multiples of 16 bytes")


def check_groups(num_threads: int) -> None:
    """Raises ValueError for a block that is not whole groups."""
    if num_threads % GROUP_THREADS or not GROUP_THREADS <= num_threads <= 1024:
        raise ValueError(f"num_threads={num_threads}; it must be a multiple of {GROUP_THREADS} from {GROUP_THREADS} to 1024")


def check_roles(phase: str, send_blocks: int, n_blocks: int) -> None:
    """Raises ValueError when all blocks send, or none does."""
    if not 0 < send_blocks < n_blocks:
        raise ValueError(f"{phase}: {send_blocks} sending blocks of n_blocks={n_blocks}; both roles need at least one")


@ep.func
def selections(topk_ids: ep.Ptr[ep.i32], token: ep.i32, top_k: int):
    """A token's selections; anything that is no expert stays as it is."""
    ids: tuple[Any, ...] = ()
    for k in ep.unroll(range(top_k)):
        at = topk_ids + token * top_k
        ids = (*ids, ep.load(at + k // 4 * 4, width=4)[k % 4] if top_k % 4 == 0 else at[k])
    return ids


@ep.func
def goes_to(ids: Any, rank: ep.i32, n_local_experts: int):
    """Whether one of a token's selections is an expert of `rank`."""
    first = rank * n_local_experts
    found = ep.i1(False)
    for expert in ids:
        found = found | ((expert >= first) & (expert < first + n_local_experts))
    return found


@ep.func
def distances(first: int, n_ranks: int, unrolled: int = 8):
    """The distances from `first` to the ranks: unrolled for few of them, so that the ranks' pointers are fetched early; else a loop."""
    if n_ranks <= unrolled:
        return ep.unroll(range(first, n_ranks))
    else:
        return range(first, n_ranks)
