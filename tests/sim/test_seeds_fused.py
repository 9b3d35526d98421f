"""Phases as a class of warps inside a larger kernel, tracing, and the barrier between GPUs."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import pytest
from device_ranks import ranks_on
from epdsl_runtime.rank import Rank
from epdsl_runtime.spawn import spawn

import epdsl as ep
import epdsl.reference as ref
from epdsl.kernels import BF16TokenFormat, EPDispatchKernel, NullTrace, RingTrace
from epdsl.kernels.buffers import DispatchState, ReceivedTokens, TokenInput
from epdsl.kernels.fused_example import EPDispatchConsume
from epdsl.kernels.multi_gpu import (
    LAMPORT_EMPTY,
    LAMPORT_REGION_BYTES,
    MultiGpuAllReduce,
    Signal,
    init_signal_buffer,
    lamport_region_ptr,
    lamport_state_ptr,
    multi_gpu_barrier,
    unsafe_ptr_from,
)
from epdsl.kernels.signal import acknowledge_and_rest
from epdsl.kernels.trace import Event
from epdsl.moe import ExpertParallel
from epdsl.trace import read_rings

TILE = 4


def run_joined(rank: Rank, options: dict[str, Any]) -> list[str]:
    """Two launches of the joined kernel, the experts' rows compared with NumPy and consumption with the scatter's progress."""
    tokens, hidden, topk, experts = 40, 64, 2, 2 * rank.size
    trace = RingTrace(capacity=512, rings_per_block=2)
    claims = options.get("tile_claims", 1)
    token_format = BF16TokenFormat(hidden, topk, tile_rows=TILE, tile_claims=claims, staged=claims > 1)
    layer = ExpertParallel(
        rank,
        hidden=hidden,
        n_experts=experts,
        top_k=topk,
        max_tokens_per_rank=tokens,
        n_sms=3,
        num_threads=128,
        token_format=token_format,
        trace=trace,
        **{name: value for name, value in options.items() if name != "tile_claims"},
    )
    joined = EPDispatchConsume(layer.config.dispatch_kernel, n_compute_threads=128, token_block=TILE)
    memory = rank.zeros("u64", trace.words(layer.config.n_sms))
    arrival = rank.zeros("u32", joined.l1_arrival_size())
    y = rank.empty("bf16", (layer.config.max_recv_tokens, hidden))
    problems: list[str] = []
    for launch in range(2):
        routings = [ref.skewed_routing(7, r, launch, tokens, experts, topk) for r in range(rank.size)]
        x = [ref.sample_tokens(7, r, launch, tokens, hidden) for r in range(rank.size)]
        mine = routings[rank.index]
        handle, state, given = layer.dispatch_arguments(x[rank.index], mine.topk_idx, mine.topk_weights)
        received = replace(handle.received, l1_arrival=arrival)
        state = replace(state, trace=memory)
        joined.dispatch_and_consume.launch(rank, grid=3, block=joined.num_threads, args=(state, given, received, y), cooperative=True)
        rank.synchronize()
        offsets = handle.row_offsets.numpy()
        total = int(offsets[-1])
        order = bool(options.get("ep_prod_reserve"))
        problems += ref.check_dispatch(
            x, routings, experts, rank.index, handle.output[:total].numpy(), offsets, handle.expert_ids.numpy(),
            handle.src_info[:total].numpy(), any_order=order,
        )  # fmt: skip
        rows = np.repeat(np.arange(2) + 2 * rank.index, np.diff(offsets.astype(np.int64)))
        wanted = ref.apply_expert(handle.output[:total].numpy(), rows)
        if not np.array_equal(y[:total].numpy().view(np.uint16), wanted.view(np.uint16)):
            problems.append("the compute class read a row before it was there")
        if arrival.numpy().any():
            problems.append("the arrival counters are not back to 0")
    events, dropped = read_rings(memory.numpy(), trace)
    released = [e.time for e in events if e.event == Event.L1_RELEASE]
    consumed = [e.time for e in events if e.event == Event.CONSUME]
    blocks = sum(-(-int(n) // TILE) for n in np.diff(offsets.astype(np.int64)))
    if dropped or len(released) != claims * len(consumed) or len(consumed) < blocks:
        problems.append(f"{len(released)} releases, {len(consumed)} consumptions, {dropped} dropped; the last launch has {blocks} blocks")
    if not sorted(consumed)[0] < sorted(released)[claims * blocks // 2]:
        problems.append("consuming began only when the scatter had drained")
    return problems


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"completion": "expert", "ep_final_layout": True, "ep_prod_reserve": True, "ep_copy_role_split": True, "ep_send_join_named": True},
        {"tile_claims": 2},
    ],
    ids=["plain", "all flags", "two claims a tile, staged"],
)
def test_compute_warps_consume_rows_while_comm_warps_still_scatter(device_name: str, options: dict[str, Any]) -> None:
    assert spawn(run_joined, 2, device=device_name, args=(options,)) == [[], []]


@dataclass(frozen=True)
class Releasing(EPDispatchKernel):
    """A dispatch whose copy blocks release blocks of 2 rows, 3 at a time, and stamp them behind 5 other rings."""

    @ep.kernel
    def dispatch_released(self, state: DispatchState, tokens: TokenInput, received: ReceivedTokens):
        epoch = state.epochs[0] + 1
        self.send_phase(state, tokens, epoch)
        block = state.counters + self.counters.dispatch_wait_base
        group = ep.Group(0, self.num_threads, -1)
        if ep.block_idx.x == self.n_dispatch_wait_comm_sms:
            self.wait_for_arrivals_and_compute_offsets(
                received, state.recv_counts[state.my_rank], state.reservations[state.my_rank], block, state.my_rank, epoch, ep.i32(0)
            )
        else:
            self.copy_received_tokens_to_output(
                received, state.recv_bufs[state.my_rank], block, state.my_rank, ep.block_idx.x, epoch, state.trace, ep.i32(5),
                emit_l1_release=True, l1_release_token_block=2, l1_release_atomic_pad=4, l1_release_delta=3,
                trace_scatter_release=True, trace_buf=RingTrace(16),
            )  # fmt: skip
        acknowledge_and_rest(
            block + self.cleanup_counter_offset, state.epochs, state.consumed, state.my_rank, epoch, self.n_sms, self.n_peers, group
        )


def run_released(rank: Rank) -> list[Any]:
    tokens, counts = 9, [7, 2]
    token_format = BF16TokenFormat(8, 1, tile_rows=4)
    layer = ExpertParallel(
        rank, hidden=8, n_experts=2, top_k=1, max_tokens_per_rank=tokens, n_sms=3, num_threads=64, token_format=token_format
    )
    kernel = Releasing(**{f.name: getattr(layer._dispatch_kernel, f.name) for f in fields(EPDispatchKernel)})
    ids = np.repeat(np.arange(2, dtype=np.int32), counts)[:, None]
    handle, state, given = layer.dispatch_arguments(np.ones((tokens, 8), ref.BF16), ids, np.ones((tokens, 1), np.float32))
    arrival, trace = rank.zeros("u32", 4 * 6), RingTrace(16)
    memory = rank.zeros("u64", trace.words(8))
    received = replace(handle.received, l1_arrival=arrival)
    state = replace(state, trace=memory)
    kernel.dispatch_released.launch(rank, grid=3, block=64, args=(state, given, received), cooperative=True)
    rank.synchronize()
    events, _ = read_rings(memory.numpy(), trace)
    return [arrival.numpy()[::4].tolist(), sorted(e.argument for e in events), min(e.ring for e in events) >= 5]


def test_releases_count_by_delta_for_every_block_of_a_tile(device_name: str) -> None:
    # 7 rows are 4 blocks of 2, 2 rows another; the tile of 4 rows is a multiple, so every block is released once.
    assert spawn(run_released, 1, device=device_name) == [[[3, 3, 3, 3, 3, 0], [0, 1, 2, 3, 4], True]]


# ---- tracing


@ep.kernel
def without(p: ep.Ptr[ep.u64]):
    p[ep.thread_idx.x] = p[ep.thread_idx.x] + 1


@ep.kernel
def with_null(p: ep.Ptr[ep.u64]):
    NULL.stamp(p, ep.block_idx.x, Event.SEND_BEGIN, ep.i32(0))
    p[ep.thread_idx.x] = p[ep.thread_idx.x] + 1
    NULL.stamp(p, ep.block_idx.x, Event.SEND_END, ep.i32(0))


@ep.kernel
def with_ring(p: ep.Ptr[ep.u64]):
    RING.stamp(p, ep.block_idx.x, Event.SEND_BEGIN, ep.i32(0))
    p[ep.thread_idx.x] = p[ep.thread_idx.x] + 1


NULL, RING = NullTrace(), RingTrace()


def body(kernel: Any) -> list[str]:
    """A kernel's instructions, without its name and comments."""
    lines = kernel.compile("sm_90").text("ptx").replace(kernel.name, "kernel").splitlines()
    return [line for line in lines if line.strip() and not line.lstrip().startswith(("//", ".loc", ".file"))]


