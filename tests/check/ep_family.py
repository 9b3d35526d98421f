"""The fused and the split exchange: launches over the same buffers, back to back, with nothing on the host between them."""

from __future__ import annotations

from typing import Any, Literal

import ml_dtypes
import numpy as np

import epdsl as ep
from epdsl import reference
from epdsl.moe import ExpertParallel, RoutingError

EXPERTS, TOP_K, TOKENS, HIDDEN = 8, 2, 5, 64


def inputs_of(rank: Any, launch: int, wrong: bool, experts: int, hidden: int) -> tuple[Any, Any, Any]:
    routing = reference.skewed_routing(7, rank.index, launch, TOKENS, experts, TOP_K)
    ids = routing.topk_idx.copy()
    if wrong:
        # Out of range on two tokens, repeated on two others, so that two blocks count each kind.
        ids[0:2, 0] = experts + 3
        ids[2:4] = ids[2, 0] % experts
    x = np.random.default_rng(rank.index).standard_normal((TOKENS, hidden)).astype(ml_dtypes.bfloat16)
    return x, ids, routing.topk_weights


Shape = Literal["both", "dispatch", "combine"]


def layer_of(rank: Any, experts: int, **options: Any) -> ExpertParallel:
    return ExpertParallel(
        rank,
        n_experts=experts,
        top_k=TOP_K,
        max_tokens_per_rank=TOKENS,
        **{"hidden": HIDDEN, "num_threads": 2 * rank.device.info.warp_size, "n_sms": 6, **options},
    )


def _family(
    rank: Any,
    fused: bool = True,
    wrong: Literal["", "ids", "source"] = "",
    shape: Shape = "both",
    launches: int = 3,
    experts: int = EXPERTS,
    routed: bool = True,
    **options: Any,
) -> None:
    """`launches` dispatches, combines, or both in turn; the rows go back as they came, or zeros for a format that is not bf16."""
    layer = layer_of(rank, experts, **options)
    inputs = [tuple(rank.array(a) for a in inputs_of(rank, n, wrong == "ids", experts, layer.config.hidden)) for n in range(launches)]
    y = None if layer.config.token_format == "bf16" else rank.zeros("bf16", (layer.config.max_recv_tokens, layer.config.hidden))
    if not routed:
        for _, ids, _ in inputs:
            ids.fill_bytes(0xFF)
    rank.barrier()
    handle: Any = None
    for x, ids, weights in inputs:
        if shape != "combine" or handle is None:
            handle = layer.dispatch(x, ids, weights) if fused else layer.dispatch_wait(layer.dispatch_async(x, ids, weights))
        if wrong == "source":
            # What a kernel between dispatch and combine might do by mistake.
            handle.src_info.fill_bytes(0xFF)
        if shape != "dispatch" and fused:
            layer.combine(handle.output if y is None else y, handle)
        elif shape != "dispatch":
            layer.combine_async(handle.output if y is None else y, handle)
            layer.combine_wait(handle)
    try:
        rank.synchronize()
    except RoutingError:
        if not wrong:
            raise
    layer.close()


@ep.scenario(ranks=2)
def fused_rank(rank):
    _family(rank)


@ep.scenario(ranks=2)
def split_rank(rank):
    _family(rank, fused=False)


@ep.scenario(ranks=2)
def fused_expert(rank):
    _family(rank, completion="expert")


@ep.scenario(ranks=2)
def split_expert(rank):
    _family(rank, fused=False, completion="expert")


@ep.scenario(ranks=2)
def wrong_ids(rank):
    _family(rank, wrong="ids")


@ep.scenario(ranks=2)
def wrong_ids_in_two_launches(rank):
    _family(rank, fused=False, wrong="ids", launches=1)


@ep.scenario(ranks=2)
def dispatches(rank):
    """Nothing between two dispatches but their own acknowledgement."""
    _family(rank, shape="dispatch")


@ep.scenario(ranks=2)
def combines(rank):
    """Nothing between two combines but their own acknowledgement."""
    _family(rank, shape="combine")


@ep.scenario(ranks=2)
def dispatches_in_two_launches(rank):
    _family(rank, fused=False, shape="dispatch")


@ep.scenario(ranks=2)
def combines_in_two_launches(rank):
    _family(rank, fused=False, shape="combine")


@ep.scenario(ranks=2)
def dispatches_by_expert(rank):
    _family(rank, shape="dispatch", completion="expert")


@ep.scenario(ranks=2)
def combines_by_expert(rank):
    _family(rank, shape="combine", completion="expert")


@ep.scenario(ranks=2)
def wrong_source(rank):
    _family(rank, wrong="source", launches=1)


@ep.scenario(ranks=2)
def wrong_source_in_two_launches(rank):
    _family(rank, fused=False, wrong="source", launches=1)


@ep.scenario(ranks=2)
def wrong_source_by_pairs(rank):
    _family(rank, wrong="source", launches=1, combine_schedule="legacy")


@ep.scenario(ranks=2)
def wrong_source_by_pairs_in_two_launches(rank):
    _family(rank, fused=False, wrong="source", launches=1, combine_schedule="legacy")


@ep.scenario(ranks=2)
def wrong_source_by_rows(rank):
    _family(rank, wrong="source", launches=1, combine_schedule="balanced")


