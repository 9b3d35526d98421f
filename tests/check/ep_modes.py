"""The latency mode and both throughput modes."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from ep_family import TOP_K, Shape

import epdsl as ep
from epdsl import reference
from epdsl.moe_expert_major import ExpertMajorMoE
from epdsl.moe_low_latency import LowLatencyMoE
from epdsl.moe_throughput import ThroughputMoE


@ep.kernel
def read_rows(
    rows: ep.Ptr[ep.u32], row_of: ep.Ptr[ep.i32], source_tokens: ep.Ptr[ep.i32], out: ep.Ptr[ep.u32], tokens: ep.i32, words: ep.i32
):
    """What an expert does with what it received: reads it. row_of [ranks, tokens, TOP_K], rows of `words` words."""
    total = ep.u32(0)
    for i in range(ep.thread_idx.x, source_tokens[ep.block_idx.x] * TOP_K, ep.block_dim.x):
        row = row_of[ep.block_idx.x * tokens * TOP_K + i]
        if row >= 0:
            for w in range(words):
                total += rows[ep.i64(row) * words + w]
    out[ep.block_idx.x * ep.block_dim.x + ep.thread_idx.x] = total


@ep.kernel
def read_first(rows: ep.Ptr[ep.u32], n_rows: ep.Ptr[ep.i32], out: ep.Ptr[ep.u32], words: ep.i32):
    """The same for rows that follow each other."""
    total = ep.u32(0)
    for i in range(ep.thread_idx.x, n_rows[0] * words, ep.block_dim.x):
        total += rows[i]
    out[ep.block_idx.x * ep.block_dim.x + ep.thread_idx.x] = total


# Tokens of a rank in one launch after the other, as a part of those it may have; another rank begins elsewhere. A rank without tokens tells
# its peers nothing by them, and they may still write again in the next launch what it read in the one before.
UNEVEN = (1.0, 1.0, 0.0, 0.5)


def back_to_back(rank: Any, layer: Any, shape: Shape = "both", uneven: bool = False) -> None:
    """Dispatches, combines, or both in turn of another mode's layer, back to back; launches alternate between two banks of every buffer.

    The rows are read or go back as they came.
    """
    kernel = layer.kernel
    inputs: list[Any] = []
    for launch in range(3 if shape == "both" else 5):
        tokens = int(kernel.max_tokens_per_rank * (UNEVEN[(rank.index + launch) % 4] if uneven else 1))
        routing = reference.skewed_routing(1, rank.index, launch, tokens, kernel.n_experts, TOP_K)
        x = np.random.default_rng(rank.index).standard_normal((tokens, kernel.hidden)).astype(ml_dtypes.bfloat16)
        inputs.append([rank.array(a) for a in (x, routing.topk_idx, routing.topk_weights)])
    handle: Any = None
    y: Any = None
    seen = rank.zeros("u32", rank.size * 64)
    rank.barrier()
    for given in inputs:
        if shape != "combine" or handle is None:
            handle = layer.dispatch(*given)
        if kernel.fp8:
            args = (handle.rows.view("u32"), handle.row_of, handle.source_tokens, seen, kernel.max_tokens_per_rank, kernel.hidden // 4)
            read_rows.launch(rank, grid=rank.size, block=64, args=args)
        if y is None and kernel.fp8:
            y = rank.zeros("bf16", handle.rows.shape)
        if shape != "dispatch":
            layer.combine(y if kernel.fp8 else handle.rows, handle)
    rank.synchronize()
    layer.close()


def _low_latency(rank: Any, shape: Shape = "both", uneven: bool = False, fp8: bool = False) -> None:
    layer = LowLatencyMoE(rank, hidden=256, n_experts=2 * rank.size, top_k=TOP_K, max_tokens_per_rank=4, fp8=fp8, n_blocks=2)
    back_to_back(rank, layer, shape, uneven)


@ep.scenario(ranks=2)
def low_latency(rank):
    _low_latency(rank, fp8=True)


@ep.scenario(ranks=3)
def low_latency_uneven(rank):
    """Blocks without a token of their own send and receive all the same."""
    _low_latency(rank, uneven=True)


@ep.scenario(ranks=3)
def low_latency_dispatches(rank):
    _low_latency(rank, "dispatch", fp8=True)


@ep.scenario(ranks=2)
def low_latency_combines(rank):
    _low_latency(rank, "combine")


@ep.scenario(ranks=3)
def low_latency_dispatches_uneven(rank):
    _low_latency(rank, "dispatch", uneven=True)


@ep.scenario(ranks=3)
def low_latency_combines_uneven(rank):
    _low_latency(rank, "combine", uneven=True)


def _throughput(rank: Any, shape: Shape = "both", tokens: int = 6, uneven: bool = False, **options: Any) -> None:
    layer = ThroughputMoE(
        rank,
        hidden=128,
        n_experts=2 * rank.size,
        top_k=TOP_K,
        max_tokens_per_rank=tokens,
        **{"n_blocks": 4, "num_threads": 128, "send_blocks": 2, **options},
    )
    back_to_back(rank, layer, shape, uneven)


@ep.scenario(ranks=2)
def throughput(rank):
    _throughput(rank)


@ep.scenario(ranks=3)
def throughput_uneven(rank):
    _throughput(rank, uneven=True)


@ep.scenario(ranks=2)
def throughput_dispatches(rank):
    _throughput(rank, "dispatch")


@ep.scenario(ranks=2)
def throughput_combines(rank):
    _throughput(rank, "combine", tokens=12)


@ep.scenario(ranks=3)
def throughput_dispatches_uneven(rank):
    _throughput(rank, "dispatch", uneven=True)


@ep.scenario(ranks=3)
def throughput_combines_uneven(rank):
    _throughput(rank, "combine", uneven=True)


@ep.scenario(ranks=2)
def throughput_replayed(rank):
    """A captured dispatch fills the same rows at every replay; the launch before it on every rank's stream reads them."""
    layer = ThroughputMoE(rank, hidden=128, n_experts=4, top_k=TOP_K, max_tokens_per_rank=6, n_blocks=2, num_threads=128, send_blocks=1)
    routing = reference.skewed_routing(1, rank.index, 0, 6, 4, TOP_K)
    x = np.random.default_rng(rank.index).standard_normal((6, 128)).astype(ml_dtypes.bfloat16)
    given = [rank.array(a) for a in (x, routing.topk_idx, routing.topk_weights)]
    seen = rank.zeros("u32", 64)

    def step() -> None:
        handle = layer.dispatch(*given)
        read_first.launch(rank, grid=1, block=64, args=(handle.rows.view("u32"), handle.rank_rows[rank.size :], seen, 64))

    step()
    rank.synchronize()
    with rank.capture() as graph:
        step()
    for _ in range(3):
        graph.replay()
    rank.synchronize()
    graph.close()
    layer.close()


