"""The expert-parallel kernel family as scenarios: launches over the same buffers, back to back, with nothing on the host between them."""

from __future__ import annotations

from typing import Any, Literal

import ml_dtypes
import numpy as np

import epdsl as ep
from epdsl import reference
from epdsl.moe import ExpertParallel, RoutingError

EXPERTS, TOP_K, TOKENS, HIDDEN = 8, 2, 5, 64


def _inputs(rank: Any, launch: int, wrong: bool) -> tuple[Any, Any, Any]:
    routing = reference.skewed_routing(7, rank.index, launch, TOKENS, EXPERTS, TOP_K)
    ids = routing.topk_idx.copy()
    if wrong:
        # Out of range on two tokens, repeated on two others, so that two blocks count each kind.
        ids[0:2, 0] = EXPERTS + 3
        ids[2:4] = ids[2, 0] % EXPERTS
    x = np.random.default_rng(rank.index).standard_normal((TOKENS, HIDDEN)).astype(ml_dtypes.bfloat16)
    return x, ids, routing.topk_weights


Shape = Literal["both", "dispatch", "combine"]


def _family(
    rank: Any, completion: Literal["rank", "expert"], fused: bool, wrong: bool = False, shape: Shape = "both", launches: int = 3
) -> None:
    """`launches` dispatches, combines, or both in turn; the rows go back as they came."""
    layer = ExpertParallel(
        rank,
        hidden=HIDDEN,
        n_experts=EXPERTS,
        top_k=TOP_K,
        max_tokens_per_rank=TOKENS,
        num_threads=64,
        n_sms=6,
        completion=completion,
    )
    inputs = [tuple(rank.array(a) for a in _inputs(rank, n, wrong)) for n in range(launches)]
    rank.barrier()
    handle: Any = None
    for x, ids, weights in inputs:
        if shape != "combine" or handle is None:
            handle = layer.dispatch(x, ids, weights) if fused else layer.dispatch_wait(layer.dispatch_async(x, ids, weights))
        if shape != "dispatch" and fused:
            layer.combine(handle.output, handle)
        elif shape != "dispatch":
            layer.combine_async(handle.output, handle)
            layer.combine_wait(handle)
    try:
        rank.synchronize()
    except RoutingError:
        if not wrong:
            raise
    layer.close()


@ep.scenario(ranks=2)
def fused_rank(rank):
    _family(rank, "rank", True)


@ep.scenario(ranks=2)
def split_rank(rank):
    _family(rank, "rank", False)


@ep.scenario(ranks=2)
def fused_expert(rank):
    _family(rank, "expert", True)


@ep.scenario(ranks=2)
def split_expert(rank):
    _family(rank, "expert", False)


@ep.scenario(ranks=2)
def wrong_ids(rank):
    _family(rank, "rank", True, wrong=True)


@ep.scenario(ranks=2)
def dispatches(rank):
    """Nothing between two dispatches but their own acknowledgement."""
    _family(rank, "rank", True, shape="dispatch")


@ep.scenario(ranks=2)
def combines(rank):
    """Nothing between two combines but their own acknowledgement."""
    _family(rank, "rank", True, shape="combine")


@ep.scenario(ranks=2)
def dispatches_by_expert(rank):
    _family(rank, "expert", True, shape="dispatch")


@ep.scenario(ranks=2)
def combines_by_expert(rank):
    _family(rank, "expert", True, shape="combine")
