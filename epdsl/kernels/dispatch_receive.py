"""The receiving half of the dispatch: the block that waits and lays out, blocks that copy, and the shared expert's inputs."""

from __future__ import annotations

from dataclasses import dataclass

import epdsl as ep

from .buffers import DispatchState, ReceivedTokens
from .dispatch_schedule import DispatchSchedule
from .layout import DISPATCH_EPOCH, EP_DATA_READY_FLAG
from .scan import inclusive_prefix_sum
from .signal import acknowledge_and_rest, on_this_device
from .trace import NO_TRACE, Event, TraceBuf

NO_CLAIM = 1 << 20
"""A claim past every tile."""


@dataclass(frozen=True)
class DispatchReceive(DispatchSchedule):
    """Phases that read what peers wrote."""

    @ep.func
    def wait_for_arrivals_and_compute_offsets(
        self,
        received: ReceivedTokens,
        recv_count_p: ep.Ptr[ep.u64],
        reservation_p: ep.Ptr[ep.u64],
        atomic_counter: ep.Ptr[ep.i32],
        my_rank: ep.i32,
        epoch: ep.u32,
        reserved_shared_expert_tokens: ep.i32,
        *,
        comm_thread_base: int = 0,
        n_comm_threads: int = 0,
        comm_barrier_id: int = -1,
    ):
        """One block waits for what every rank sends, lays out the output, and lets the copy blocks go.

        A pair is (local expert, source rank), in that order; rows of the output are in order of pairs, or with ep_prod_reserve, within an
        expert, in order of reservation.
        """
        n_threads = n_comm_threads or self.num_threads
        group = self.comm_class(comm_thread_base, n_threads, comm_barrier_id)
        tid = ep.thread_idx.x - comm_thread_base
        scope = ep.SYSTEM
        if self.skip_a2a:
            scope = ep.DEVICE
            recv_count_p = on_this_device(recv_count_p)
        local = self.n_local_experts
        ends = ep.shared(ep.i32, self.n_pairs)
        starts = ep.shared(ep.i32, local)
        warp_sums = ep.shared(ep.i32, n_threads // ep.warp_size())
        if self.ep_ord_r:
            for r in range(tid, self.n_sources, n_threads):
                source = r
                if self.skip_a2a:
                    source = my_rank
                # Pairs with the elected producer's release of this flag on rank r, which carries rank r's payload and count words.
                ep.wait(
                    recv_count_p + self.rank_flag_offset(source),
                    until=lambda v: ep.u32(v >> 32) == epoch,
                    order=ep.ACQUIRE,
                    scope=scope,
                    timeout_ns=self.timeout_ns,
                )
            ep.group_barrier(group)
        for pair in range(tid, self.n_pairs, n_threads):
            # A thread that gives up leaves the others of its block no row out of bounds.
            ends[pair] = 0
            if self.ep_ord_r:
                word = recv_count_p[pair]
            else:
                # Pairs with the producer's release of this word; or where it elected another, with that one's release, which some thread
                # of this block acquires before the barrier below.
                word = ep.wait(
                    recv_count_p + pair,
                    until=lambda v: ep.u32(v >> 32) == epoch,
                    order=ep.ACQUIRE,
                    scope=scope,
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
        ep.group_barrier(group)
        inclusive_prefix_sum(ends, warp_sums, self.n_pairs, group)
        padding = self.token_fmt_type.row_padding
        for e in range(tid, local, n_threads):
            starts[e] = self.rows_of(ends, e, padding)
        ep.group_barrier(group)
        inclusive_prefix_sum(starts, warp_sums, local, group)
        shared_rows = ep.i32(0)
        if self.fused_shared_expert:
            shared_rows = (reserved_shared_expert_tokens + (padding - 1)) // padding * padding
        for pair in range(tid, self.n_pairs, n_threads):
            local_expert = pair // self.n_sources
            before, count = self.place_of(ends, reservation_p, pair, epoch)
            end = shared_rows + self.start_of(starts, local_expert) + before + count
            atomic_counter[2 * pair] = EP_DATA_READY_FLAG + end
            atomic_counter[2 * pair + 1] = count
            atomic_counter[self.rank_prefix_offset + pair] = before + count
        for e in range(tid, local, n_threads):
            slot = e + int(self.fused_shared_expert)
            atomic_counter[self.work_counter_offset + e] = 0
            received.expert_ids[slot] = slot
            received.expert_counts[slot] = self.rows_of(ends, e, 1)
            received.row_offsets[slot] = ep.u32(shared_rows + self.start_of(starts, e))
            if e == local - 1:
                received.row_offsets[slot + 1] = ep.u32(shared_rows + starts[e])
            if self.ep_prod_reserve:
                # Every source's reservation happens before its completion; the next one happens after "consumed".
                recv_count_p[self.rc_cursor_base + e] = 0
        if self.fused_shared_expert and tid == 0:
            received.expert_ids[0] = 0
            received.expert_counts[0] = reserved_shared_expert_tokens
            received.row_offsets[0] = ep.u32(0)
        self.token_fmt_type_offsets(received.handler, starts, ends, warp_sums, shared_rows, reserved_shared_expert_tokens, group)
        self.schedule(ends, warp_sums, atomic_counter, group)
        ep.group_barrier(group)
        if tid == 0:
            # Pairs with the copy blocks' wait; carries the offsets and everything this block acquired from the peers.
            ep.store(atomic_counter + self.ready_flag_offset, ep.i32(epoch), order=ep.RELEASE, scope=ep.DEVICE)

    @ep.func
    def copy_received_tokens_to_output(
        self,
        received: ReceivedTokens,
        recv_buf_p: ep.Ptr[ep.u8],
        atomic_counter: ep.Ptr[ep.i32],
        my_rank: ep.i32,
        scatter_sm_id: ep.i32,
        epoch: ep.u32,
        trace_memory: ep.Ptr[ep.u64],
        trace_ring_base: ep.i32 = 0,  # pyright: ignore[reportArgumentType]
        *,
        comm_thread_base: int = 0,
        n_comm_threads: int = 0,
        comm_barrier_id: int = -1,
        comm_smem_base: int = 0,
        emit_l1_release: bool = False,
        l1_release_token_block: int = 1,
        l1_release_atomic_pad: int = 1,
        l1_release_delta: int = 1,
        trace_scatter_release: bool = False,
        trace_rings_per_cta: int = 1,
        trace_comm_ring_id: int = 0,
        trace_buf: TraceBuf = NO_TRACE,
    ):
        """Blocks share the local experts and claim tiles of rows from each, or parts of all rows of a tile; a warp copies a row.

        By round robin, with fewer blocks than experts a block has several experts, with more an expert has several blocks.

        comm_smem_base           byte, in the placed part of shared memory (`ep.shared(at=)`), where a format that is `staged` stages:
                                 behind what the kernel around places there for itself
        emit_l1_release          after a claim, adds l1_release_delta to the counter of every block of l1_release_token_block rows in it:
                                 l1_arrival[(blocks of the experts before + block) * l1_release_atomic_pad]. A consumer of a block waits
                                 for delta times the claims that have a part of it: the format's tile_claims where the tile is a
                                 multiple of the block
        trace_scatter_release    stamps each of them, into ring trace_ring_base + block * trace_rings_per_cta + trace_comm_ring_id
        """
        n_threads = n_comm_threads or self.num_threads
        group = self.comm_class(comm_thread_base, n_threads, comm_barrier_id)
        tid = ep.thread_idx.x - comm_thread_base
        warp = tid // ep.warp_size()
        n_warps = n_threads // ep.warp_size()
        claimed = ep.shared(ep.i32, 1)
        made = self.token_fmt_type
        tile_rows, tile_claims = made.tile_rows, made.tile_claims
        if tid == 0:
            # A thread that gives up hands out no tile, and the others of its class find none.
            claimed[0] = NO_CLAIM
            self.wait_ready(atomic_counter, epoch)
        ep.group_barrier(group)
        stage = made.staging(n_warps, warp, comm_smem_base)
        copied = ep.i32(0)
        # An expert's claims rise. One that does not was handed out before: the thread that claims has given up, and no tile is left for the
        # others of its class, whatever the expert.
        least = ep.i32(-1)
        first, step = self.experts_of(atomic_counter, scatter_sm_id)
        for local_expert in range(first, self.n_local_experts, step):
            slot = local_expert + int(self.fused_shared_expert)
            first_row = ep.i64(received.row_offsets[slot])
            first_scale = self.token_fmt_type.first_scale_row(received.handler, received.row_offsets, slot)
            n_rows = received.expert_counts[slot]
            claim, before = self.claim_tile(atomic_counter + (self.work_counter_offset + local_expert), claimed, group), least
            while claim > before and claim // tile_claims * tile_rows < n_rows:
                begin = claim // tile_claims * tile_rows
                for i in range(begin + warp, ep.min(begin + tile_rows, n_rows), n_warps):
                    self.copy_row(
                        received, recv_buf_p, atomic_counter, my_rank, local_expert, first_row + i, first_scale + i, i, claim % tile_claims,
                        stage, copied,
                    )  # fmt: skip
                    copied += 1
                made.finish_parts(stage)
                if emit_l1_release:
                    # All warps' stores of the tile happen before the first thread's releases.
                    ep.group_barrier(group)
                    if tid == 0:
                        pool = self.pool_base(received, slot, l1_release_token_block)
                        stop = ep.min(begin + tile_rows, n_rows)
                        for block in range(begin // l1_release_token_block, (stop - 1) // l1_release_token_block + 1):
                            # Pairs with a consumer's wait for the block's rows.
                            ep.reduce_add(
                                received.l1_arrival + ep.i64(pool + block) * l1_release_atomic_pad,
                                l1_release_delta,
                                order=ep.RELEASE,
                                scope=ep.DEVICE,
                            )
                            if trace_scatter_release:
                                ring = trace_ring_base + ep.block_idx.x * trace_rings_per_cta + trace_comm_ring_id
                                trace_buf.stamp(trace_memory, ring, Event.L1_RELEASE, pool + block)
                before = claim
                claim = self.claim_tile(atomic_counter + (self.work_counter_offset + local_expert), claimed, group)
            if claim <= before:
                least = ep.i32(NO_CLAIM)

    @ep.func
    def wait_ready(self, atomic_counter: ep.Ptr[ep.i32], epoch: ep.u32):
        # Pairs with the offset block's release of the ready flag.
        ep.wait(
            atomic_counter + self.ready_flag_offset,
            until=lambda v: v == ep.i32(epoch),
            order=ep.ACQUIRE,
            scope=ep.DEVICE,
            timeout_ns=self.timeout_ns,
        )

    @ep.func
    def pool_base(self, received: ReceivedTokens, slot: ep.i32, token_block: int) -> ep.i32:
        """Blocks of `token_block` rows of the slots before `slot`."""
        blocks = ep.i32(0)
        for s in range(int(self.fused_shared_expert), slot):
            blocks += (received.expert_counts[s] + (token_block - 1)) // token_block
        return blocks

    @ep.func
    def claim_tile(self, work_counter: ep.Ptr[ep.i32], claimed: ep.Ptr[ep.i32], group) -> ep.i32:
        """The next claim on an expert's tiles, the same for all threads of the class."""
        ep.group_barrier(group)
        if ep.thread_idx.x == group.thread_base:
            # Relaxed: it only hands out a number; the rows were published by the ready flag.
            claimed[0] = ep.atomic_add(work_counter, 1, order=ep.RELAXED, scope=ep.DEVICE)
        ep.group_barrier(group)
        return claimed[0]

    @ep.func
    def copy_row(
        self,
        received: ReceivedTokens,
        recv_buf_p: ep.Ptr[ep.u8],
        atomic_counter: ep.Ptr[ep.i32],
        my_rank: ep.i32,
        local_expert: ep.i32,
        row: ep.i64,
        scale_row: ep.i64,
        position: ep.i32,
        part: ep.i32,
        stage,
        copied: ep.i32,
    ):
        """One warp copies a part of the expert's row number `position` to row `row` of the output; with part 0, also where it came from."""
        src_rank = ep.i32(0)
        before = ep.i32(0)
        if not self.ep_final_layout:
            prefix = atomic_counter + (self.rank_prefix_offset + local_expert * self.n_sources)
            for r in range(self.n_sources - 1):
                end = prefix[r]
                if position >= end:
                    src_rank = r + 1
                    before = end
        message = recv_buf_p + self.recv_buf_layout(local_expert, src_rank, position - before)
        self.token_fmt_type.copy_msg_to_output_tensor(received.handler, row, scale_row, message, part, stage, copied, self.timeout_ns)
        topk_info = self.token_fmt_type.topk_info(message)
        if part == 0:
            for k in range(ep.lane_id(), self.top_k, ep.warp_size()):
                if ep.i32(topk_info[k]) == my_rank * self.n_local_experts + local_expert:
                    received.src_info[2 * row] = self.token_fmt_type.src_info(message)[0]
                    received.src_info[2 * row + 1] = k

    @ep.func
    def pack_shared_expert_inputs(
        self,
        received: ReceivedTokens,
        send_buf_p: ep.Ptr[ep.u8],
        fused_se_counter: ep.Ptr[ep.i32],
        shared_expert_token_count: ep.i32,
        pack_sm_id: ep.i32,
        n_active_comm_sms: int,
        n_send_sms: int,
        *,
        comm_thread_base: int = 0,
        n_comm_threads: int = 0,
        comm_barrier_id: int = -1,
        comm_smem_base: int = 0,
    ):
        """Copies `shared_expert_token_count` messages of the send buffer to the first rows of the output, the shared expert's.

        fused_se_counter   [0] send blocks that have published their rows, [1] blocks that have begun to pack; both 0 again afterwards
        pack_sm_id         counted from the last comm block, so that packing meets the least loaded blocks first
        comm_smem_base     as for `copy_received_tokens_to_output`, which may stage in the same bytes afterwards
        """
        n_threads = n_comm_threads or self.num_threads
        group = self.comm_class(comm_thread_base, n_threads, comm_barrier_id)
        tid = ep.thread_idx.x - comm_thread_base
        made = self.token_fmt_type
        n_warps = n_threads // ep.warp_size()
        n_claims = self.claims_of(shared_expert_token_count)
        # One block takes part also where there is nothing to pack: the counters must be set back.
        n_packers = ep.max(ep.min(n_claims, n_active_comm_sms), 1)
        if pack_sm_id < n_packers:
            if tid == 0:
                # Pairs with the send blocks' releases in `publish_send_buf`; the last of a chain of adds carries them all.
                ep.wait(
                    fused_se_counter,
                    until=lambda v: v == n_send_sms,
                    order=ep.ACQUIRE,
                    scope=ep.DEVICE,
                    timeout_ns=self.timeout_ns,
                )
                # Relaxed: it counts who has seen the first counter; only the last may set it back, in stream order before the next launch.
                started = ep.atomic_add(fused_se_counter + 1, 1, order=ep.RELAXED, scope=ep.DEVICE)
                if started == n_packers - 1:
                    ep.store(fused_se_counter, 0, order=ep.RELAXED, scope=ep.DEVICE)
                    ep.store(fused_se_counter + 1, 0, order=ep.RELAXED, scope=ep.DEVICE)
            ep.group_barrier(group)
            stage = made.staging(n_warps, tid // ep.warp_size(), comm_smem_base)
            copied = ep.i32(0)
            for claim in range(pack_sm_id, n_claims, n_packers):
                begin, part = claim // made.tile_claims * made.tile_rows, claim % made.tile_claims
                stop = ep.min(begin + made.tile_rows, shared_expert_token_count)
                for i in range(begin + tid // ep.warp_size(), stop, n_warps):
                    row = ep.i64(i)
                    message = send_buf_p + row * self.msg_bytes
                    # The shared expert's rows and scale tiles begin at 0.
                    made.copy_msg_to_output_tensor(received.handler, row, row, message, part, stage, copied, self.timeout_ns)
                    copied += 1
                    if ep.lane_id() == 0 and part == 0:
                        received.src_info[2 * row] = made.src_info(message)[0]
                        received.src_info[2 * row + 1] = -1
            made.finish_parts(stage)

    @ep.func
    def receive_phase(
        self,
        state: DispatchState,
        received: ReceivedTokens,
        send_buf: ep.Ptr[ep.u8],
        shared_start: ep.i32,
        shared_count: ep.i32,
        epoch: ep.u32,
        *,
        comm_thread_base: int = 0,
        n_comm_threads: int = 0,
        comm_barrier_id: int = -1,
        comm_smem_base: int = 0,
        copy_options=None,
    ):
        """Everything of a launch that reads what peers wrote. `copy_options` are parameters of `copy_received_tokens_to_output`."""
        n_threads = n_comm_threads or self.num_threads
        group = self.comm_class(comm_thread_base, n_threads, comm_barrier_id)
        places = {"comm_thread_base": comm_thread_base, "n_comm_threads": n_threads, "comm_barrier_id": comm_barrier_id}
        atomic_counter = state.counters + self.counters.dispatch_wait_base
        sm_id = ep.block_idx.x
        my_rank = state.my_rank
        if sm_id == self.n_dispatch_wait_comm_sms:
            self.mark(state.trace, group, Event.ARRIVALS_BEGIN)
            self.wait_for_arrivals_and_compute_offsets(
                received, state.recv_counts[my_rank], state.reservations[my_rank], atomic_counter, my_rank, epoch, shared_count, **places
            )
            self.mark(state.trace, group, Event.ARRIVALS_END)
        else:
            if self.fused_shared_expert:
                self.mark(state.trace, group, Event.SHARED_BEGIN)
                self.pack_shared_expert_inputs(
                    received,
                    send_buf + ep.i64(shared_start) * self.msg_bytes,
                    atomic_counter + self.send_buf_ready_offset,
                    shared_count,
                    self.n_dispatch_wait_comm_sms - 1 - sm_id,
                    self.n_dispatch_wait_comm_sms,
                    self.n_dispatch_async_comm_sms(ep.warp_size()),
                    comm_smem_base=comm_smem_base,
                    **places,
                )
                self.mark(state.trace, group, Event.SHARED_END)
            self.mark(state.trace, group, Event.SCATTER_BEGIN)
            self.copy_received_tokens_to_output(
                received, state.recv_bufs[my_rank], atomic_counter, my_rank, sm_id, epoch, state.trace, comm_smem_base=comm_smem_base,
                **places, **(copy_options or {}),
            )  # fmt: skip
            self.mark(state.trace, group, Event.SCATTER_END)
        acknowledge_and_rest(
            atomic_counter + self.cleanup_counter_offset,
            state.epochs + DISPATCH_EPOCH,
            state.consumed,
            my_rank,
            epoch,
            self.n_sms,
            self.n_peers,
            group,
        )
