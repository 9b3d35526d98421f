"""A class of warps that consumes while another receives, and the barriers between GPUs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from ep_family import HIDDEN, TOP_K, inputs_of, layer_of

import epdsl as ep
from epdsl.kernels import BF16TokenFormat
from epdsl.kernels.fused_example import EPDispatchConsume
from epdsl.kernels.multi_gpu import MultiGpuAllReduce, multi_gpu_barrier
from epdsl.moe import RoutingError

TILE = 4


def _consume(rank: Any, experts: int, launches: int = 2, wrong: bool = False, **options: Any) -> None:
    """A class of warps consumes rows that another one of the same kernel receives."""
    warp = rank.device.info.warp_size
    layer = layer_of(rank, experts, token_format=BF16TokenFormat(HIDDEN, TOP_K, tile_rows=TILE), **options)
    joined = EPDispatchConsume(layer.config.dispatch_kernel, n_compute_threads=2 * warp, token_block=TILE // 2)
    arrival = rank.zeros("u32", joined.l1_arrival_size())
    y = rank.empty("bf16", (layer.config.max_recv_tokens, HIDDEN))
    inputs = [tuple(rank.array(a) for a in inputs_of(rank, n, wrong, experts, HIDDEN)) for n in range(launches)]
    ep.control_words(arrival)
    rank.barrier()
    for given in inputs:
        handle, state, tokens = layer.dispatch_arguments(*given)
        args = (state, tokens, replace(handle.received, l1_arrival=arrival), y)
        joined.dispatch_and_consume.launch(rank, grid=layer.config.n_sms, block=joined.num_threads, args=args, cooperative=True)
    try:
        rank.synchronize()
    except RoutingError:
        if not wrong:
            raise
    layer.close()


@ep.scenario(ranks=2)
def consumed_while_received(rank):
    """More local experts than copy blocks, so that a block receives for several."""
    _consume(rank, 12, launches=3)


@ep.scenario(ranks=2)
def consumed_while_received_reserved(rank):
    """More copy blocks than local experts, so that several blocks receive for one."""
    _consume(
        rank,
        6,
        completion="expert",
        ep_final_layout=True,
        ep_prod_reserve=True,
        ep_copy_role_split=True,
        ep_send_join_named=True,
        num_threads=6 * rank.device.info.warp_size,
    )


@ep.scenario(ranks=2)
def consumed_of_wrong_ids(rank):
    _consume(rank, 8, launches=1, wrong=True, completion="expert")


@ep.scenario(ranks=2)
def consumed_of_more_experts_than_threads(rank):
    _consume(rank, 2 * (64 + 8), launches=1, num_threads=64)


# The counters of a signal buffer, without the region behind them.
SIGNAL_BYTES = 4 * (65536 + 131072)


def _all_reduce(rank: Any, **options: Any) -> None:
    n = 2 * 3 * 64
    signals, parts = rank.symmetric("u8", SIGNAL_BYTES), rank.symmetric("f32", n)
    out = rank.empty("f32", n)
    kernel = MultiGpuAllReduce(ngpus=rank.size, num_threads=64, **options)
    rank.barrier()
    for launch in range(3):
        # In stream order: the end barrier of the launch before is what lets a part be overwritten.
        parts.local.copy_from(np.full(n, launch, np.float32))
        kernel.all_reduce.launch(rank, grid=3, block=64, args=(out, parts.peers, signals.peers, n, rank.index), cooperative=True)
    rank.synchronize()


@ep.scenario(ranks=2)
def all_reduce(rank):
    _all_reduce(rank)


@ep.scenario(ranks=3)
def all_reduce_by_a_group(rank):
    _all_reduce(rank, domain=7, named_barrier=5)


@ep.kernel
def meet(signals: ep.Peers[ep.u8], me: ep.i32, ranks: ep.Const[int], rounds: ep.i32):
    """Both forms of the barrier between GPUs without a fence: blocks meet, memory is not ordered."""
    for _ in range(rounds):
        multi_gpu_barrier(signals, me, ngpus=ranks, is_start=True, need_fence=False, timeout_ns=10**10)
        multi_gpu_barrier(signals, me, ngpus=ranks, is_start=False, need_fence=False, timeout_ns=10**10)


@ep.scenario(ranks=2)
def barriers_without_a_fence(rank):
    signals = rank.symmetric("u8", SIGNAL_BYTES)
    rank.barrier()
    for _ in range(2):
        meet.launch(rank, grid=2, block=64, args=(signals.peers, rank.index, rank.size, 3), cooperative=True)
    rank.synchronize()


@ep.kernel
def exchange(signals: ep.Peers[ep.u8], parts: ep.Peers[ep.u32], me: ep.i32, ranks: ep.Const[int], rounds: ep.i32):
    """Every block writes, reads what the same blocks of the others wrote, and writes again."""
    tid = ep.thread_idx.x
    at = ep.block_idx.x * ep.block_dim.x
    for n in range(rounds):
        parts[me][at + tid] = ep.u32(n)
        multi_gpu_barrier(signals, me, ngpus=ranks, is_start=True, need_fence=True, timeout_ns=10**10)
        for r in range(signals.size):
            ep.device_assert(parts[r][at + (tid + 1) % ep.block_dim.x] == ep.u32(n), "part {} of round {}", r, n)
        multi_gpu_barrier(signals, me, ngpus=ranks, is_start=False, need_fence=True, timeout_ns=10**10)


@ep.scenario(ranks=2)
def barriers_with_a_fence(rank):
    signals, parts = rank.symmetric("u8", SIGNAL_BYTES), rank.symmetric("u32", 128)
    rank.barrier()
    for _ in range(2):
        args = (signals.peers, parts.peers, rank.index, rank.size, 2)
        exchange.launch(rank, grid=2, block=64, args=args, cooperative=True)
    rank.synchronize()