@ep.scenario(ranks=2)
def wrong_source_by_rows_in_two_launches(rank):
    _family(rank, fused=False, wrong="source", launches=1, combine_schedule="balanced")


def _more_experts_than_threads(rank: Any, fused: bool = True) -> None:
    """So many local experts that a thread adds up several."""
    _family(rank, fused, launches=1, experts=2 * (64 + 8), num_threads=64)


@ep.scenario(ranks=2)
def more_experts_than_threads(rank):
    _more_experts_than_threads(rank)


@ep.scenario(ranks=2)
def more_experts_than_threads_in_two_launches(rank):
    _more_experts_than_threads(rank, fused=False)


@ep.scenario(ranks=2)
def more_experts_than_blocks(rank):
    _family(rank, n_sms=3)


@ep.scenario(ranks=2)
def more_experts_than_blocks_in_two_launches(rank):
    _family(rank, fused=False, n_sms=3, shape="dispatch", launches=2)


@ep.scenario(ranks=2)
def every_release(rank):
    _family(rank, completion="every")


@ep.scenario(ranks=2)
def every_release_by_rows(rank):
    _family(rank, completion="every", combine_schedule="balanced", launches=2)


@ep.scenario(ranks=2)
def final_layout(rank):
    """Every rank tells every other its counts; copy blocks are divided in proportion."""
    _family(rank, shape="dispatch", ep_final_layout=True, sm_schedule="proportional")


@ep.scenario(ranks=2)
def reserved(rank):
    """Nothing between two dispatches that reserve their rows at the destination."""
    _family(rank, shape="dispatch", ep_final_layout=True, ep_prod_reserve=True)


@ep.scenario(ranks=2)
def reserved_split_joined(rank):
    """Some warps pack and some send, and meet at a named barrier."""
    _family(
        rank,
        completion="expert",
        ep_final_layout=True,
        ep_prod_reserve=True,
        ep_copy_role_split=True,
        ep_send_join_named=True,
        num_threads=6 * rank.device.info.warp_size,
    )


@ep.scenario(ranks=2)
def shared_expert_in_tiles(rank):
    """A shared expert, scales in tiles, and a combine whose warps share the rows evenly."""
    _family(rank, token_format="nvfp4", hidden=128, fused_shared_expert=True, combine_schedule="balanced", n_sms=4, launches=2)


def _staged(rank: Any, fused: bool = True, routed: bool = True) -> None:
    """The copy engine takes rows through shared memory, in two parts; several blocks pack the shared expert's rows."""
    options = {"token_format": "mxfp8", "hidden": 128, "staged": True, "tile_claims": 2, "fused_shared_expert": True, "n_sms": 6}
    _family(rank, fused, shape="dispatch", routed=routed, **options)


@ep.scenario(ranks=2)
def staged(rank):
    _staged(rank)


@ep.scenario(ranks=2)
def staged_in_two_launches(rank):
    _staged(rank, fused=False)


@ep.scenario(ranks=2)
def staged_for_the_shared_expert_alone(rank):
    _staged(rank, routed=False)


@ep.scenario(ranks=2)
def staged_for_the_shared_expert_alone_in_two_launches(rank):
    _staged(rank, fused=False, routed=False)


@ep.scenario(ranks=2)
def padded_unreduced(rank):
    _family(rank, token_format="fp8", hidden=128, combine_schedule="legacy", unreduced=True, launches=2)


@ep.scenario(ranks=2)
def combines_by_pairs(rank):
    """A block sends the rows of a pair after the other, with no barrier before the first."""
    _family(rank, shape="combine", combine_schedule="legacy")


@ep.scenario(ranks=2)
def combines_by_pairs_in_two_launches(rank):
    _family(rank, fused=False, shape="combine", combine_schedule="legacy")


@ep.scenario(ranks=2)
def combines_by_rows_in_two_launches(rank):
    _family(rank, fused=False, shape="combine", combine_schedule="balanced")


@ep.scenario(ranks=2)
def combines_by_rows_and_expert_in_two_launches(rank):
    _family(rank, fused=False, shape="combine", combine_schedule="balanced", completion="expert")


@ep.scenario(ranks=2)
def combines_by_rows_and_every_release_in_two_launches(rank):
    _family(rank, fused=False, shape="combine", combine_schedule="balanced", completion="every")


@ep.scenario(ranks=2)
def balanced_combines(rank):
    """Nothing between two combines whose warps share the rows evenly."""
    _family(rank, shape="combine", combine_schedule="balanced", completion="expert")


@ep.scenario(ranks=2)
def within_a_device(rank):
    _family(rank, skip_a2a=True, fused_shared_expert=True, completion="expert", combine_schedule="balanced")


@ep.scenario(ranks=2)
def within_a_device_by_rank(rank):
    _family(rank, skip_a2a=True, combine_schedule="balanced")


@ep.scenario(ranks=2)
def within_a_device_reserved(rank):
    _family(rank, skip_a2a=True, ep_final_layout=True, ep_prod_reserve=True)


@ep.scenario(ranks=2)
def within_a_device_split(rank):
    _family(rank, fused=False, skip_a2a=True, ep_final_layout=True, completion="every")
