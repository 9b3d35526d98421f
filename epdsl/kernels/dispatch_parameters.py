"""Parameters of the dispatch kernels and the sizes that follow from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import epdsl as ep

from .layout import DEFAULT_TIMEOUT_NS, EPLocalSyncCounters, align_up, ceildiv, check_geometry, refuse_unserved
from .signal import Ordering
from .token_format import TokenFormat
from .trace import NO_TRACE, TraceBuf

SmSchedule = Literal["auto", "round_robin", "proportional"]
PUBLISHER_WARPS = 4
"""Warps that only send, with ep_copy_role_split."""


@dataclass(frozen=True)
class EPRoleSplit:
    """How `ep_copy_role_split` divides the threads of a class: PUBLISHER_WARPS warps send, the others pack.

    num_threads  threads of the class
    items        pieces of 8 elements of a token, which a packing thread takes in turn
    requested    ep_copy_role_split
    warp_size    threads of a warp

    The published kernels split only where each packing thread has exactly 3 pieces (384 threads and 6144 elements); here every shape may,
    and `trips` and `even` tell how the pieces divide.
    """

    num_threads: int
    items: int
    requested: bool
    warp_size: int

    @property
    def enabled(self) -> bool:
        """Whether there are warps to pack besides those that send."""
        return self.requested and self.num_threads > PUBLISHER_WARPS * self.warp_size

    @property
    def n_publishers(self) -> int:
        """Warps that send: all without a split."""
        return PUBLISHER_WARPS if self.enabled else self.num_threads // self.warp_size

    @property
    def copy_base(self) -> int:
        """The first thread of the class that packs."""
        return PUBLISHER_WARPS * self.warp_size if self.enabled else 0

    @property
    def copy_threads(self) -> int:
        """Threads that pack."""
        return self.num_threads - self.copy_base

    @property
    def trips(self) -> int:
        """Turns in which the packing threads take all pieces of a token."""
        return ceildiv(self.items, self.copy_threads)

    @property
    def even(self) -> bool:
        """Whether every packing thread has a piece in every turn."""
        return self.trips * self.copy_threads == self.items


@dataclass(frozen=True)
class DispatchParameters:
    """What the dispatch kernels are specialised on, and the sizes that follow from it.

    num_threads          threads of a block (of its comm class, inside a larger kernel)
    n_sms                blocks of a launch, all resident at once
    n_experts            experts of the whole model; each rank has n_experts / n_ranks consecutive ones
    n_ranks              ranks that take part
    max_tokens_per_rank  tokens a rank may send in one launch
    p2p_world_size       ranks that reach each other's memory: all of them
    token_fmt_type       how a token lies in a message
    use_shmem            not served: must be False
    fused_shared_expert  tokens of this rank also go, packed, to a shared expert: slot 0 of the output, before the local experts
    skip_a2a             nothing leaves this device: selections of other ranks' experts are left out, signals are at device scope
    has_rank_flag, ep_ord_r  together: completion once per source rank instead of once per expert (see `ep_signal_completion`)
    ep_final_layout      a source writes each row to its final place in the expert's one dense range, instead of a range per source;
                         where its block begins follows from a count that every rank tells every other (rows in order of ranks)
    ep_prod_reserve      with ep_final_layout: a source reserves its block by one read-modify-write of the destination's cursor instead
                         (blocks in order of arrival)
    ep_copy_role_split   4 warps send and the others pack, so that packing the next token overlaps sending this one; a block of at most
                         4 warps keeps the plain roles
    ep_send_join_named   packing and sending of a token join on named barrier NB_SEND; on AMD on the comm class's own barrier either way
    release_every, ordering  of per-expert completion, see `ep_signal_completion`
    sm_schedule          which blocks copy which expert: "proportional" to its tiles, "round_robin", or "auto": proportional as soon as
                         there are more tiles than blocks for each expert
    trace                where events go
    timeout_ns           nanoseconds any wait may take before the launch reports a fault
    """

    num_threads: int
    n_sms: int
    n_experts: int
    n_ranks: int
    max_tokens_per_rank: int
    p2p_world_size: int
    token_fmt_type: TokenFormat
    use_shmem: bool = False
    fused_shared_expert: bool = False
    skip_a2a: bool = False
    has_rank_flag: bool = False
    ep_ord_r: bool = False
    ep_final_layout: bool = False
    ep_prod_reserve: bool = False
    ep_copy_role_split: bool = False
    ep_send_join_named: bool = False
    release_every: bool = False
    ordering: Ordering = "acq_rel"
    sm_schedule: SmSchedule = "auto"
    trace: TraceBuf = NO_TRACE
    timeout_ns: int = DEFAULT_TIMEOUT_NS

    NB_SEND = 3

    def __post_init__(self) -> None:
        name = type(self).__name__
        check_geometry(
            name,
            self.num_threads,
            self.n_sms,
            self.n_experts,
            self.n_ranks,
            self.p2p_world_size,
            self.top_k,
            self.max_tokens_per_rank,
        )
        refuse_unserved(name, use_shmem=self.use_shmem)
        check_completion(name, self.has_rank_flag, self.ep_ord_r, self.release_every, self.ordering)
        if self.ep_prod_reserve and not self.ep_final_layout:
            raise ValueError(f"{name}: ep_prod_reserve reserves places of the final layout; set ep_final_layout too, or neither")
        if self.sm_schedule not in ("auto", "round_robin", "proportional"):
            raise ValueError(f"{name}: sm_schedule={self.sm_schedule!r}; it is 'auto', 'round_robin' or 'proportional'")
        self.assert_l1_vslot_ticket_layout()

    @property
    def top_k(self) -> int:
        return self.token_fmt_type.top_k

    @property
    def hid_dim(self) -> int:
        return self.token_fmt_type.hid_dim

    @property
    def msg_bytes(self) -> int:
        return self.token_fmt_type.msg_size()

    @property
    def n_local_experts(self) -> int:
        return self.n_experts // self.n_ranks

    def n_warps(self, warp_size: int) -> int:
        """Warps of a block."""
        return self.num_threads // warp_size

    def n_signal_sms(self, warp_size: int) -> int:
        """Blocks that monitor: a warp for each expert, but at most half of the blocks (then a warp monitors several in turn)."""
        return max(1, min(ceildiv(self.n_local_experts if self.skip_a2a else self.n_experts, self.n_warps(warp_size)), self.n_sms // 2))

    @property
    def n_offset_sms(self) -> int:
        return 1

    def n_dispatch_async_comm_sms(self, warp_size: int) -> int:
        return self.n_sms - self.n_signal_sms(warp_size)

    @property
    def n_dispatch_wait_comm_sms(self) -> int:
        return self.n_sms - self.n_offset_sms

    @property
    def counters(self) -> EPLocalSyncCounters:
        return EPLocalSyncCounters(self.n_experts, self.n_ranks)

    @property
    def rank_prefix_offset(self) -> int:
        return 2 * self.n_experts

    @property
    def work_counter_offset(self) -> int:
        return 3 * self.n_experts

    @property
    def cleanup_counter_offset(self) -> int:
        return 4 * self.n_experts

    @property
    def ready_flag_offset(self) -> int:
        return 4 * self.n_experts + 1

    @property
    def send_buf_ready_offset(self) -> int:
        """Send blocks whose rows of the send buffer are published."""
        return 4 * self.n_experts + 2

    @property
    def shared_expert_started_offset(self) -> int:
        """Blocks that have begun to pack shared expert inputs."""
        return 4 * self.n_experts + 3

    @property
    def l2_pool_cursor_slots(self) -> int:
        return 2 * self.n_local_experts + 2

    @property
    def l1_vslot_ticket_offset(self) -> int:
        """In the window behind the work counters where it fits there, else behind the flags. For a fused kernel."""
        if 1 + self.l2_pool_cursor_slots <= self.n_experts - self.n_local_experts:
            return 3 * self.n_experts + self.n_local_experts
        return 4 * self.n_experts + 4

    @property
    def l2_pool_cursor_offset(self) -> int:
        return self.l1_vslot_ticket_offset + 1

    @property
    def sm_schedule_offset(self) -> int:
        """One word a local expert: the block after its last, or -1 for round robin."""
        return 6 * self.n_experts + 7

    @property
    def pair_done_offset(self) -> int:
        """One word a pair: rows the combine has sent."""
        return 7 * self.n_experts + 8

    def assert_l1_vslot_ticket_layout(self) -> None:
        """The ticket and pool cursor words overlap nothing else: neither the flags at 4E to 4E + 3 nor the schedule.

        Raises ValueError with both numbers.
        """
        begin, end = self.l1_vslot_ticket_offset, self.l2_pool_cursor_offset + self.l2_pool_cursor_slots
        flags, behind = self.cleanup_counter_offset, self.shared_expert_started_offset + 1
        if not (end <= flags or begin >= behind) or end > self.sm_schedule_offset:
            raise ValueError(
                f"{type(self).__name__}: the ticket words {begin} to {end} overlap the flags {flags} to {behind} "
                f"or reach past {self.sm_schedule_offset}"
            )

    @property
    def rank_flag_base(self) -> int:
        return self.n_local_experts * self.n_ranks

    @property
    def rc_cursor_base(self) -> int:
        """First reservation cursor in the receive counts, one a local expert."""
        return self.rank_flag_base + self.n_ranks

    @property
    def n_sources(self) -> int:
        """Ranks that send to this one."""
        return 1 if self.skip_a2a else self.n_ranks

    @property
    def n_pairs(self) -> int:
        """(local expert, source) pairs."""
        return self.n_local_experts * self.n_sources

    @property
    def n_peers(self) -> int:
        """Ranks that must acknowledge what this one sent; none where nothing leaves the device, whose launches are in order."""
        return 0 if self.skip_a2a else self.n_ranks

    @property
    def n_slots(self) -> int:
        """Experts of the output: the shared one, if any, then the local ones."""
        return self.n_local_experts + int(self.fused_shared_expert)

    @property
    def max_recv_tokens(self) -> int:
        """Rows the output needs in the worst case: every rank sends every token to as many of our experts as it can.

        With the shared expert's rows, and with every slot padded to the format's row padding.
        """
        padding = self.token_fmt_type.row_padding
        routed = self.max_tokens_per_rank * self.n_sources * min(self.n_local_experts, self.top_k)
        shared = self.max_tokens_per_rank if self.fused_shared_expert else 0
        return align_up(routed + shared + self.n_slots * (padding - 1), padding)

    def recv_count_size(self) -> int:
        """u64 words of the receive counts: one a pair, then the rank flags, then a cursor for each local expert."""
        return self.rc_cursor_base + self.n_local_experts

    def reservations_size(self) -> int:
        """u64 words: what sources tell about their blocks, one a (global expert, rank) or (local expert, source)."""
        if not self.ep_final_layout:
            return 1
        return self.n_pairs if self.ep_prod_reserve else self.n_experts * self.n_ranks

    def mailbox_size(self) -> int:
        """i32 words: base, tag and count of each block this rank sends."""
        return 3 * self.n_experts if self.ep_final_layout else 1

    def send_buf_size(self) -> int:
        """Bytes."""
        return self.max_tokens_per_rank * self.msg_bytes

    def send_buf_layout(self, token: int, byte: int = 0) -> int:
        """Byte offset in the send buffer."""
        return token * self.msg_bytes + byte

    def recv_buf_size(self) -> int:
        """Bytes."""
        return self.n_experts * self.max_tokens_per_rank * self.msg_bytes

    @ep.func
    def recv_buf_layout(self, local_expert: ep.i32, src_rank: ep.i32, slot: ep.i32) -> ep.i64:
        """Byte offset of a message in the receive buffer. In the final layout src_rank is 0 and slot the row within the expert."""
        return ((ep.i64(local_expert) * self.n_ranks + src_rank) * self.max_tokens_per_rank + slot) * self.msg_bytes

    @ep.func
    def rank_flag_offset(self, src_rank: ep.i32) -> ep.i32:
        """Index of `src_rank`'s completion flag in the destination's receive counts."""
        return self.rank_flag_base + src_rank

    @ep.func
    def recv_count_layout(self, local_expert: ep.i32, src_rank: ep.i32) -> ep.i32:
        """Index of a pair's word; with skip_a2a the only source is number 0."""
        return local_expert * self.n_sources + src_rank

    def comm_class(self, comm_thread_base: int, n_comm_threads: int, comm_barrier_id: int) -> ep.Group:
        """The threads that run a phase; their barrier is the block's where comm_barrier_id is negative."""
        return ep.Group(comm_thread_base, n_comm_threads, comm_barrier_id)


def check_completion(name: str, has_rank_flag: bool, ep_ord_r: bool, release_every: bool, ordering: str) -> None:
    """Raises ValueError for a way of completion that does not exist."""
    if has_rank_flag != ep_ord_r:
        raise ValueError(
            f"{name}: has_rank_flag={has_rank_flag} and ep_ord_r={ep_ord_r}; "
            "the rank flag is what ep_ord_r publishes, so set both or neither"
        )
    if release_every and ep_ord_r:
        raise ValueError(f"{name}: release_every releases every expert's word and ep_ord_r one flag a rank; set one of them")
    if ordering not in ("acq_rel", "seed"):
        raise ValueError(f"{name}: ordering={ordering!r} is not known; it is 'acq_rel' or 'seed'")
