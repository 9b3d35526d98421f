"""Going on without ranks that died: a routing over the experts of all ranks as one over the experts of those that live.

    rank = rank.shrink(dead)                                    # after a PeerTimeout or RankFailed
    layer = LowLatencyMoE(rank, n_experts=experts_per_rank * rank.size, ...)
    ids, dropped = route_around(topk_idx, experts_per_rank, dead)
    handle = layer.dispatch(x, ids, topk_weights)

The experts of a rank keep their parameters: local expert e of rank r is expert `rank.originals[r] * experts_per_rank + e` of the first job.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray


def route_around(topk_idx: Any, experts_per_rank: int, dead: Iterable[int]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """A routing for the layer of the ranks that live, and how many selections of each token it leaves out.

    topk_idx          [n_tokens, top_k] integers, what NumPy reads: expert ids of the layer before, rank r's from r * experts_per_rank on;
                      a negative one selects none
    experts_per_rank  of that layer, and of the one after
    dead              the ranks that `Rank.shrink` was given, in that layer's numbering

    Returns the ids of the layer after, -1 where the expert is gone or none was selected, [n_tokens, top_k] i32; and [n_tokens] i32, the
    selections whose expert is gone. What those experts would have added is missing from the token's sum, with its weight.

    Raises ValueError for another shape, TypeError for ids that are no integers.
    """
    ids = np.asarray(topk_idx)
    if ids.ndim != 2:
        raise ValueError(f"topk_idx has shape {ids.shape}; it is [n_tokens, top_k]")
    if ids.dtype.kind not in "iu":
        raise TypeError(f"topk_idx holds {ids.dtype}; expert ids are integers")
    if experts_per_rank < 1:
        raise ValueError(f"experts_per_rank={experts_per_rank}; it must be at least 1")
    gone = np.array(sorted(set(dead)), np.int64)
    if len(gone) and gone[0] < 0:
        raise ValueError(f"dead has rank {gone[0]}; ranks count from 0")
    owner = ids.astype(np.int64) // experts_per_rank
    lost = np.isin(owner, gone)
    moved = ids - np.searchsorted(gone, owner) * experts_per_rank
    return np.where(lost | (ids < 0), -1, moved).astype(np.int32), lost.sum(axis=1, dtype=np.int32)
