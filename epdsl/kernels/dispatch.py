"""Dispatch: every token travels to the ranks of its experts and lands expert by expert in the output.

A launch has a number, the epoch, kept in device memory (`epochs[DISPATCH_EPOCH]` is the last one finished), so a captured launch can be
replayed. Who writes what, who waits for it:

    send block     payload -> recv_buf of the destination; finished[pair] += 1 (release, device)
    monitor warp   waits finished[pair] == count (acquire, device); publishes count to the destination (ep_signal_completion)
    offset block   waits for the counts of all ranks (acquire, system); writes the offsets; ready = epoch (release, device)
    copy block     waits ready == epoch (acquire, device); copies recv_buf -> output
    last block out tells every source "epoch consumed" (release, system), which that source's next launch waits for (acquire, system)

The chain is cumulative: lanes of a warp store payload, the warp synchronises, lane 0 releases at device scope, the monitor acquires at
device scope and releases at system scope, the destination acquires at system scope, its ready flag hands on to its copy blocks.

Why buffers may be used again, whatever the skew between ranks and whatever runs between two dispatches: nothing of launch n + 1 is
written to rank r (payload, counts, flag) before r said it consumed launch n, and r says so after the last of its blocks has read its last
byte of launch n. A count or flag carries its launch number and is compared for equality, so an old one satisfies nobody and nothing has to
be re-armed. No cycle of waits: rank r's launch n needs only launches n of its peers, which need only launches n - 1 of theirs.

All blocks of a launch must be resident at once, since blocks wait for each other; the host checks.
"""

from __future__ import annotations

from dataclasses import dataclass

import epdsl as ep

from .dispatch_parameters import DispatchParameters
from .layout import (
    DISPATCH_EPOCH,
    DROPPED,
    EP_DATA_READY_FLAG,
    ROUTE_NONE,
    ROUTE_OUT_OF_RANGE,
    ROUTE_REPEATED,
    STATUS_OUT_OF_RANGE,
    STATUS_REPEATED,
)
from .routing import appears_before, route_of
from .scan import inclusive_prefix_sum
from .signal import acknowledge_and_rest, ep_signal_completion, record_fault, wait_for_consumption


