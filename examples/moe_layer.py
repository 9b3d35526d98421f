"""An expert-parallel layer in a few lines: dispatch, an expert of your own, combine.

python examples/moe_layer.py                  # two simulated ranks, or the GPUs with EPDSL_DEVICE=cuda
"""

from __future__ import annotations

import sys

import ml_dtypes
import numpy as np

import epdsl as ep
from epdsl.moe import ExpertParallel

HIDDEN, EXPERTS, TOP_K, TOKENS = 256, 8, 2, 12


@ep.kernel
def negate_rows(y: ep.Ptr[ep.bf16], x: ep.Ptr[ep.bf16], row_offsets: ep.Ptr[ep.u32], n_local_experts: ep.i32, hidden: ep.i32):
    """Every expert negates its rows: y = -x for all received rows."""
    n = ep.i64(row_offsets[n_local_experts]) * hidden
    for i in range(ep.i64(ep.block_idx.x * ep.block_dim.x + ep.thread_idx.x), n, ep.grid_dim.x * ep.block_dim.x):
        y[i] = -x[i]


def main(rank: ep.Rank) -> float:
    """Runs on every rank. Returns the largest difference from -x."""
    layer = ExpertParallel(rank, hidden=HIDDEN, n_experts=EXPERTS, top_k=TOP_K, max_tokens_per_rank=TOKENS)
    rng = np.random.default_rng(rank.index)
    x = rng.standard_normal((TOKENS, HIDDEN)).astype(ml_dtypes.bfloat16)
    topk_idx = np.stack([rng.permutation(EXPERTS)[:TOP_K] for _ in range(TOKENS)]).astype(np.int32)
    topk_weights = np.full((TOKENS, TOP_K), 1 / TOP_K, np.float32)

    handle = layer.dispatch(x, topk_idx, topk_weights)
    y = rank.empty("bf16", handle.output.shape)
    negate_rows.launch(rank, grid=4, block=256, args=(y, handle.output, handle.row_offsets, layer.config.n_local_experts, HIDDEN))
    out = layer.combine(y, handle)
    rank.synchronize()
    return float(np.abs(out.numpy().astype(np.float32) + x.astype(np.float32)).max())


if __name__ == "__main__":
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    print("largest difference from -x on each rank:", ep.spawn(main, ranks=ranks))
