"""Combine: what the experts made of every token travels back to the token's rank and is summed there, each row times its weight.

The epoch is as in the dispatch (`epochs[COMBINE_EPOCH]` is the last one finished). Who writes what, who waits for it:

    send block    rows of a (local expert, source rank) pair -> recv_buf of that rank, then the pair's word (ep_signal_completion)
    wait block    waits for the words of all ranks (acquire, system); ready = epoch (release, device)
    reduce block  waits ready == epoch (acquire, device); sums recv_buf -> output
    last block out tells every rank "epoch consumed" (release, system), which that rank's next combine waits for (acquire, system)

A row's place in the receive buffer is (token, k) of its source, so nobody reserves anything and the sum is always taken in order of k.
Buffers may be used again for the reason given in `dispatch`, with the combine's own buffers, words and epoch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import epdsl as ep

from .layout import (
    COMBINE_EPOCH,
    DEFAULT_TIMEOUT_NS,
    EP_DATA_READY_FLAG,
    STATUS_SRC_INFO,
    VECTOR_BYTES,
    EPLocalSyncCounters,
    ceildiv,
    check_geometry,
    refuse_unserved,
)
from .signal import acknowledge_and_rest, ep_signal_completion, record_fault, wait_for_consumption

VECTOR_ELEMENTS = VECTOR_BYTES // 2


@dataclass(frozen=True)
class EPCombineKernel:
    """The combine kernels of one configuration.

    num_threads          threads of a block
    n_sms                blocks of a launch, all resident at once
    top_k                experts a token went to
    n_experts            experts of the whole model
    n_ranks              ranks that take part
    msg_bytes            bytes of a row: hidden bf16 values, nothing else
    max_tokens_per_rank  tokens a rank may have sent
    p2p_world_size       ranks that reach each other's memory: all of them
    has_rank_flag, ep_ord_r  together: completion once per rank instead of once per pair (see `ep_signal_completion`)
    output_type          "bf16" or "f32"
    timeout_ns           nanoseconds any wait may take before the launch reports a fault

    The other parameters are not served yet and must be False.
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
    output_type: Literal["bf16", "f32"] = "bf16"
    timeout_ns: int = DEFAULT_TIMEOUT_NS

    def __post_init__(self) -> None:
        check_geometry(
            "EPCombineKernel",
            self.num_threads,
            self.n_sms,
            self.n_experts,
            self.n_ranks,
            self.p2p_world_size,
            self.top_k,
            self.max_tokens_per_rank,
        )
        refuse_unserved("EPCombineKernel", use_shmem=self.use_shmem, fused_shared_expert=self.fused_shared_expert, skip_a2a=self.skip_a2a)
        if self.has_rank_flag != self.ep_ord_r:
            raise ValueError(
                f"EPCombineKernel: has_rank_flag={self.has_rank_flag} and ep_ord_r={self.ep_ord_r}; "
                "the rank flag is what ep_ord_r publishes, so set both or neither"
            )
        if self.msg_bytes < VECTOR_BYTES or self.msg_bytes % VECTOR_BYTES:
            raise ValueError(f"EPCombineKernel: msg_bytes={self.msg_bytes} must be a multiple of {VECTOR_BYTES} bytes")
        if self.max_tokens_per_rank * self.n_chunks(32) >= 2**31:
            raise ValueError(
                f"EPCombineKernel: {self.max_tokens_per_rank} tokens of {self.msg_bytes} bytes are more than 2**31 chunks of 512 bytes"
            )
        if self.output_type not in ("bf16", "f32"):
            raise ValueError(f"EPCombineKernel: output_type={self.output_type!r}; it is 'bf16' or 'f32'")

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
        return self.n_ranks

    @property
    def ready_flag_offset(self) -> int:
        return self.n_ranks + 1

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
        return local_expert * self.n_ranks + rank

    @ep.func
    def send_tokens_back(
        self,
        input_tokens: ep.Ptr[ep.bf16],
        src_info: ep.Ptr[ep.i32],
        recv_buf_ptrs: ep.Peers[ep.u8],
        recv_count_ptrs: ep.Peers[ep.u64],
        atomic_counter: ep.Ptr[ep.i32],
        rank_completion_counter: ep.Ptr[ep.i32],
        status: ep.Ptr[ep.u64],
        my_rank: ep.i32,
        sm_id: ep.i32,
        epoch: ep.u32,
    ):
        """Block `sm_id` sends every n-th pair's rows back, a warp a row, and publishes the pair.

        A row whose `src_info` names no (token, k) a rank can have sent would be written into foreign memory: it is counted and left out.
        """
        tid = ep.thread_idx.x
        for index in range(sm_id, self.n_experts, self.n_sms):
            target_rank = index // self.n_local_experts
            local_expert = index % self.n_local_experts
            pair = local_expert * self.n_ranks + target_rank
            end = atomic_counter[2 * pair] - EP_DATA_READY_FLAG
            count = atomic_counter[2 * pair + 1]
            for i in range(end - count + ep.warp_id(), end, self.n_warps(ep.warp_size())):
                row = ep.i64(i)
                src_idx = src_info[2 * row]
                src_topk = src_info[2 * row + 1]
                if src_idx >= 0 and src_idx < self.max_tokens_per_rank and src_topk >= 0 and src_topk < self.top_k:
                    ep.warp_copy(
                        recv_buf_ptrs[target_rank] + self.recv_buf_layout(src_idx, src_topk),
                        (input_tokens + row * self.hid_dim).cast(ep.u8),
                        self.msg_bytes,
                    )
                elif ep.lane_id() == 0:
                    record_fault(status + STATUS_SRC_INFO, i, 0)
            # All warps' stores happen before thread 0's release.
            ep.barrier()
            if tid == 0:
                ep_signal_completion(
                    my_rank,
                    target_rank,
                    recv_count_ptrs,
                    self.recv_count_layout(local_expert, my_rank),
                    (ep.u64(epoch) << 32) | ep.u64(count),
                    rank_completion_counter,
                    self.rank_flag_offset(my_rank),
                    self.n_local_experts,
                    self.ep_ord_r,
                )

    @ep.func
    def wait_for_all_arrivals(self, recv_count_p: ep.Ptr[ep.u64], ready_flag: ep.Ptr[ep.i32], epoch: ep.u32):
        """One block waits until every rank has sent its rows, then lets the reduce blocks go."""
        tid = ep.thread_idx.x
        if self.ep_ord_r:
            for r in range(tid, self.n_ranks, self.num_threads):
                # Pairs with the elected producer's release of this flag on rank r, which carries all of rank r's rows.
                ep.wait(
                    recv_count_p + self.rank_flag_offset(r),
                    until=lambda v: ep.u32(v >> 32) == epoch,
                    order=ep.ACQUIRE,
                    scope=ep.SYSTEM,
                    timeout_ns=self.timeout_ns,
                )
        else:
            for word in range(tid, self.n_experts, self.num_threads):
                # Pairs with the sender's release of this word, which carries that pair's rows.
                ep.wait(
                    recv_count_p + word,
                    until=lambda v: ep.u32(v >> 32) == epoch,
                    order=ep.ACQUIRE,
                    scope=ep.SYSTEM,
                    timeout_ns=self.timeout_ns,
                )
        ep.barrier()
        if tid == 0:
            # Pairs with the reduce blocks' wait; carries everything this block acquired from the peers.
            ep.store(ready_flag, ep.i32(epoch), order=ep.RELEASE, scope=ep.DEVICE)

    @ep.func
    def reduce_and_copy_to_output(
        self,
        output: ep.Ptr[ep.u8],
        routed_ids: ep.Ptr[ep.i32],
        router_weights: ep.Ptr[ep.f32],
        n_tokens: ep.i32,
        recv_buf_p: ep.Ptr[ep.u8],
        ready_flag: ep.Ptr[ep.i32],
        reduce_sm_id: ep.i32,
        epoch: ep.u32,
    ):
        """A warp sums a chunk of a token: in f32, in order of k, product rounded before the addition. Dropped selections add nothing."""
        if ep.thread_idx.x == 0:
            # Pairs with the wait block's release of the ready flag.
            ep.wait(ready_flag, until=lambda v: v == ep.i32(epoch), order=ep.ACQUIRE, scope=ep.DEVICE, timeout_ns=self.timeout_ns)
        ep.barrier()
        n_chunks = self.n_chunks(ep.warp_size())
        stride = self.n_warps(ep.warp_size()) * self.n_reduce_sms
        for item in range(reduce_sm_id + ep.warp_id() * self.n_reduce_sms, n_tokens * n_chunks, stride):
            token = item // n_chunks
            column = (item % n_chunks * ep.warp_size() + ep.lane_id()) * VECTOR_ELEMENTS
            if column < self.hid_dim:
                first = ep.i64(token) * self.top_k
                low = ep.vec(ep.f32, 4)(0.0, 0.0, 0.0, 0.0)
                high = ep.vec(ep.f32, 4)(0.0, 0.0, 0.0, 0.0)
                for k in range(self.top_k):
                    if routed_ids[first + k] >= 0:
                        weight = router_weights[first + k]
                        source = (recv_buf_p + self.recv_buf_layout(token, k)).cast(ep.bf16) + column
                        v = ep.load(source, width=VECTOR_ELEMENTS)
                        low += ep.vec(ep.f32, 4)(ep.f32(v[0]), ep.f32(v[1]), ep.f32(v[2]), ep.f32(v[3])) * weight
                        high += ep.vec(ep.f32, 4)(ep.f32(v[4]), ep.f32(v[5]), ep.f32(v[6]), ep.f32(v[7])) * weight
                element = ep.i64(token) * self.hid_dim + column
                if self.output_type == "f32":
                    target = output.cast(ep.f32) + element
                    ep.store(target, low)
                    ep.store(target + 4, high)
                else:
                    ep.store(
                        output.cast(ep.bf16) + element,
                        ep.vec(ep.bf16, 8)(
                            ep.bf16(low[0]), ep.bf16(low[1]), ep.bf16(low[2]), ep.bf16(low[3]),
                            ep.bf16(high[0]), ep.bf16(high[1]), ep.bf16(high[2]), ep.bf16(high[3]),
                        ),
                    )  # fmt: skip

    @ep.func
    def send_phase(self, input_tokens, src_info, recv_bufs, recv_counts, consumed, counters, status, my_rank, epoch):
        """Everything of a launch that writes to peers."""
        wait_for_consumption(consumed[my_rank], epoch, self.n_ranks, self.timeout_ns)
        self.send_tokens_back(
            input_tokens,
            src_info,
            recv_bufs,
            recv_counts,
            counters + self.counters.dispatch_wait_base,
            counters + self.counters.combine_base,
            status,
            my_rank,
            ep.block_idx.x,
            epoch,
        )

    @ep.func
    def receive_phase(
        self, output, routed_ids, router_weights, n_tokens, recv_bufs, recv_counts, consumed, counters, epochs, my_rank, epoch
    ):
        """Everything of a launch that reads what peers wrote."""
        block = counters + self.counters.combine_base
        ready_flag = block + self.ready_flag_offset
        if ep.block_idx.x < self.n_wait_sms:
            self.wait_for_all_arrivals(recv_counts[my_rank], ready_flag, epoch)
        else:
            self.reduce_and_copy_to_output(
                output, routed_ids, router_weights, n_tokens, recv_bufs[my_rank], ready_flag, ep.block_idx.x - self.n_wait_sms, epoch
            )
        acknowledge_and_rest(
            block + self.cleanup_counter_offset, epochs + COMBINE_EPOCH, consumed, my_rank, epoch, self.n_sms, self.n_ranks
        )

    @ep.kernel(max_threads=lambda self: self.num_threads)
    def combine_async(
        self,
        input_tokens: ep.Ptr[ep.bf16],
        src_info: ep.Ptr[ep.i32],
        recv_bufs: ep.Peers[ep.u8],
        recv_counts: ep.Peers[ep.u64],
        consumed: ep.Peers[ep.u32],
        counters: ep.Ptr[ep.i32],
        epochs: ep.Ptr[ep.u32],
        status: ep.Ptr[ep.u64],
        my_rank: ep.i32,
    ):
        """Sends the experts' rows back. `combine_wait` must follow before the next `combine_async`.

        input_tokens [rows, hid_dim] in the order of the dispatch's output; src_info and counters as the dispatch left them
        """
        epoch = epochs[COMBINE_EPOCH] + 1
        self.send_phase(input_tokens, src_info, recv_bufs, recv_counts, consumed, counters, status, my_rank, epoch)

    @ep.kernel(max_threads=lambda self: self.num_threads)
    def combine_wait(
        self,
        output: ep.Ptr[ep.u8],
        routed_ids: ep.Ptr[ep.i32],
        router_weights: ep.Ptr[ep.f32],
        n_tokens: ep.i32,
        recv_bufs: ep.Peers[ep.u8],
        recv_counts: ep.Peers[ep.u64],
        consumed: ep.Peers[ep.u32],
        counters: ep.Ptr[ep.i32],
        epochs: ep.Ptr[ep.u32],
        my_rank: ep.i32,
    ):
        """Receives and sums.

        output [n_tokens, hid_dim] of output_type, routed_ids [n_tokens, top_k] as the dispatch wrote them, router_weights [n_tokens, top_k]
        """
        epoch = epochs[COMBINE_EPOCH] + 1
        self.receive_phase(output, routed_ids, router_weights, n_tokens, recv_bufs, recv_counts, consumed, counters, epochs, my_rank, epoch)

    @ep.kernel(max_threads=lambda self: self.num_threads)
    def combine(
        self,
        input_tokens: ep.Ptr[ep.bf16],
        src_info: ep.Ptr[ep.i32],
        output: ep.Ptr[ep.u8],
        routed_ids: ep.Ptr[ep.i32],
        router_weights: ep.Ptr[ep.f32],
        n_tokens: ep.i32,
        recv_bufs: ep.Peers[ep.u8],
        recv_counts: ep.Peers[ep.u64],
        consumed: ep.Peers[ep.u32],
        counters: ep.Ptr[ep.i32],
        epochs: ep.Ptr[ep.u32],
        status: ep.Ptr[ep.u64],
        my_rank: ep.i32,
    ):
        """`combine_async` and `combine_wait` in one launch."""
        epoch = epochs[COMBINE_EPOCH] + 1
        self.send_phase(input_tokens, src_info, recv_bufs, recv_counts, consumed, counters, status, my_rank, epoch)
        self.receive_phase(output, routed_ids, router_weights, n_tokens, recv_bufs, recv_counts, consumed, counters, epochs, my_rank, epoch)
