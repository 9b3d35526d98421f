"""docs/seeds.md has a row for every name of the five documents, and the tests it names exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "seeds.md").read_text()
SECTIONS = {int(part[:1]): part for part in re.split(r"^## ", TEXT, flags=re.M)[1:]}

NAMES = {
    1: "p2p_world_size use_shmem n_experts_per_device skip_a2a has_rank_flag ep_ord_r my_rank dst_rank recv_count_ptrs signal_offset "
    "signal "
    "rank_completion_counter rank_flag_offset",
    2: "Enabled SendWarps send_tile service drain shutdown",
    3: "atomic_counter src_info_ptr row_base_ptr recv_buf_ptrs n_ranks p2p_world_size top_k msg_bytes max_tokens_per_rank my_rank send_mbx "
    "send_stamp_ptr send_stamp_on trace_ptr trace_on send_trace_slot disabled",
    4: "num_threads n_sms n_experts n_ranks max_tokens_per_rank p2p_world_size token_fmt_type use_shmem fused_shared_expert skip_a2a "
    "has_rank_flag ep_ord_r ep_final_layout ep_prod_reserve ep_copy_role_split ep_send_join_named cleanup_counter_offset hid_dim "
    "l1_vslot_ticket_offset l2_pool_cursor_offset l2_pool_cursor_slots msg_bytes n_dispatch_async_comm_sms n_dispatch_wait_comm_sms "
    "n_local_experts n_offset_sms n_signal_sms n_warps NB_SEND rank_flag_base rank_prefix_offset rc_cursor_base ready_flag_offset "
    "role_split "
    "send_buf_ready_offset shared_expert_started_offset sm_schedule_offset top_k work_counter_offset assert_l1_vslot_ticket_layout "
    "rank_flag_offset recv_count_size recv_buf_layout recv_count_layout send_buf_layout monitor_and_signal_completion copy_and_send_tokens "
    "wait_for_arrivals_and_compute_offsets copy_received_tokens_to_output pack_shared_expert_inputs comm_warp_base comm_thread_base "
    "n_comm_threads comm_barrier_id comm_smem_base input_type input_scales_wrapper emit_l1_release l1_release_token_block "
    "l1_release_atomic_pad l1_release_delta trace_scatter_release trace_rings_per_cta trace_ring_capacity trace_comm_ring_id TraceBufT "
    "format_handler row_offsets expert_ids src_info recv_count_p recv_buf_p recv_count_ptrs recv_buf_ptrs send_buf_p input_tokens topk_ids "
    "expert_reserved_counter expert_finished_counter rank_completion_counter atomic_counter my_rank sm_id scatter_sm_id n_active_send_sms "
    "n_active_offset_sms prod_gen_p prod_gen reserved_shared_expert_tokens l1_arrival_ptr trace_buf trace_ring_base fused_se_counter "
    "shared_expert_token_count pack_sm_id n_active_comm_sms n_send_sms",
    5: "self_counter peer_counter lamport_state lamport_region flag_t unsafe_ptr_from lamport_state_ptr lamport_region_ptr",
}


def rows(section: int) -> dict[str, tuple[str, str]]:
    found = re.findall(r"^\| `(\w+)`[^|]*\| (.*?) \| ?(.*?) ?\|$", SECTIONS[section], flags=re.M)
    return {name: (here, shown) for name, here, shown in found}


@pytest.mark.parametrize("section", sorted(NAMES))
def test_every_name_has_a_row(section: int) -> None:
    missing = [name for name in NAMES[section].split() if name not in rows(section)]
    assert missing == []


@pytest.mark.parametrize("section", sorted(NAMES))
def test_every_row_is_shown_by_something_or_still_to_come(section: int) -> None:
    silent = [name for name, (here, shown) in rows(section).items() if not shown and "still to come" not in here]
    assert silent == []


def test_the_tests_that_are_named_exist() -> None:
    defined: set[str] = set()
    for file in [*(ROOT / "tests" / "sim").glob("test_*.py"), *(ROOT / "tests" / "unit").glob("test_*.py")]:
        defined |= set(re.findall(r"^def (test_\w+)", file.read_text(), flags=re.M))
    assert sorted(set(re.findall(r"`(test_\w+)`", TEXT)) - defined) == []
