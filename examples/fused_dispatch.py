"""One kernel, two classes of warps: comm warps run the dispatch, compute warps consume an expert's rows while others still arrive.

python examples/fused_dispatch.py             # two simulated ranks, or the GPUs with EPDSL_DEVICE=cuda
"""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np

import epdsl as ep
from epdsl import reference
from epdsl.kernels import BF16TokenFormat, RingTrace
from epdsl.kernels.fused_example import EPDispatchConsume
from epdsl.kernels.trace import Event
from epdsl.moe import ExpertParallel
from epdsl.trace import read_rings

HIDDEN, EXPERTS, TOP_K, TOKENS, TILE, BLOCKS = 256, 4, 2, 64, 8, 4


def main(rank: ep.Rank) -> str:
    """Runs on every rank. Says how much of the scatter was still to come when the first rows were consumed."""
    trace = RingTrace(capacity=512, rings_per_block=2)
    layer = ExpertParallel(
        rank,
        hidden=HIDDEN,
        n_experts=EXPERTS,
        top_k=TOP_K,
        max_tokens_per_rank=TOKENS,
        num_threads=256,
        n_sms=BLOCKS,
        token_format=BF16TokenFormat(HIDDEN, TOP_K, tile_rows=TILE),
        trace=trace,
    )
    fused = EPDispatchConsume(layer.config.dispatch_kernel, n_compute_threads=128, token_block=TILE)
    routing = reference.skewed_routing(1, rank.index, 0, TOKENS, EXPERTS, TOP_K)
    x = reference.sample_tokens(1, rank.index, 0, TOKENS, HIDDEN)
    handle, state, tokens = layer.dispatch_arguments(x, routing.topk_idx, routing.topk_weights)

    memory = rank.zeros("u64", trace.words(BLOCKS))
    received = replace(handle.received, l1_arrival=rank.zeros("u32", fused.l1_arrival_size()))
    y = rank.empty("bf16", (layer.config.max_recv_tokens, HIDDEN))
    args = (replace(state, trace=memory), tokens, received, y)
    fused.dispatch_and_consume.launch(rank, grid=BLOCKS, block=fused.num_threads, args=args, cooperative=True)
    rank.synchronize()

    offsets = handle.row_offsets.numpy().astype(np.int64)
    experts = np.repeat(np.arange(EXPERTS // rank.size) + rank.index * (EXPERTS // rank.size), np.diff(offsets))
    wanted = reference.apply_expert(handle.output[: offsets[-1]].numpy(), experts)
    assert np.array_equal(y[: offsets[-1]].numpy().view(np.uint16), wanted.view(np.uint16))
    events, _ = read_rings(memory.numpy(), trace)
    first = min(e.time for e in events if e.event == Event.CONSUME)
    released = [e.time for e in events if e.event == Event.L1_RELEASE]
    return f"{sum(t > first for t in released)} of {len(released)} tiles"


if __name__ == "__main__":
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    print("still to be scattered when the first rows were consumed, on each rank:", ep.spawn(main, ranks=ranks))