@ep.scenario(ranks=2)
def throughput_of_many_tokens(rank):
    """More tokens a block than a warp has lanes."""
    _throughput(rank, "dispatch", tokens=2 * 70, n_blocks=2, send_blocks=1)


def _expert_major(rank: Any, shape: Shape = "both", uneven: bool = False, fp8: bool = True, **options: Any) -> None:
    """Rows by expert; a block has fewer groups than tokens, so that each group has several."""
    layer = ExpertMajorMoE(
        rank,
        hidden=512 if fp8 else 128,
        top_k=TOP_K,
        max_tokens_per_rank=6,
        fp8=fp8,
        alignment=2,
        **{"n_experts": 2 * rank.size, "n_blocks": 4, "num_threads": (128, 128), "send_blocks": (2, 2), **options},
    )
    back_to_back(rank, layer, shape, uneven)


@ep.scenario(ranks=2)
def expert_major(rank):
    _expert_major(rank)


@ep.scenario(ranks=2)
def expert_major_of_16_bits(rank):
    _expert_major(rank, fp8=False)


@ep.scenario(ranks=3)
def expert_major_uneven(rank):
    _expert_major(rank, uneven=True)


@ep.scenario(ranks=2)
def expert_major_dispatches(rank):
    _expert_major(rank, "dispatch")


@ep.scenario(ranks=3)
def expert_major_dispatches_of_16_bits(rank):
    _expert_major(rank, "dispatch", fp8=False)


@ep.scenario(ranks=3)
def expert_major_dispatches_uneven(rank):
    _expert_major(rank, "dispatch", uneven=True)


@ep.scenario(ranks=3)
def expert_major_combines_uneven(rank):
    _expert_major(rank, "combine", uneven=True, fp8=False)


@ep.scenario(ranks=2)
def expert_major_combines(rank):
    _expert_major(rank, "combine", fp8=False)


@ep.scenario(ranks=2)
def expert_major_of_several_groups(rank):
    _expert_major(rank, n_blocks=2, num_threads=(256, 256), send_blocks=(1, 1))


@ep.scenario(ranks=2)
def expert_major_of_many_experts(rank):
    # More on a rank than a block has threads.
    _expert_major(rank, "dispatch", fp8=False, n_experts=260, n_blocks=2, send_blocks=(1, 1))