@dataclass(frozen=True)
class EPDispatchKernel(DispatchParameters):
    """The dispatch kernels of one configuration (see `DispatchParameters`): `dispatch_async`, `dispatch_wait`, and both as `dispatch`."""

    @ep.func
    def recv_buf_layout(self, local_expert: ep.i32, src_rank: ep.i32, slot: ep.i32) -> ep.i64:
        """Byte offset of a message in the receive buffer."""
        return ((ep.i64(local_expert) * self.n_ranks + src_rank) * self.max_tokens_per_rank + slot) * self.msg_bytes

    @ep.func
    def rank_flag_offset(self, src_rank: ep.i32) -> ep.i32:
        """Index of `src_rank`'s completion flag in the destination's receive counts."""
        return self.rank_flag_base + src_rank

    @ep.func
    def recv_count_layout(self, local_expert: ep.i32, src_rank: ep.i32) -> ep.i32:
        return local_expert * self.n_ranks + src_rank

    @ep.func
    def monitor_and_signal_completion(
        self,
        topk_ids: ep.Ptr[ep.i32],
        n_tokens: ep.i32,
        recv_count_ptrs: ep.Peers[ep.u64],
        expert_reserved_counter: ep.Ptr[ep.i32],
        expert_finished_counter: ep.Ptr[ep.i32],
        rank_completion_counter: ep.Ptr[ep.i32],
        my_rank: ep.i32,
        sm_id: ep.i32,
        epoch: ep.u32,
    ):
        """Each warp counts how many tokens go to an expert, waits until they are sent, and tells the expert's rank.

        Every expert is told every launch, also when nothing goes to it.
        """
        lane = ep.lane_id()
        n_warps = self.n_warps(ep.warp_size())
        for expert in range(sm_id * n_warps + ep.warp_id(), self.n_experts, self.n_signal_sms(ep.warp_size()) * n_warps):
            mine = ep.i32(0)
            for i in range(lane, n_tokens * self.top_k, ep.warp_size()):
                if topk_ids[i] == expert:
                    k = i % self.top_k
                    if appears_before(topk_ids, ep.i64(i - k), k, expert) == 0:
                        mine += 1
            count = ep.warp_reduce("add", mine)
            if lane == 0:
                dst_rank = expert // self.n_local_experts
                local_expert = expert % self.n_local_experts
                pair = local_expert * self.n_ranks + dst_rank
                # Pairs with the senders' release adds; the add that reaches the count ends a chain that carries every sender's payload.
                ep.wait(
                    expert_finished_counter + pair,
                    until=lambda v: v == count,  # noqa: B023
                    order=ep.ACQUIRE,
                    scope=ep.DEVICE,
                    timeout_ns=self.timeout_ns,
                )
                ep_signal_completion(
                    my_rank,
                    dst_rank,
                    recv_count_ptrs,
                    self.recv_count_layout(local_expert, my_rank),
                    (ep.u64(epoch) << 32) | ep.u64(count),
                    rank_completion_counter,
                    self.rank_flag_offset(my_rank),
                    self.n_local_experts,
                    self.ep_ord_r,
                )
                # Plain: all senders of this pair have added, and the next launch begins after this one.
                expert_reserved_counter[pair] = 0
                expert_finished_counter[pair] = 0
            ep.warp_sync()

    @ep.func
    def copy_and_send_tokens(
        self,
        input_tokens: ep.Ptr[ep.bf16],
        topk_ids: ep.Ptr[ep.i32],
        n_tokens: ep.i32,
        send_buf_p: ep.Ptr[ep.u8],
        routed_ids: ep.Ptr[ep.i32],
        recv_buf_ptrs: ep.Peers[ep.u8],
        expert_reserved_counter: ep.Ptr[ep.i32],
        expert_finished_counter: ep.Ptr[ep.i32],
        status: ep.Ptr[ep.u64],
        my_rank: ep.i32,
        sm_id: ep.i32,
    ):
        """Block `sm_id` of the send blocks packs every n-th token and sends it to each of its experts, a warp a selection."""
        group = ep.Group(0, self.num_threads, -1)
        n_warps = self.n_warps(ep.warp_size())
        tid = ep.thread_idx.x
        lane = ep.lane_id()
        for token in range(sm_id, n_tokens, self.n_dispatch_async_comm_sms(ep.warp_size())):
            message = send_buf_p + ep.i64(token) * self.msg_bytes
            topk_info = self.token_fmt_type.topk_info(message)
            first = ep.i64(token) * self.top_k
            self.token_fmt_type.copy_token_to_send_buf(message, input_tokens + ep.i64(token) * self.hid_dim, group)
            for k in range(tid, self.top_k, self.num_threads):
                route = route_of(topk_ids, first, k, self.n_experts)
                if route == ROUTE_OUT_OF_RANGE:
                    record_fault(status + STATUS_OUT_OF_RANGE, token, k)
                elif route == ROUTE_REPEATED:
                    record_fault(status + STATUS_REPEATED, token, k)
                sent = route >= 0
                topk_info[k] = ep.u16(ep.select(sent, route, DROPPED))
                routed_ids[first + k] = ep.select(sent, route, ROUTE_NONE)
            if tid == 0:
                self.token_fmt_type.src_info(message)[0] = token
            ep.group_barrier(group)
            for k in range(ep.warp_id(), self.top_k, n_warps):
                expert = ep.i32(topk_info[k])
                if expert != DROPPED:
                    dst_rank = expert // self.n_local_experts
                    local_expert = expert % self.n_local_experts
                    pair = local_expert * self.n_ranks + dst_rank
                    slot = ep.i32(0)
                    if lane == 0:
                        # Relaxed: it only hands out a number. The release add below comes after it in this thread.
                        slot = ep.atomic_add(expert_reserved_counter + pair, 1, order=ep.RELAXED, scope=ep.DEVICE)
                    slot = ep.shfl(slot, 0)
                    ep.warp_copy(recv_buf_ptrs[dst_rank] + self.recv_buf_layout(local_expert, my_rank, slot), message, self.msg_bytes)
                    # The lanes' stores happen before lane 0's release.
                    ep.warp_sync()
                    if lane == 0:
                        # Pairs with the monitor's wait on this word.
                        ep.reduce_add(expert_finished_counter + pair, 1, order=ep.RELEASE, scope=ep.DEVICE)

    @ep.func
    def wait_for_arrivals_and_compute_offsets(
        self,
        row_offsets: ep.Ptr[ep.u32],
        expert_ids: ep.Ptr[ep.i32],
        recv_count_p: ep.Ptr[ep.u64],
        atomic_counter: ep.Ptr[ep.i32],
        epoch: ep.u32,
    ):
        """One block waits for what every rank sends, lays out the output, and lets the copy blocks go.

        A pair is (local expert, source rank), in that order; rows of the output are in order of pairs.
        """
        tid = ep.thread_idx.x
        ends = ep.shared(ep.i32, self.n_experts)
        warp_sums = ep.shared(ep.i32, self.n_warps(ep.warp_size()))
        if self.ep_ord_r:
            for r in range(tid, self.n_ranks, self.num_threads):
                # Pairs with the elected producer's release of this flag on rank r, which carries rank r's payload and count words.
                ep.wait(
                    recv_count_p + self.rank_flag_offset(r),
                    until=lambda v: ep.u32(v >> 32) == epoch,
                    order=ep.ACQUIRE,
                    scope=ep.SYSTEM,
                    timeout_ns=self.timeout_ns,
                )
            ep.barrier()
        for pair in range(tid, self.n_experts, self.num_threads):
            if self.ep_ord_r:
                word = recv_count_p[pair]
            else:
                # Pairs with the monitor's release of this word.
                word = ep.wait(
                    recv_count_p + pair,
                    until=lambda v: ep.u32(v >> 32) == epoch,
                    order=ep.ACQUIRE,
                    scope=ep.SYSTEM,
                    timeout_ns=self.timeout_ns,
                )
            count = ep.i32(word & 0xFFFFFFFF)
            ep.device_assert(
                ep.u32(word >> 32) == epoch and count >= 0 and count <= self.max_tokens_per_rank,
                "dispatch: the count of pair {} is {}, of launch {}",
                pair,
                count,
                ep.u32(word >> 32),
            )
            ends[pair] = count
        ep.barrier()
        inclusive_prefix_sum(ends, warp_sums, self.n_experts, self.num_threads)
        for pair in range(tid, self.n_experts, self.num_threads):
            local_expert = pair // self.n_ranks
            src_rank = pair % self.n_ranks
            begin = ep.i32(0)
            if pair > 0:
                begin = ends[pair - 1]
            expert_begin = ep.i32(0)
            if local_expert > 0:
                expert_begin = ends[local_expert * self.n_ranks - 1]
            end = ends[pair]
            atomic_counter[2 * pair] = EP_DATA_READY_FLAG + end
            atomic_counter[2 * pair + 1] = end - begin
            atomic_counter[self.rank_prefix_offset + pair] = end - expert_begin
            if src_rank == 0:
                atomic_counter[self.work_counter_offset + local_expert] = 0
                expert_ids[local_expert] = local_expert
                row_offsets[local_expert] = ep.u32(expert_begin)
            if pair == self.n_experts - 1:
                row_offsets[self.n_local_experts] = ep.u32(end)
        ep.barrier()
        if tid == 0:
            # Pairs with the copy blocks' wait; carries the offsets and everything this block acquired from the peers.
            ep.store(atomic_counter + self.ready_flag_offset, ep.i32(epoch), order=ep.RELEASE, scope=ep.DEVICE)

    @ep.func
    def copy_received_tokens_to_output(
        self,
        output: ep.Ptr[ep.bf16],
        row_offsets: ep.Ptr[ep.u32],
        src_info: ep.Ptr[ep.i32],
        recv_buf_p: ep.Ptr[ep.u8],
        atomic_counter: ep.Ptr[ep.i32],
        my_rank: ep.i32,
        scatter_sm_id: ep.i32,
        epoch: ep.u32,
    ):
        """Blocks share the local experts and claim tiles of rows from each; a warp copies a row.

        With fewer blocks than experts a block has several experts, with more an expert has several blocks.
        """
        tid = ep.thread_idx.x
        claimed = ep.shared(ep.i32, 1)
        tile_rows = self.token_fmt_type.tile_rows
        if tid == 0:
            # Pairs with the offset block's release of the ready flag.
            ep.wait(
                atomic_counter + self.ready_flag_offset,
                until=lambda v: v == ep.i32(epoch),
                order=ep.ACQUIRE,
                scope=ep.DEVICE,
                timeout_ns=self.timeout_ns,
            )
        ep.barrier()
        for local_expert in range(scatter_sm_id % self.n_local_experts, self.n_local_experts, self.n_dispatch_wait_comm_sms):
            first_row = ep.i64(row_offsets[local_expert])
            n_rows = ep.i32(row_offsets[local_expert + 1] - row_offsets[local_expert])
            begin = self.claim_tile(atomic_counter + (self.work_counter_offset + local_expert), claimed) * tile_rows
            while begin < n_rows:
                for i in range(begin + ep.warp_id(), ep.min(begin + tile_rows, n_rows), self.n_warps(ep.warp_size())):
                    self.copy_row(output, src_info, recv_buf_p, atomic_counter, my_rank, local_expert, first_row + i, i)
                begin = self.claim_tile(atomic_counter + (self.work_counter_offset + local_expert), claimed) * tile_rows

    @ep.func
    def claim_tile(self, work_counter: ep.Ptr[ep.i32], claimed: ep.Ptr[ep.i32]) -> ep.i32:
        """The next tile of an expert, the same for the whole block."""
        ep.barrier()
        if ep.thread_idx.x == 0:
            # Relaxed: it only hands out a number; the rows were published by the ready flag.
            claimed[0] = ep.atomic_add(work_counter, 1, order=ep.RELAXED, scope=ep.DEVICE)
        ep.barrier()
        return claimed[0]

    @ep.func
    def copy_row(
        self,
        output: ep.Ptr[ep.bf16],
        src_info: ep.Ptr[ep.i32],
        recv_buf_p: ep.Ptr[ep.u8],
        atomic_counter: ep.Ptr[ep.i32],
        my_rank: ep.i32,
        local_expert: ep.i32,
        row: ep.i64,
        position: ep.i32,
    ):
        """One warp copies the expert's row number `position` to row `row` of the output and says where it came from."""
        prefix = atomic_counter + (self.rank_prefix_offset + local_expert * self.n_ranks)
        src_rank = ep.i32(0)
        before = ep.i32(0)
        for r in range(self.n_ranks - 1):
            end = prefix[r]
            if position >= end:
                src_rank = r + 1
                before = end
        message = recv_buf_p + self.recv_buf_layout(local_expert, src_rank, position - before)
        self.token_fmt_type.copy_msg_to_output_tensor(output + row * self.hid_dim, message)
        topk_info = self.token_fmt_type.topk_info(message)
        for k in range(ep.lane_id(), self.top_k, ep.warp_size()):
            if ep.i32(topk_info[k]) == my_rank * self.n_local_experts + local_expert:
                src_info[2 * row] = self.token_fmt_type.src_info(message)[0]
                src_info[2 * row + 1] = k

    @ep.func
    def send_phase(
        self, input_tokens, topk_ids, n_tokens, send_buf, routed_ids, recv_bufs, recv_counts, consumed, counters, status, my_rank, epoch
    ):
        """Everything of a launch that writes to peers."""
        reserved = counters + self.counters.expert_reserved_base
        finished = counters + self.counters.expert_finished_base
        completion = counters + self.counters.dispatch_rank_completion_base
        sm_id = ep.block_idx.x
        n_signal_sms = self.n_signal_sms(ep.warp_size())
        wait_for_consumption(consumed[my_rank], epoch, self.n_ranks, self.timeout_ns)
        if sm_id < n_signal_sms:
            self.monitor_and_signal_completion(topk_ids, n_tokens, recv_counts, reserved, finished, completion, my_rank, sm_id, epoch)
        else:
            self.copy_and_send_tokens(
                input_tokens, topk_ids, n_tokens, send_buf, routed_ids, recv_bufs, reserved, finished, status, my_rank, sm_id - n_signal_sms
            )

    @ep.func
    def receive_phase(self, output, row_offsets, expert_ids, src_info, recv_bufs, recv_counts, consumed, counters, epochs, my_rank, epoch):
        """Everything of a launch that reads what peers wrote."""
        atomic_counter = counters + self.counters.dispatch_wait_base
        sm_id = ep.block_idx.x
        if sm_id == self.n_dispatch_wait_comm_sms:
            self.wait_for_arrivals_and_compute_offsets(row_offsets, expert_ids, recv_counts[my_rank], atomic_counter, epoch)
        else:
            self.copy_received_tokens_to_output(output, row_offsets, src_info, recv_bufs[my_rank], atomic_counter, my_rank, sm_id, epoch)
        acknowledge_and_rest(
            atomic_counter + self.cleanup_counter_offset, epochs + DISPATCH_EPOCH, consumed, my_rank, epoch, self.n_sms, self.n_ranks
        )

    @ep.kernel(max_threads=lambda self: self.num_threads)
    def dispatch_async(
        self,
        input_tokens: ep.Ptr[ep.bf16],
        topk_ids: ep.Ptr[ep.i32],
        n_tokens: ep.i32,
        send_buf: ep.Ptr[ep.u8],
        routed_ids: ep.Ptr[ep.i32],
        recv_bufs: ep.Peers[ep.u8],
        recv_counts: ep.Peers[ep.u64],
        consumed: ep.Peers[ep.u32],
        counters: ep.Ptr[ep.i32],
        epochs: ep.Ptr[ep.u32],
        status: ep.Ptr[ep.u64],
        my_rank: ep.i32,
    ):
        """Sends. `dispatch_wait` must follow before the next `dispatch_async`.

        input_tokens [n_tokens, hid_dim], topk_ids [n_tokens, top_k]: global expert ids, -1 for none
        routed_ids [n_tokens, top_k]: out, topk_ids with every selection that was not sent as -1
        """
        epoch = epochs[DISPATCH_EPOCH] + 1
        self.send_phase(
            input_tokens, topk_ids, n_tokens, send_buf, routed_ids, recv_bufs, recv_counts, consumed, counters, status, my_rank, epoch
        )

    @ep.kernel(max_threads=lambda self: self.num_threads)
    def dispatch_wait(
        self,
        output: ep.Ptr[ep.bf16],
        row_offsets: ep.Ptr[ep.u32],
        expert_ids: ep.Ptr[ep.i32],
        src_info: ep.Ptr[ep.i32],
        recv_bufs: ep.Peers[ep.u8],
        recv_counts: ep.Peers[ep.u64],
        consumed: ep.Peers[ep.u32],
        counters: ep.Ptr[ep.i32],
        epochs: ep.Ptr[ep.u32],
        my_rank: ep.i32,
    ):
        """Receives.

        output [max_recv_tokens, hid_dim], row_offsets [L + 1], expert_ids [L], src_info [max_recv_tokens, 2]: (source token, k)
        """
        epoch = epochs[DISPATCH_EPOCH] + 1
        self.receive_phase(output, row_offsets, expert_ids, src_info, recv_bufs, recv_counts, consumed, counters, epochs, my_rank, epoch)

    @ep.kernel(max_threads=lambda self: self.num_threads)
    def dispatch(
        self,
        input_tokens: ep.Ptr[ep.bf16],
        topk_ids: ep.Ptr[ep.i32],
        n_tokens: ep.i32,
        send_buf: ep.Ptr[ep.u8],
        routed_ids: ep.Ptr[ep.i32],
        output: ep.Ptr[ep.bf16],
        row_offsets: ep.Ptr[ep.u32],
        expert_ids: ep.Ptr[ep.i32],
        src_info: ep.Ptr[ep.i32],
        recv_bufs: ep.Peers[ep.u8],
        recv_counts: ep.Peers[ep.u64],
        consumed: ep.Peers[ep.u32],
        counters: ep.Ptr[ep.i32],
        epochs: ep.Ptr[ep.u32],
        status: ep.Ptr[ep.u64],
        my_rank: ep.i32,
    ):
        """`dispatch_async` and `dispatch_wait` in one launch."""
        epoch = epochs[DISPATCH_EPOCH] + 1
        self.send_phase(
            input_tokens, topk_ids, n_tokens, send_buf, routed_ids, recv_bufs, recv_counts, consumed, counters, status, my_rank, epoch
        )
        self.receive_phase(output, row_offsets, expert_ids, src_info, recv_bufs, recv_counts, consumed, counters, epochs, my_rank, epoch)
