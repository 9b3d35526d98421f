"""The seeds' parameters as scenarios for the checker: two launches of dispatch and combine over the same buffers, nothing in between.

`epdsl check tests/sim/seeds_scenarios.py:NAME`. All but `seed_ordering` and `seed_ordering_combine` must be silent: those have the
original's relaxed election and plain count words, and the checker names them.
"""

from __future__ import annotations

from typing import Any

import epdsl as ep
from epdsl import reference
from epdsl.kernels.expert import SampleExperts
from epdsl.moe import ExpertParallel

EXPERTS, TOP_K, TOKENS, HIDDEN = 4, 2, 4, 128


def family(rank: Any, launches: int = 2, combine: bool = True, split: bool = False, **options: Any) -> None:
    layer = ExpertParallel(
        rank, hidden=HIDDEN, n_experts=EXPERTS, top_k=TOP_K, max_tokens_per_rank=TOKENS, **{"num_threads": 64, "n_sms": 4, **options}
    )
    experts = SampleExperts(layer.config.format, layer.config.n_local_experts, layer.config.fused_shared_expert)
    y = rank.empty("bf16", (layer.config.max_recv_tokens, HIDDEN))
    inputs: list[tuple[Any, ...]] = []
    for launch in range(launches):
        routing = reference.skewed_routing(7, rank.index, launch, TOKENS, EXPERTS, TOP_K)
        x = reference.sample_tokens(7, rank.index, launch, TOKENS, HIDDEN)
        inputs.append(tuple(rank.array(a) for a in (x, routing.topk_idx, routing.topk_weights)))
    rank.barrier()
    for x, ids, weights in inputs:
        handle = layer.dispatch_wait(layer.dispatch_async(x, ids, weights)) if split else layer.dispatch(x, ids, weights)
        experts.scale.launch(rank, grid=2, block=64, args=(y, handle.received, rank.index * layer.config.n_local_experts))
        if combine:
            layer.combine(y, handle)
    rank.synchronize()
    layer.close()


@ep.scenario(ranks=2)
def elected_expert(rank):
    family(rank, completion="expert")


@ep.scenario(ranks=2)
def every_release(rank):
    family(rank, completion="every")


@ep.scenario(ranks=2)
def seed_ordering(rank):
    family(rank, completion="expert", ordering="seed", combine=False)


@ep.scenario(ranks=2)
def seed_ordering_combine(rank):
    family(rank, completion="expert", ordering="seed", combine_schedule="balanced")


@ep.scenario(ranks=2)
def final_layout(rank):
    family(rank, ep_final_layout=True, sm_schedule="proportional")


@ep.scenario(ranks=2)
def reserved_split_joined(rank):
    family(
        rank,
        ep_final_layout=True,
        ep_prod_reserve=True,
        ep_copy_role_split=True,
        ep_send_join_named=True,
        num_threads=192,
        completion="expert",
    )


@ep.scenario(ranks=2)
def quantised_with_shared_expert(rank):
    family(rank, token_format="nvfp4", fused_shared_expert=True, combine_schedule="balanced")


@ep.scenario(ranks=2)
def padded_fp8(rank):
    family(rank, token_format="fp8", combine_schedule="legacy", unreduced=True)


@ep.scenario(ranks=2)
def staged_by_parts(rank):
    # Two launches: of a thread that fences in both halves the checker keeps the later fence alone.
    family(rank, split=True, token_format="mxfp8", staged=True, tile_claims=2, fused_shared_expert=True)


@ep.scenario(ranks=2)
def within_a_device(rank):
    family(rank, skip_a2a=True, fused_shared_expert=True, completion="expert", combine_schedule="balanced")


@ep.scenario(ranks=2)
def within_a_device_by_rank(rank):
    family(rank, skip_a2a=True, ep_final_layout=True, ep_prod_reserve=True)
