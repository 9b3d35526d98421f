"""Parameters of the dispatch kernels and the sizes that follow from them."""

from __future__ import annotations

from dataclasses import dataclass

from .layout import DEFAULT_TIMEOUT_NS, EPLocalSyncCounters, ceildiv, check_geometry, refuse_unserved
from .token_format import BF16TokenFormat


@dataclass(frozen=True)
class DispatchParameters:
    """What the dispatch kernels are specialised on, and the sizes that follow from it.

    num_threads          threads of a block
    n_sms                blocks of a launch, all resident at once
    n_experts            experts of the whole model; each rank has n_experts / n_ranks consecutive ones
    n_ranks              ranks that take part
    max_tokens_per_rank  tokens a rank may send in one launch
    p2p_world_size       ranks that reach each other's memory: all of them
    token_fmt_type       how a token lies in a message
    has_rank_flag, ep_ord_r  together: completion once per source rank instead of once per expert (see `ep_signal_completion`)
    timeout_ns           nanoseconds any wait may take before the launch reports a fault

    The other parameters are not served yet and must be False.
    """

    num_threads: int
    n_sms: int
    n_experts: int
    n_ranks: int
    max_tokens_per_rank: int
    p2p_world_size: int
    token_fmt_type: BF16TokenFormat
    use_shmem: bool = False
    fused_shared_expert: bool = False
    skip_a2a: bool = False
    has_rank_flag: bool = False
    ep_ord_r: bool = False
    ep_final_layout: bool = False
    ep_prod_reserve: bool = False
    ep_copy_role_split: bool = False
    ep_send_join_named: bool = False
    timeout_ns: int = DEFAULT_TIMEOUT_NS

    def __post_init__(self) -> None:
        check_geometry(
            type(self).__name__,
            self.num_threads,
            self.n_sms,
            self.n_experts,
            self.n_ranks,
            self.p2p_world_size,
            self.top_k,
            self.max_tokens_per_rank,
        )
        refuse_unserved(
            type(self).__name__,
            use_shmem=self.use_shmem,
            fused_shared_expert=self.fused_shared_expert,
            skip_a2a=self.skip_a2a,
            ep_final_layout=self.ep_final_layout,
            ep_prod_reserve=self.ep_prod_reserve,
            ep_copy_role_split=self.ep_copy_role_split,
            ep_send_join_named=self.ep_send_join_named,
        )
        if self.has_rank_flag != self.ep_ord_r:
            raise ValueError(
                f"{type(self).__name__}: has_rank_flag={self.has_rank_flag} and ep_ord_r={self.ep_ord_r}; "
                "the rank flag is what ep_ord_r publishes, so set both or neither"
            )

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
        return max(1, min(ceildiv(self.n_experts, self.n_warps(warp_size)), self.n_sms // 2))

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
    def rank_flag_base(self) -> int:
        return self.n_local_experts * self.n_ranks

    @property
    def rc_cursor_base(self) -> int:
        return self.rank_flag_base + self.n_ranks

    @property
    def max_recv_tokens(self) -> int:
        """Rows the output needs in the worst case: every rank sends every token to as many of our experts as it can."""
        return self.max_tokens_per_rank * self.n_ranks * min(self.n_local_experts, self.top_k)

    def recv_count_size(self) -> int:
        """u64 words of the receive counts: one a pair, then the rank flags, then a cursor for each local expert."""
        return self.rc_cursor_base + self.n_local_experts

    def send_buf_size(self) -> int:
        """Bytes."""
        return self.max_tokens_per_rank * self.msg_bytes

    def recv_buf_size(self) -> int:
        """Bytes."""
        return self.n_experts * self.max_tokens_per_rank * self.msg_bytes
