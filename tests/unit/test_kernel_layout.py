"""Sizes and offsets of the kernel family against the published numbers, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from epdsl.kernels import BF16TokenFormat, EPCombineKernel, EPDispatchKernel, EPLocalSyncCounters

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
    assert counters.total_size == 28 + 88 + 8


@pytest.mark.parametrize(
    "name",
    ["use_shmem", "fused_shared_expert", "skip_a2a", "ep_final_layout", "ep_prod_reserve", "ep_copy_role_split", "ep_send_join_named"],
)
def test_dispatch_parameters_that_are_not_served_are_named(name: str) -> None:
    with pytest.raises(NotImplementedError, match=f"EPDispatchKernel: {name}=True is not served"):
        EPDispatchKernel(**{**DISPATCH, name: True})


@pytest.mark.parametrize("name", ["use_shmem", "fused_shared_expert", "skip_a2a"])
def test_combine_parameters_that_are_not_served_are_named(name: str) -> None:
    with pytest.raises(NotImplementedError, match=f"EPCombineKernel: {name}=True is not served"):
        EPCombineKernel(**{**COMBINE, name: True})


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
