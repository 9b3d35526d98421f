"""The latency mode whose words say themselves that they have arrived."""

from __future__ import annotations

from typing import Any

from ep_family import TOP_K, Shape
from ep_modes import back_to_back

import epdsl as ep
from epdsl.moe_low_latency import LowLatencyMoE


def _stamps(rank: Any, shape: Shape = "both", uneven: bool = False, fp8: bool = True, hidden: int = 256) -> None:
    layer = LowLatencyMoE(
        rank, hidden=hidden, n_experts=2 * rank.size, top_k=TOP_K, max_tokens_per_rank=3, fp8=fp8, num_threads=64, protocol="stamps"
    )
    back_to_back(rank, layer, shape, uneven)


@ep.scenario(ranks=2)
def stamps(rank):
    """More pieces than threads."""
    _stamps(rank, hidden=640)


@ep.scenario(ranks=3)
def stamps_of_16_bits(rank):
    _stamps(rank, fp8=False)


@ep.scenario(ranks=3)
def stamps_uneven(rank):
    """Blocks without a token of their own send and receive all the same."""
    _stamps(rank, uneven=True)


@ep.scenario(ranks=2)
def stamps_dispatches(rank):
    _stamps(rank, "dispatch")


@ep.scenario(ranks=2)
def stamps_combines(rank):
    _stamps(rank, "combine")


@ep.scenario(ranks=3)
def stamps_dispatches_uneven(rank):
    _stamps(rank, "dispatch", uneven=True, fp8=False)


@ep.scenario(ranks=3)
def stamps_combines_uneven(rank):
    _stamps(rank, "combine", uneven=True)
