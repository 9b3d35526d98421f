"""Received rows by parts of tiles and through shared memory, where a larger kernel puts that, who claims them; which blocks copy what."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pytest
from epdsl_runtime.rank import Rank
from epdsl_runtime.spawn import spawn
from seeds_jobs import Job, run_job

import epdsl as ep
import epdsl.reference as ref
from epdsl.kernels import BF16TokenFormat, EPDispatchKernel
from epdsl.kernels.buffers import DispatchState, ReceivedTokens, TokenInput
from epdsl.kernels.signal import acknowledge_and_rest
from epdsl.lang.errors import CompileError
from epdsl.moe import ExpertParallel

SMALL: dict[str, Any] = {"n_sms": 4, "num_threads": 64}


@pytest.mark.parametrize(
    "layer",
    [
        {"token_format": "bf16", "staged": True},
        {"token_format": "nvfp4", "staged": True, "tile_claims": 2, "fold_scales": True, "fused_shared_expert": True},
        {"token_format": "fp8", "tile_claims": 2, "fused_shared_expert": True, "ep_final_layout": True, "sm_schedule": "proportional"},
        {"token_format": "mxfp4", "staged": True, "tile_claims": 8, "skip_a2a": True},
    ],
    ids=lambda v: ",".join(f"{k}={x}" for k, x in v.items()),
)
def test_rows_by_parts_and_through_shared_memory(device_name: str, layer: dict[str, Any]) -> None:
    """Odd numbers of rows for each warp, so that the stages' barriers leave off in either phase."""
    job = Job(tokens=(13, 4), hidden=256, layer={**SMALL, **layer})
    assert spawn(run_job, 2, device=device_name, args=(job,)) == [[], []]


HOST_BYTES = 512
PATTERN = 0x5EED


