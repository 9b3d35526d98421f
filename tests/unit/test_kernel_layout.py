"""Sizes and offsets of the kernel family against the published numbers, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from epdsl.kernels import (
    BF16TokenFormat,
    BlockwiseFP8TokenFormat,
    EPCombineKernel,
    EPDispatchKernel,
    EPLocalSyncCounters,
    EPRoleSplit,
    MXFP4TokenFormat,
    MXFP8TokenFormat,
    NVFP4TokenFormat,
)

DISPATCH: dict[str, Any] = {
    "num_threads": 1024,
    "n_sms": 132,
    "n_experts": 256,
    "n_ranks": 8,
    "max_tokens_per_rank": 128,
    "p2p_world_size": 8,
    "token_fmt_type": BF16TokenFormat(hid_dim=7168, top_k=8),
}
COMBINE: dict[str, Any] = {
    "num_threads": 1024,
    "n_sms": 132,
    "top_k": 8,
    "n_experts": 256,
    "n_ranks": 8,
    "msg_bytes": 14336,
    "max_tokens_per_rank": 128,
    "p2p_world_size": 8,
}


def test_message_of_the_published_example() -> None:
    token_format = BF16TokenFormat(hid_dim=7168, top_k=8)
    assert (token_format.token_size(), token_format.src_info_offset, token_format.topk_info_offset) == (14336, 14336, 14352)
    assert token_format.msg_size() == 14368


@pytest.mark.parametrize(("hid_dim", "top_k", "alignment", "nbytes"), [(8, 1, 16, 48), (24, 9, 16, 96), (8, 8, 128, 384)])
def test_every_part_of_a_message_is_aligned(hid_dim: int, top_k: int, alignment: int, nbytes: int) -> None:
    assert BF16TokenFormat(hid_dim, top_k, alignment).msg_size() == nbytes


def test_dispatch_members() -> None:
    kernel = EPDispatchKernel(**DISPATCH)
    assert (kernel.hid_dim, kernel.top_k, kernel.msg_bytes, kernel.n_local_experts) == (7168, 8, 14368, 32)
    assert (kernel.n_warps(32), kernel.n_signal_sms(32), kernel.n_dispatch_async_comm_sms(32)) == (32, 8, 124)
    assert (kernel.n_warps(64), kernel.n_signal_sms(64), kernel.n_dispatch_async_comm_sms(64)) == (16, 16, 116)
    assert (kernel.n_offset_sms, kernel.n_dispatch_wait_comm_sms) == (1, 131)
    assert (kernel.rank_prefix_offset, kernel.work_counter_offset, kernel.cleanup_counter_offset, kernel.ready_flag_offset) == (
        512,
        768,
        1024,
        1025,
    )
    assert (kernel.rank_flag_base, kernel.rc_cursor_base, kernel.recv_count_size()) == (256, 264, 296)
    assert (kernel.send_buf_size(), kernel.recv_buf_size()) == (128 * 14368, 256 * 128 * 14368)
    assert kernel.max_recv_tokens == 128 * 8 * 8


def test_the_send_buffer_is_one_message_a_token() -> None:
    kernel = EPDispatchKernel(**DISPATCH)
    assert kernel.send_buf_layout(3, 5) == 3 * 14368 + 5 and kernel.send_buf_layout(128) == kernel.send_buf_size()


def test_few_blocks_leave_half_of_them_to_send() -> None:
    kernel = EPDispatchKernel(**{**DISPATCH, "num_threads": 256, "n_sms": 8})
    assert (kernel.n_signal_sms(32), kernel.n_dispatch_async_comm_sms(32)) == (4, 4)


def test_max_recv_tokens_when_a_rank_has_fewer_experts_than_selections() -> None:
    kernel = EPDispatchKernel(**{**DISPATCH, "n_experts": 16})
    assert kernel.max_recv_tokens == 128 * 8 * 2


def test_counter_blocks_do_not_overlap() -> None:
    counters = EPLocalSyncCounters(n_experts=10, n_ranks=5)
    assert (counters.expert_reserved_base, counters.expert_finished_base, counters.dispatch_rank_completion_base) == (0, 10, 20)
    assert counters.dispatch_wait_base == 28
    assert counters.combine_base == 28 + 88
    assert counters.total_size == 28 + 88 + 12


@pytest.mark.parametrize(("family", "base"), [(EPDispatchKernel, DISPATCH), (EPCombineKernel, COMBINE)], ids=["dispatch", "combine"])
def test_the_shmem_path_is_refused(family: Any, base: dict[str, Any]) -> None:
    with pytest.raises(NotImplementedError, match="use_shmem=True is not served"):
        family(**{**base, "use_shmem": True})


def test_dispatch_members_for_a_fused_kernel() -> None:
    kernel = EPDispatchKernel(**DISPATCH)
    assert (kernel.send_buf_ready_offset, kernel.shared_expert_started_offset) == (1026, 1027)
    # 1 + 66 words fit the window of 224 behind the 32 work counters.
    assert (kernel.l2_pool_cursor_slots, kernel.l1_vslot_ticket_offset, kernel.l2_pool_cursor_offset) == (66, 800, 801)
    assert (kernel.sm_schedule_offset, kernel.pair_done_offset, kernel.NB_SEND) == (1543, 1800, 3)
    small = EPDispatchKernel(**{**DISPATCH, "n_experts": 8, "n_ranks": 2, "p2p_world_size": 2})
    # 1 + 10 words do not fit the window of 4.
    assert (small.l1_vslot_ticket_offset, small.l2_pool_cursor_offset, small.l2_pool_cursor_slots) == (36, 37, 10)
    small.assert_l1_vslot_ticket_layout()


def test_the_ticket_layout_is_checked() -> None:
    class Overlapping(EPDispatchKernel):
        @property
        def l1_vslot_ticket_offset(self) -> int:
            return 1020

    with pytest.raises(ValueError, match="1020 to 1087 overlap the flags 1024 to 1028"):
        Overlapping(**DISPATCH)


def test_reservations_need_the_final_layout() -> None:
    with pytest.raises(ValueError, match="ep_prod_reserve reserves places of the final layout"):
        EPDispatchKernel(**{**DISPATCH, "ep_prod_reserve": True})


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"release_every": True, "ep_ord_r": True, "has_rank_flag": True}, "release_every"),
        ({"ordering": "relaxed"}, "ordering='relaxed' is not known"),
    ],
)
def test_completions_that_do_not_exist(change: dict[str, Any], text: str) -> None:
    for family, base in ((EPDispatchKernel, DISPATCH), (EPCombineKernel, COMBINE)):
        with pytest.raises(ValueError, match=text):
            family(**{**base, **change})


def test_an_unreduced_combine_has_no_shared_expert() -> None:
    with pytest.raises(ValueError, match="set one of them"):
        EPCombineKernel(**{**COMBINE, "unreduced": True, "fused_shared_expert": True})


@pytest.mark.parametrize(
    ("made", "nbytes"),
    [
        (BlockwiseFP8TokenFormat(7168, 8), 7424),
        (MXFP8TokenFormat(7168, 8), 7424),
        (MXFP4TokenFormat(7168, 8), 3840),
        (NVFP4TokenFormat(7168, 8), 4064),
    ],
)
def test_messages_of_the_published_examples(made: Any, nbytes: int) -> None:
    assert made.msg_size() == nbytes


def test_rows_are_padded_where_scales_are_transposed() -> None:
    kernel = EPDispatchKernel(**{**DISPATCH, "token_fmt_type": BlockwiseFP8TokenFormat(7168, 8), "fused_shared_expert": True})
    # 8 * 128 * 8 routed, 128 shared, up to 3 rows of padding for each of 33 slots, and a multiple of 4.
    assert kernel.max_recv_tokens == 8192 + 128 + 100
    assert kernel.token_fmt_type.scale_shape(kernel.max_recv_tokens, kernel.n_slots) == (56, 8420)


def test_scale_tiles_have_room_for_every_slot() -> None:
    assert NVFP4TokenFormat(7168, 8, fold_scales=True).scale_shape(1000, 5) == (12, 112, 32, 4, 4)


def test_two_peer_worlds_are_not_served() -> None:
    with pytest.raises(NotImplementedError, match="p2p_world_size=4 with 8 ranks"):
        EPDispatchKernel(**{**DISPATCH, "p2p_world_size": 4})


@pytest.mark.parametrize(("has_rank_flag", "ep_ord_r"), [(True, False), (False, True)])
def test_the_rank_flag_goes_with_rank_level_completion(has_rank_flag: bool, ep_ord_r: bool) -> None:
    for family, base in ((EPDispatchKernel, DISPATCH), (EPCombineKernel, COMBINE)):
        with pytest.raises(ValueError, match="set both or neither"):
            family(**{**base, "has_rank_flag": has_rank_flag, "ep_ord_r": ep_ord_r})


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"n_experts": 255}, "255 experts cannot be divided over 8 ranks"),
        ({"n_experts": 65544}, "65544 experts do not fit"),
        ({"num_threads": 100}, "num_threads=100 must be a multiple of 64"),
        ({"n_sms": 1}, "n_sms=1, but at least 2 blocks"),
        ({"max_tokens_per_rank": 1 << 26}, r"below 2\*\*31"),
    ],
)
def test_refusals_have_the_numbers(change: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        EPDispatchKernel(**{**DISPATCH, **change})


def test_hidden_must_be_whole_vectors() -> None:
    with pytest.raises(ValueError, match="12 elements takes 24 bytes"):
        BF16TokenFormat(hid_dim=12, top_k=2)


@pytest.mark.parametrize(
    ("split", "wanted"),
    [
        # The published shape: 384 threads and 6144 elements are 3 full turns of 256 threads.
        (EPRoleSplit(384, 768, True, 32), (True, 4, 128, 256, 3, True)),
        (EPRoleSplit(384, 896, True, 32), (True, 4, 128, 256, 4, False)),
        (EPRoleSplit(384, 768, False, 32), (False, 12, 0, 384, 2, True)),
        # Four warps send and none is left to pack: the plain roles.
        (EPRoleSplit(128, 768, True, 32), (False, 4, 0, 128, 6, True)),
        (EPRoleSplit(256, 768, True, 64), (False, 4, 0, 256, 3, True)),
        (EPRoleSplit(512, 768, True, 64), (True, 4, 256, 256, 3, True)),
    ],
)
def test_the_role_split(split: EPRoleSplit, wanted: tuple[object, ...]) -> None:
    assert (split.enabled, split.n_publishers, split.copy_base, split.copy_threads, split.trips, split.even) == wanted


def test_a_claim_takes_whole_groups_of_every_row() -> None:
    made = NVFP4TokenFormat(7168, 8, tile_claims=2)
    # 16 bytes are 32 elements and two groups of 16.
    assert (made.part_unit, made.part_bytes, made.part_groups) == (32, 1792, 224)
    assert (BlockwiseFP8TokenFormat(7168, 8, tile_claims=7).part_groups, made.staging_bytes(32, True)) == (8, 0)
    assert NVFP4TokenFormat(7168, 8, tile_claims=2, staged=True).staging_bytes(32, True) == 32 * 1792
    with pytest.raises(ValueError, match="tile_claims=3 does not divide the 56 units of 128 elements of a token; use a divisor of 56"):
        BlockwiseFP8TokenFormat(7168, 8, tile_claims=3)
    with pytest.raises(ValueError, match="tile_claims=0 does not divide the 896 units of 8 elements"):
        BF16TokenFormat(7168, 8, tile_claims=0)


def test_no_block_has_more_than_1024_threads() -> None:
    for family, base in ((EPDispatchKernel, DISPATCH), (EPCombineKernel, COMBINE)):
        with pytest.raises(ValueError, match="num_threads=1088, but no GPU's block has more than 1024"):
            family(**{**base, "num_threads": 1088})
