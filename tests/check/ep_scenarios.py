"""The expert-parallel kernel family as scenarios: launches over the same buffers, back to back, with nothing on the host between them."""

from __future__ import annotations

from typing import Any, Literal

import ml_dtypes
import numpy as np

import epdsl as ep
from epdsl import reference
from epdsl.moe import ExpertParallel, RoutingError
from epdsl.moe_low_latency import LowLatencyMoE
from epdsl.moe_throughput import ThroughputMoE

EXPERTS, TOP_K, TOKENS, HIDDEN = 8, 2, 5, 64


def _inputs(rank: Any, launch: int, wrong: bool, experts: int) -> tuple[Any, Any, Any]:
    routing = reference.skewed_routing(7, rank.index, launch, TOKENS, experts, TOP_K)
    ids = routing.topk_idx.copy()
    if wrong:
        # Out of range on two tokens, repeated on two others, so that two blocks count each kind.
        ids[0:2, 0] = experts + 3
        ids[2:4] = ids[2, 0] % experts
    x = np.random.default_rng(rank.index).standard_normal((TOKENS, HIDDEN)).astype(ml_dtypes.bfloat16)
    return x, ids, routing.topk_weights


Shape = Literal["both", "dispatch", "combine"]


def _family(
    rank: Any,
    completion: Literal["rank", "expert"],
    fused: bool = True,
    wrong: Literal["", "ids", "source"] = "",
    shape: Shape = "both",
    launches: int = 3,
    experts: int = EXPERTS,
    blocks: int = 6,
) -> None:
    """`launches` dispatches, combines, or both in turn; the rows go back as they came."""
    layer = ExpertParallel(
        rank,
        hidden=HIDDEN,
        n_experts=experts,
        top_k=TOP_K,
        max_tokens_per_rank=TOKENS,
        num_threads=2 * rank.device.info.warp_size,
        n_sms=blocks,
        completion=completion,
    )
    inputs = [tuple(rank.array(a) for a in _inputs(rank, n, wrong == "ids", experts)) for n in range(launches)]
    rank.barrier()
    handle: Any = None
    for x, ids, weights in inputs:
        if shape != "combine" or handle is None:
            handle = layer.dispatch(x, ids, weights) if fused else layer.dispatch_wait(layer.dispatch_async(x, ids, weights))
        if wrong == "source":
            # What a kernel between dispatch and combine might do by mistake.
            handle.src_info.fill_bytes(0xFF)
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
    _family(rank, "rank", True, wrong="ids")


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


@ep.scenario(ranks=2)
def wrong_source(rank):
    _family(rank, "rank", wrong="source")


@ep.scenario(ranks=2)
def more_experts_than_threads(rank):
    _family(rank, "rank", shape="dispatch", launches=2, experts=2 * rank.device.info.warp_size + 16)


@ep.scenario(ranks=2)
def more_experts_than_blocks(rank):
    _family(rank, "rank", blocks=3)


def _other(rank: Any, layer: Any, hidden: int) -> None:
    """Two dispatches and combines of another mode's layer, back to back."""
    routing = reference.skewed_routing(1, rank.index, 0, 4, 4, TOP_K)
    x = np.random.default_rng(rank.index).standard_normal((4, hidden)).astype(ml_dtypes.bfloat16)
    given = [rank.array(a) for a in (x, routing.topk_idx, routing.topk_weights)]
    rank.barrier()
    for _ in range(2):
        handle = layer.dispatch(*given)
        layer.combine(handle.rows if hasattr(handle, "rows") else handle.x, handle)
    rank.synchronize()
    layer.close()


@ep.scenario(ranks=2)
def low_latency(rank):
    layer = LowLatencyMoE(rank, hidden=256, n_experts=4, top_k=TOP_K, max_tokens_per_rank=4, fp8=False, num_threads=64)
    _other(rank, layer, 256)


@ep.scenario(ranks=2)
def throughput(rank):
    layer = ThroughputMoE(rank, hidden=256, n_experts=4, top_k=TOP_K, max_tokens_per_rank=4, n_blocks=3)
    _other(rank, layer, 256)