@dataclass(frozen=True)
class Around(EPDispatchKernel):
    """A dispatch in a kernel that keeps HOST_BYTES of its own in the placed part of shared memory. `base` is where rows are staged."""

    base: int = HOST_BYTES

    @ep.kernel
    def dispatch_around(self, state: DispatchState, tokens: TokenInput, received: ReceivedTokens, kept: ep.Ptr[ep.u32]):
        epoch = state.epochs[0] + 1
        own = ep.shared(ep.u32, HOST_BYTES // 4, at=0)
        for i in range(ep.thread_idx.x, HOST_BYTES // 4, self.num_threads):
            own[i] = ep.u32(PATTERN + i)
        self.send_phase(state, tokens, epoch)
        block = state.counters + self.counters.dispatch_wait_base
        if ep.block_idx.x == self.n_dispatch_wait_comm_sms:
            self.wait_for_arrivals_and_compute_offsets(
                received, state.recv_counts[state.my_rank], state.reservations[state.my_rank], block, state.my_rank, epoch, ep.i32(0)
            )
        else:
            self.copy_received_tokens_to_output(
                received, state.recv_bufs[state.my_rank], block, state.my_rank, ep.block_idx.x, epoch, state.trace,
                comm_smem_base=self.base,
            )  # fmt: skip
        group = ep.Group(0, self.num_threads, -1)
        acknowledge_and_rest(
            block + self.cleanup_counter_offset, state.epochs, state.consumed, state.my_rank, epoch, self.n_sms, self.n_peers, group
        )
        for i in range(ep.thread_idx.x, HOST_BYTES // 4, self.num_threads):
            kept[ep.block_idx.x * (HOST_BYTES // 4) + i] = own[i]


def around(kernel: EPDispatchKernel, **changes: Any) -> Around:
    return Around(**{f.name: getattr(kernel, f.name) for f in fields(EPDispatchKernel)}, **changes)


def run_around(rank: Rank) -> list[str]:
    tokens, hidden = 7, 64
    made = BF16TokenFormat(hidden, 1, staged=True, tile_claims=2)
    layer = ExpertParallel(rank, hidden=hidden, n_experts=2, top_k=1, max_tokens_per_rank=tokens, token_format=made, **SMALL)
    kernel = around(layer._dispatch_kernel)
    x = ref.sample_tokens(3, 0, 0, tokens, hidden)
    ids = (np.arange(tokens, dtype=np.int32) % 2)[:, None]
    handle, state, given = layer.dispatch_arguments(x, ids, np.ones((tokens, 1), np.float32))
    kept = rank.zeros("u32", 4 * HOST_BYTES // 4)
    kernel.dispatch_around.launch(rank, grid=4, block=64, args=(state, given, handle.received, kept), cooperative=True)
    rank.synchronize()
    problems: list[str] = []
    order = handle.src_info.numpy()[:tokens, 0]
    if sorted(order.tolist()) != list(range(tokens)) or handle.output.numpy()[:tokens].tobytes() != x[order].tobytes():
        problems.append("rows are not those sent")
    if kept.numpy().reshape(4, -1).tolist() != [list(range(PATTERN, PATTERN + HOST_BYTES // 4))] * 4:
        problems.append("the kernel's own shared memory was written over")
    return problems


def test_staging_begins_where_the_kernel_around_says(device_name: str) -> None:
    assert spawn(run_around, 1, device=device_name) == [[]]


FAMILY: dict[str, Any] = {"num_threads": 64, "n_sms": 4, "n_experts": 2, "n_ranks": 1, "max_tokens_per_rank": 7, "p2p_world_size": 1}


def test_staging_over_the_kernels_own_memory_is_refused() -> None:
    kernel = EPDispatchKernel(**FAMILY, token_fmt_type=BF16TokenFormat(64, 1, staged=True))
    with pytest.raises(CompileError, match="bytes 256 to 512 overlaps bytes 0 to 512, placed before"):
        around(kernel, base=256).dispatch_around.compile("sim")
    with pytest.raises(CompileError, match="a multiple of 16 bytes, not the compile-time int 520"):
        around(kernel, base=520).dispatch_around.compile("sim")
    # Two warps stage 128 bytes each from the base on; without the copy engine nothing is staged.
    sizes = {t: [around(kernel, base=base).dispatch_around.compile(t).shared_bytes for base in (512, 1536)] for t in ("sim", "sim:amd")}
    assert [b - a for a, b in sizes.values()] == [1024, 0]


def test_the_copy_engine_is_used_where_it_is_asked_for() -> None:
    texts = [
        EPDispatchKernel(**FAMILY, token_fmt_type=BF16TokenFormat(64, 1, staged=staged)).dispatch_wait.compile("sm_90").text("ptx")
        for staged in (False, True)
    ]
    assert ["cp.async.bulk" in text for text in texts] == [False, True]
    # Peers wrote the messages by ordinary stores, which the engine sees after this fence.
    assert ["fence.proxy.async.global" in text for text in texts] == [False, True]


@ep.kernel
def places(out: ep.Ptr[ep.u64]):
    first = ep.shared(ep.u32, 5)
    placed = ep.shared(ep.u8, 64, at=32)
    again = ep.shared(ep.u8, 64, at=32)
    last = ep.shared(ep.u8, 100)
    if ep.thread_idx.x == 0:
        out[0] = ep.u64(placed) - ep.u64(first)
        out[1] = ep.u64(again) - ep.u64(first)
        out[2] = ep.u64(last) - ep.u64(first)


def look_at_places(rank: Rank) -> list[int]:
    out = rank.zeros("u64", 3)
    places.launch(rank, grid=1, block=64, args=(out,))
    return out.numpy().tolist()


def test_the_placed_part_of_shared_memory_is_behind_the_rest(device_name: str) -> None:
    # 20 bytes, 100 more from byte 32 on; the placed part from the next multiple of 128.
    assert spawn(look_at_places, 1, device=device_name) == [[256 + 32, 256 + 32, 32]]
    assert places.compile("sm_90").shared_bytes == 256 + 32 + 64


# ---- the schedule of copy blocks


def bounds(rank: Rank, schedule: str, claims: int, routed: list[list[int]]) -> list[list[int]]:
    tokens = max(sum(counts) for counts in routed)
    made = BF16TokenFormat(16, 1, tile_rows=2, tile_claims=claims)
    layer = ExpertParallel(
        rank, hidden=16, n_experts=4, top_k=1, max_tokens_per_rank=tokens, token_format=made, sm_schedule=schedule, n_sms=11, num_threads=64
    )
    kernel = layer._dispatch_kernel
    start = kernel.counters.dispatch_wait_base + kernel.sm_schedule_offset
    found: list[list[int]] = []
    for counts in routed:
        ids = np.repeat(np.arange(4, dtype=np.int32), counts)[:, None]
        layer.dispatch(np.ones((len(ids), 16), ref.BF16), ids, np.ones((len(ids), 1), np.float32))
        found.append(layer._counters.numpy()[start : start + 4].tolist())
    return found


@pytest.mark.parametrize(
    ("schedule", "claims", "routed", "wanted"),
    [
        # 10 copy blocks, 3 experts with rows: one block each, and 7 by tiles 9, 0, 1, 2 of 12: 5.25, 5.25, 5.83 and 7 of them so far.
        # Two claims a tile keep the proportion. An expert with all rows has all blocks.
        ("proportional", 2, [[18, 0, 2, 4], [0, 24, 0, 0]], [[6, 6, 7, 10], [0, 10, 10, 10]]),
        # No more tiles than 10 // 4 blocks an expert: round robin does as well.
        ("auto", 1, [[2, 0, 2, 0], [18, 0, 2, 4]], [[-1] * 4, [6, 6, 7, 10]]),
    ],
)
def test_blocks_are_divided_in_proportion_to_tiles(
    device_name: str, schedule: str, claims: int, routed: list[list[int]], wanted: list[list[int]]
) -> None:
    assert spawn(bounds, 1, device=device_name, args=(schedule, claims, routed)) == [wanted]


@dataclass(frozen=True)
class GivesUp(BF16TokenFormat):
    """The thread that claims tiles for its class gives up at its second row."""

    @ep.func
    def copy_part(self, target: ep.Ptr[ep.u8], source: ep.Ptr[ep.u8], stage: Any, copied: ep.i32, timeout_ns: int):
        ep.warp_copy(target, source, self.part_bytes)
        if ep.thread_idx.x == 0:
            ep.device_assert(copied < 1, "the second row")


def claimer_gives_up(rank: Rank) -> str:
    token_format = GivesUp(64, 2, tile_rows=1)
    layer = ExpertParallel(
        rank, hidden=64, n_experts=4 * rank.size, top_k=2, max_tokens_per_rank=20, n_sms=3, num_threads=64, token_format=token_format
    )
    routing = ref.skewed_routing(7, rank.index, 0, 20, 4 * rank.size, 2)
    layer.dispatch(ref.sample_tokens(7, rank.index, 0, 20, 64), routing.topk_idx, routing.topk_weights)
    with pytest.raises(ep.DeviceAssertionError) as caught:
        rank.synchronize()
    # The kernel has ended: the device can be used.
    rank.zeros("u32", 4).numpy()
    return str(caught.value)


def test_the_others_end_where_the_thread_that_claims_gives_up(device_name: str) -> None:
    for found in spawn(claimer_gives_up, 1, device=device_name, timeout=60):
        assert "a device assert failed: rank 0" in found and "the second row" in found, found
