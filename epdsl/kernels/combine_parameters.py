"""Parameters of the combine kernels and the sizes that follow from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import epdsl as ep

from .dispatch_parameters import check_completion
from .layout import DEFAULT_TIMEOUT_NS, VECTOR_BYTES, EPLocalSyncCounters, ceildiv, check_geometry, refuse_unserved
from .signal import Ordering
from .trace import NO_TRACE, TraceBuf

VECTOR_ELEMENTS = VECTOR_BYTES // 2

CombineSchedule = Literal["auto", "legacy", "balanced"]


@dataclass(frozen=True)
class CombineParameters:
    """What the combine kernels are specialised on, and the sizes that follow from it.

    num_threads          threads of a block
    n_sms                blocks of a launch, all resident at once
    top_k                experts a token went to
    n_experts            experts of the whole model
    n_ranks              ranks that take part
    msg_bytes            bytes of a row: hidden bf16 values, nothing else
    max_tokens_per_rank  tokens a rank may have sent
    p2p_world_size       ranks that reach each other's memory: all of them
    use_shmem            not served: must be False
    fused_shared_expert  the first rows of the input are the shared expert's and are added to their tokens' sums, last
    skip_a2a             rows stay on this device: sums are over this rank's experts alone
    has_rank_flag, ep_ord_r, release_every, ordering  of completion, see `ep_signal_completion`
    unreduced            no sum: the output is [n_tokens, top_k, hidden], zero where a selection was not sent; no router weights
    schedule             "legacy", "balanced", or "auto": balanced from 4 rows an expert on
    output_type          "bf16" or "f32"
    trace                where events go
    timeout_ns           nanoseconds any wait may take before the launch reports a fault
    """

    num_threads: int
    n_sms: int
    top_k: int
    n_experts: int
    n_ranks: int
    msg_bytes: int
    max_tokens_per_rank: int
    p2p_world_size: int
    use_shmem: bool = False
    fused_shared_expert: bool = False
    skip_a2a: bool = False
    has_rank_flag: bool = False
    ep_ord_r: bool = False
    release_every: bool = False
    ordering: Ordering = "acq_rel"
    unreduced: bool = False
    schedule: CombineSchedule = "auto"
    output_type: Literal["bf16", "f32"] = "bf16"
    trace: TraceBuf = NO_TRACE
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
        refuse_unserved(type(self).__name__, use_shmem=self.use_shmem)
        check_completion(type(self).__name__, self.has_rank_flag, self.ep_ord_r, self.release_every, self.ordering)
        if self.msg_bytes < VECTOR_BYTES or self.msg_bytes % VECTOR_BYTES:
            raise ValueError(f"{type(self).__name__}: msg_bytes={self.msg_bytes} must be a multiple of {VECTOR_BYTES} bytes")
        if self.max_tokens_per_rank * self.top_k * self.n_chunks(32) >= 2**31:
            raise ValueError(
                f"{type(self).__name__}: {self.max_tokens_per_rank} tokens of {self.top_k} rows of {self.msg_bytes} bytes "
                "are more than 2**31 chunks of 512 bytes"
            )
        if self.output_type not in ("bf16", "f32"):
            raise ValueError(f"{type(self).__name__}: output_type={self.output_type!r}; it is 'bf16' or 'f32'")
        if self.schedule not in ("auto", "legacy", "balanced"):
            raise ValueError(f"{type(self).__name__}: schedule={self.schedule!r}; it is 'auto', 'legacy' or 'balanced'")
        if self.unreduced and self.fused_shared_expert:
            raise ValueError(
                f"{type(self).__name__}: the shared expert is added to a sum, which unreduced=True does not make; set one of them"
            )

    @property
    def hid_dim(self) -> int:
        return self.msg_bytes // 2

    @property
    def n_local_experts(self) -> int:
        return self.n_experts // self.n_ranks

    def n_warps(self, warp_size: int) -> int:
        """Warps of a block."""
        return self.num_threads // warp_size

    @property
    def n_wait_sms(self) -> int:
        return 1

    @property
    def n_reduce_sms(self) -> int:
        return self.n_sms - self.n_wait_sms

    def n_chunks(self, warp_size: int) -> int:
        """Units of work a token is divided into: 16 bytes of input a lane."""
        return ceildiv(self.hid_dim, warp_size * VECTOR_ELEMENTS)

    @property
    def counters(self) -> EPLocalSyncCounters:
        return EPLocalSyncCounters(self.n_experts, self.n_ranks)

    @property
    def cleanup_counter_offset(self) -> int:
        """Within the combine's counter block, behind its election counters."""
        return max(8, self.n_ranks)

    @property
    def ready_flag_offset(self) -> int:
        return max(8, self.n_ranks) + 1

    @property
    def pair_done_offset(self) -> int:
        """In the dispatch's counter block: rows sent of each pair, with the balanced schedule."""
        return 7 * self.n_experts + 8

    @property
    def n_targets(self) -> int:
        """Ranks that rows go back to."""
        return 1 if self.skip_a2a else self.n_ranks

    @property
    def n_pairs(self) -> int:
        return self.n_local_experts * self.n_targets

    @property
    def rank_flag_base(self) -> int:
        return self.n_experts

    @ep.func
    def rank_flag_offset(self, src_rank: ep.i32) -> ep.i32:
        """Index of `src_rank`'s completion flag in the receive counts."""
        return self.rank_flag_base + src_rank

    def recv_count_size(self) -> int:
        """u64 words of the receive counts: one a pair, then the rank flags."""
        return self.n_experts + self.n_ranks

    def recv_buf_size(self) -> int:
        """Bytes."""
        return self.max_tokens_per_rank * self.top_k * self.msg_bytes

    @ep.func
    def recv_buf_layout(self, src_idx: ep.i32, src_topk: ep.i32) -> ep.i64:
        """Byte offset of a row in the receive buffer of the token's rank."""
        return (ep.i64(src_idx) * self.top_k + src_topk) * self.msg_bytes

    @ep.func
    def recv_count_layout(self, local_expert: ep.i32, rank: ep.i32) -> ep.i32:
        """Index of the word that `rank` publishes for its expert `local_expert`."""
        return local_expert * self.n_targets + rank