def test_a_null_trace_emits_nothing() -> None:
    assert body(with_null) == body(without)
    assert "globaltimer" in "\n".join(body(with_ring)) and "globaltimer" not in "\n".join(body(with_null))


def test_a_family_without_tracing_has_no_stamp() -> None:
    from epdsl.kernels import EPCombineKernel

    base: dict[str, Any] = {
        "num_threads": 64, "n_sms": 2, "top_k": 1, "n_experts": 2, "n_ranks": 2, "msg_bytes": 16, "max_tokens_per_rank": 2,
        "p2p_world_size": 2,
    }  # fmt: skip
    plain = EPCombineKernel(**base).combine_async.compile("sim:nvidia").ir("ep")
    traced = EPCombineKernel(**base, trace=RingTrace()).combine_async.compile("sim:nvidia").ir("ep")
    assert traced.count("special") > plain.count("special")


# ---- signals


def test_the_layout_of_a_signal() -> None:
    assert Signal.nbytes == 4 * 8 * 1024 * 8 + 4 * 8 * 2 * 1024 * 8 + 16 + 25165824


@ep.kernel
def touch(buffer: ep.Ptr[ep.u8], out: ep.Ptr[ep.u32]):
    signal = unsafe_ptr_from(buffer)
    state = lamport_state_ptr(signal)
    region = lamport_region_ptr(signal, ep.u32)
    if ep.thread_idx.x == 0:
        out[0] = ep.u32(ep.u64(state) - ep.u64(buffer))
        out[1] = ep.u32(ep.u64(region) - ep.u64(buffer))
        out[2] = state[0]
        out[3] = region[0]
        out[4] = region[LAMPORT_REGION_BYTES // 4 - 1]


def look(rank: Rank) -> list[int]:
    signals = init_signal_buffer(rank)
    out = rank.zeros("u32", 5)
    touch.launch(rank, grid=1, block=64, args=(signals.local, out))
    return out.numpy().tolist()


def test_a_new_signal_buffer_is_at_rest(device_name: str) -> None:
    assert spawn(look, 1, device=device_name) == [[786432, 786448, 0, LAMPORT_EMPTY, LAMPORT_EMPTY]]


def reduce_partials(rank: Rank, options: dict[str, Any]) -> bool:
    n, rounds = 700, 5
    signals = init_signal_buffer(rank)
    parts = rank.symmetric("f32", n)
    out = rank.empty("f32", n)
    kernel = MultiGpuAllReduce(ngpus=rank.size, num_threads=128, **options)
    good = True
    for i in range(rounds):
        rng = [np.random.default_rng([i, r]) for r in range(rank.size)]
        values = [g.standard_normal(n).astype(np.float32) for g in rng]
        # In stream order: the last launch's end barrier is what lets a part be overwritten.
        parts.local.copy_from(values[rank.index])
        kernel.all_reduce.launch(rank, grid=3, block=128, args=(out, parts.peers, signals.peers, n, rank.index), cooperative=True)
        wanted = np.zeros(n, np.float32)
        for value in values:
            wanted += value
        good = good and np.array_equal(out.numpy(), wanted)
    return good


@pytest.mark.parametrize("options", [{}, {"domain": 7, "named_barrier": 5}], ids=["block barrier", "named barrier, last domain"])
def test_an_all_reduce_over_the_multi_gpu_barrier(device_name: str, options: dict[str, Any]) -> None:
    ranks = ranks_on(device_name, 3)
    assert spawn(reduce_partials, ranks, device=device_name, args=(options,)) == [True] * ranks


@ep.kernel
def start_only(signals: ep.Peers[ep.u8], out: ep.Ptr[ep.i32], n: ep.i32, ranks: ep.Const[int], me: ep.i32):
    for _ in range(n):
        multi_gpu_barrier(signals, me, ngpus=ranks, is_start=True, need_fence=False, timeout_ns=60 * 10**9, domain=2)
        multi_gpu_barrier(signals, me, ngpus=ranks, is_start=False, need_fence=False, timeout_ns=60 * 10**9, domain=2)
    if ep.thread_idx.x == 0:
        out[ep.block_idx.x] = n


def run_start(rank: Rank, first: int) -> list[int]:
    signals = init_signal_buffer(rank)
    # All counters just below where they wrap, as after 2 ** 32 - 4 barriers.
    counters = signals.local[: 4 * 65536].view("u32")
    counters.copy_from(np.full(65536, first, np.uint32))
    rank.synchronize()
    rank.barrier()
    out = rank.zeros("i32", 2)
    start_only.launch(rank, grid=2, block=64, args=(signals.peers, out, 9, rank.size, rank.index), cooperative=True)
    return out.numpy().tolist()


@pytest.mark.parametrize("first", [0, 2**32 - 4])
def test_barriers_without_a_fence_and_counters_that_wrap(device_name: str, first: int) -> None:
    assert spawn(run_start, 2, device=device_name, args=(first,)) == [[9, 9], [9, 9]]
