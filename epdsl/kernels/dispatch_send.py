"""The sending half of the dispatch: blocks that monitor, and blocks that pack and send."""

from __future__ import annotations

from dataclasses import dataclass

import epdsl as ep

from .buffers import DispatchState, TokenInput
from .dispatch_parameters import DispatchParameters, EPRoleSplit
from .layout import DROPPED, ROUTE_NONE, ROUTE_OUT_OF_RANGE, ROUTE_REPEATED, STATUS_OUT_OF_RANGE, STATUS_REPEATED
from .routing import appears_before, route_of
from .signal import ep_signal_completion, on_this_device, record_fault, wait_for_consumption
from .token_format import CHUNK
from .trace import Event


@dataclass(frozen=True)
class DispatchSend(DispatchParameters):
    """Phases that write to peers."""

    @ep.func
    def count_of(self, topk_ids: ep.Ptr[ep.i32], n_tokens: ep.i32, expert: ep.i32) -> ep.i32:
        """One warp counts the selections that are sent to `expert`."""
        mine = ep.i32(0)
        for i in range(ep.lane_id(), n_tokens * self.top_k, ep.warp_size()):
            if topk_ids[i] == expert:
                k = i % self.top_k
                if appears_before(topk_ids, ep.i64(i - k), k, expert) == 0:
                    mine += 1
        return ep.warp_reduce("add", mine)

    @ep.func
    def monitor_and_signal_completion(
        self,
        topk_ids: ep.Ptr[ep.i32],
        n_tokens: ep.i32,
        recv_count_ptrs: ep.Peers[ep.u64],
        reservation_ptrs: ep.Peers[ep.u64],
        mailbox: ep.Ptr[ep.i32],
        expert_reserved_counter: ep.Ptr[ep.i32],
        expert_finished_counter: ep.Ptr[ep.i32],
        rank_completion_counter: ep.Ptr[ep.i32],
        my_rank: ep.i32,
        sm_id: ep.i32,
        epoch: ep.u32,
        *,
        comm_warp_base: int = 0,
        n_comm_threads: int = 0,
    ):
        """Each warp counts how many tokens go to an expert, waits until they are sent, and tells the expert's rank.

        Every expert is told every launch, also when nothing goes to it. In the final layout it first finds out where the block begins
        and puts that into the mailbox for the send warps.

        comm_warp_base  number of the class's first warp in its block
        n_comm_threads  threads of the class, by default num_threads
        """
        lane = ep.lane_id()
        n_warps = (n_comm_threads or self.num_threads) // ep.warp_size()
        first_expert = ep.i32(0)
        n_experts = self.n_experts
        if self.skip_a2a:
            first_expert = my_rank * self.n_local_experts
            n_experts = self.n_local_experts
        first = first_expert + sm_id * n_warps + ep.warp_id() - comm_warp_base
        stride = self.n_signal_sms(ep.warp_size()) * n_warps
        if self.ep_final_layout:
            for expert in range(first, first_expert + n_experts, stride):
                count = self.count_of(topk_ids, n_tokens, expert)
                if lane == 0:
                    self.announce_block(recv_count_ptrs, reservation_ptrs, mailbox, my_rank, expert, count, epoch)
            # Lane 0 kept the counts; every lane reads them below.
            ep.warp_sync()
            if not self.ep_prod_reserve and not self.skip_a2a:
                # Only after every block of this warp was announced, so that no warp waits for one that waits for it.
                for expert in range(first, first_expert + n_experts, stride):
                    self.place_in_order(reservation_ptrs[my_rank], mailbox, my_rank, expert, epoch)
        for expert in range(first, first_expert + n_experts, stride):
            if self.ep_final_layout:
                count = mailbox[2 * self.n_experts + expert]
            else:
                count = self.count_of(topk_ids, n_tokens, expert)
            if lane == 0:
                dst_rank = expert // self.n_local_experts
                local_expert = expert % self.n_local_experts
                pair = local_expert * self.n_ranks + dst_rank
                source = my_rank
                if self.skip_a2a:
                    source = ep.i32(0)
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
                    self.recv_count_layout(local_expert, source),
                    (ep.u64(epoch) << 32) | ep.u64(count),
                    rank_completion_counter,
                    self.rank_flag_offset(my_rank),
                    p2p_world_size=self.p2p_world_size,
                    use_shmem=self.use_shmem,
                    n_experts_per_device=self.n_local_experts,
                    skip_a2a=self.skip_a2a,
                    has_rank_flag=self.has_rank_flag,
                    ep_ord_r=self.ep_ord_r,
                    release_every=self.release_every,
                    ordering=self.ordering,
                )
                # Plain: all senders of this pair have added, and the next launch begins after this one.
                expert_reserved_counter[pair] = 0
                expert_finished_counter[pair] = 0
            ep.warp_sync()

    @ep.func
    def announce_block(
        self,
        recv_count_ptrs: ep.Peers[ep.u64],
        reservation_ptrs: ep.Peers[ep.u64],
        mailbox: ep.Ptr[ep.i32],
        my_rank: ep.i32,
        expert: ep.i32,
        count: ep.i32,
        epoch: ep.u32,
    ):
        """One thread reserves the rows of this rank's block of `expert`, or tells every rank how many they are."""
        dst_rank = expert // self.n_local_experts
        local_expert = expert % self.n_local_experts
        mailbox[2 * self.n_experts + expert] = count
        tagged = ep.u64(epoch) << 32
        if self.ep_prod_reserve:
            base = ep.u64(0)
            source = my_rank
            scope = ep.SYSTEM
            cursor = recv_count_ptrs[dst_rank] + (self.rc_cursor_base + local_expert)
            if self.skip_a2a:
                source = ep.i32(0)
                scope = ep.DEVICE
                cursor = on_this_device(cursor)
            if count > 0:
                # Relaxed: it only hands out numbers. The destination's reset of the cursor happens before it by "consumed".
                base = ep.atomic_add(cursor, ep.u64(count), order=ep.RELAXED, scope=scope)
            # Plain: the destination reads it after it acquired this source's completion, which comes later in this thread.
            reservation_ptrs[dst_rank][self.recv_count_layout(local_expert, source)] = tagged | base
            self.publish_base(mailbox, expert, ep.i32(base), epoch)
        elif self.skip_a2a:
            self.publish_base(mailbox, expert, ep.i32(0), epoch)
        else:
            for r in range(self.n_ranks):
                # Relaxed: the count is all it says. Pairs with the waits in `place_in_order`.
                ep.store(reservation_ptrs[r] + (expert * self.n_ranks + my_rank), tagged | ep.u64(count), order=ep.RELAXED, scope=ep.SYSTEM)

    @ep.func
    def place_in_order(self, counts: ep.Ptr[ep.u64], mailbox: ep.Ptr[ep.i32], my_rank: ep.i32, expert: ep.i32, epoch: ep.u32):
        """One warp adds up what the ranks before this one send to `expert`: that is where this rank's block begins."""
        before = ep.i32(0)
        for r in range(ep.lane_id(), my_rank, ep.warp_size()):
            word = ep.wait(
                counts + (expert * self.n_ranks + r),
                until=lambda v: ep.u32(v >> 32) == epoch,
                order=ep.RELAXED,
                scope=ep.SYSTEM,
                timeout_ns=self.timeout_ns,
            )
            before += ep.i32(word & 0xFFFFFFFF)
        base = ep.warp_reduce("add", before)
        if ep.lane_id() == 0:
            self.publish_base(mailbox, expert, base, epoch)

    @ep.func
    def publish_base(self, mailbox: ep.Ptr[ep.i32], expert: ep.i32, base: ep.i32, epoch: ep.u32):
        """Hands the send warps of this rank the first row of its block of `expert`, tagged with the launch number."""
        mailbox[expert] = base
        # Pairs with the wait in `copy_and_send_tokens`. A base of an earlier launch has another tag, also when the number wraps.
        ep.store(mailbox + (self.n_experts + expert), ep.i32(epoch), order=ep.RELEASE, scope=ep.DEVICE)

    def role_split(self, n_comm_threads: int, warp_size: int) -> EPRoleSplit:
        """Which threads of a class of `n_comm_threads` pack and which send."""
        return EPRoleSplit(n_comm_threads, self.hid_dim // CHUNK, self.ep_copy_role_split, warp_size)

    def send_join(self, vendor: str, comm_thread_base: int, n_comm_threads: int, comm_barrier_id: int) -> ep.Group:
        """The class whose barrier ends the packing of a token."""
        named = self.ep_send_join_named and vendor == "nvidia"
        return ep.Group(comm_thread_base, n_comm_threads, self.NB_SEND if named else comm_barrier_id)

    @ep.func
    def copy_and_send_tokens(
        self,
        tokens: TokenInput,
        recv_buf_ptrs: ep.Peers[ep.u8],
        expert_reserved_counter: ep.Ptr[ep.i32],
        expert_finished_counter: ep.Ptr[ep.i32],
        status: ep.Ptr[ep.u64],
        my_rank: ep.i32,
        sm_id: ep.i32,
        n_active_send_sms: int,
        prod_gen_p: ep.Ptr[ep.i32],
        prod_gen: ep.i32,
        *,
        input_scales_wrapper=None,
        comm_thread_base: int = 0,
        n_comm_threads: int = 0,
        comm_barrier_id: int = -1,
    ):
        """Block `sm_id` of the send blocks packs every n-th token and sends it to each of its experts, a warp a selection.

        prod_gen_p, prod_gen   in the final layout: the mailbox, and the launch number its tags must have
        input_scales_wrapper   see `TokenFormat.copy_token_to_send_buf`
        comm_thread_base, n_comm_threads, comm_barrier_id   the class of threads that runs the phase
        """
        n_threads = n_comm_threads or self.num_threads
        split = self.role_split(n_threads, ep.warp_size())
        n_publishers, copy_base = split.n_publishers, split.copy_base
        join = self.send_join(ep.target.vendor, comm_thread_base, n_threads, comm_barrier_id)
        copiers = ep.Group(comm_thread_base + copy_base, n_threads - copy_base, -1)
        tid = ep.thread_idx.x - comm_thread_base
        warp = tid // ep.warp_size()
        for token in range(sm_id, tokens.n_tokens, n_active_send_sms):
            message = tokens.send_buf + ep.i64(token) * self.msg_bytes
            if tid >= copy_base:
                self.pack(tokens, message, token, copiers, status, my_rank, input_scales_wrapper)
            ep.group_barrier(join)
            if warp < n_publishers:
                for k in range(warp, self.top_k, n_publishers):
                    self.send_selection(
                        message, k, recv_buf_ptrs, expert_reserved_counter, expert_finished_counter, my_rank, prod_gen_p, prod_gen
                    )

    @ep.func
    def pack(self, tokens: TokenInput, message: ep.Ptr[ep.u8], token: ep.i32, copiers, status, my_rank: ep.i32, input_scales_wrapper):
        """The threads of `copiers` make the token's message."""
        own = ep.thread_idx.x - copiers.thread_base
        first = ep.i64(token) * self.top_k
        topk_info = self.token_fmt_type.topk_info(message)
        self.token_fmt_type.copy_token_to_send_buf(message, tokens.tokens, token, copiers, input_scales_wrapper)
        for k in range(own, self.top_k, copiers.num_threads):
            route = route_of(tokens.topk_ids, first, k, self.n_experts)
            if route == ROUTE_OUT_OF_RANGE:
                record_fault(status + STATUS_OUT_OF_RANGE, token, k)
            elif route == ROUTE_REPEATED:
                record_fault(status + STATUS_REPEATED, token, k)
            sent = route >= 0
            if self.skip_a2a:
                sent = sent and route // self.n_local_experts == my_rank
            topk_info[k] = ep.u16(ep.select(sent, route, DROPPED))
            tokens.routed_ids[first + k] = ep.select(sent, route, ROUTE_NONE)
        if own == 0:
            self.token_fmt_type.src_info(message)[0] = token

    @ep.func
    def send_selection(
        self,
        message: ep.Ptr[ep.u8],
        k: ep.i32,
        recv_buf_ptrs: ep.Peers[ep.u8],
        expert_reserved_counter: ep.Ptr[ep.i32],
        expert_finished_counter: ep.Ptr[ep.i32],
        my_rank: ep.i32,
        mailbox: ep.Ptr[ep.i32],
        generation: ep.i32,
    ):
        """One warp sends a message to the expert of its selection `k`."""
        lane = ep.lane_id()
        expert = ep.i32(self.token_fmt_type.topk_info(message)[k])
        if expert != DROPPED:
            dst_rank = expert // self.n_local_experts
            local_expert = expert % self.n_local_experts
            pair = local_expert * self.n_ranks + dst_rank
            slot = ep.i32(0)
            if lane == 0:
                # Relaxed: it only hands out a number. The release add below comes after it in this thread.
                slot = ep.atomic_add(expert_reserved_counter + pair, 1, order=ep.RELAXED, scope=ep.DEVICE)
                if self.ep_final_layout:
                    # Pairs with `publish_base`, for the base.
                    ep.wait(
                        mailbox + (self.n_experts + expert),
                        until=lambda v: v == generation,
                        order=ep.ACQUIRE,
                        scope=ep.DEVICE,
                        timeout_ns=self.timeout_ns,
                    )
                    slot += mailbox[expert]
                    ep.device_assert(
                        slot >= 0 and slot < self.max_tokens_per_rank * self.n_ranks,
                        "dispatch: row {} of expert {} is outside its {} rows",
                        slot,
                        expert,
                        ep.i32(self.max_tokens_per_rank * self.n_ranks),
                    )
            slot = ep.shfl(slot, 0)
            if self.ep_final_layout:
                # A lane 0 that has given up says anything.
                slot = ep.select(ep.u32(slot) < self.max_tokens_per_rank * self.n_ranks, slot, 0)
            source = my_rank
            if self.ep_final_layout or self.skip_a2a:
                source = ep.i32(0)
            ep.warp_copy(recv_buf_ptrs[dst_rank] + self.recv_buf_layout(local_expert, source, slot), message, self.msg_bytes)
            self.token_fmt_type.publish_to_engine()
            # The lanes' stores happen before lane 0's release.
            ep.warp_sync()
            if lane == 0:
                # Pairs with the monitor's wait on this word.
                ep.reduce_add(expert_finished_counter + pair, 1, order=ep.RELEASE, scope=ep.DEVICE)

    @ep.func
    def publish_send_buf(self, send_buf_ready: ep.Ptr[ep.i32], group):
        """All threads of a send block, after its last token: its rows of the send buffer may be read by others."""
        self.token_fmt_type.publish_to_engine()
        ep.group_barrier(group)
        if ep.thread_idx.x == group.thread_base:
            # Pairs with the wait in `pack_shared_expert_inputs`.
            ep.reduce_add(send_buf_ready, 1, order=ep.RELEASE, scope=ep.DEVICE)

    @ep.func
    def send_phase(
        self,
        state: DispatchState,
        tokens: TokenInput,
        epoch: ep.u32,
        *,
        comm_thread_base: int = 0,
        n_comm_threads: int = 0,
        comm_barrier_id: int = -1,
    ):
        """Everything of a launch that writes to peers."""
        n_threads = n_comm_threads or self.num_threads
        group = self.comm_class(comm_thread_base, n_threads, comm_barrier_id)
        counters = state.counters
        reserved = counters + self.counters.expert_reserved_base
        finished = counters + self.counters.expert_finished_base
        completion = counters + self.counters.dispatch_rank_completion_base
        sm_id = ep.block_idx.x
        n_signal_sms = self.n_signal_sms(ep.warp_size())
        if not self.skip_a2a:
            wait_for_consumption(state.consumed[state.my_rank], epoch, self.n_ranks, self.timeout_ns, group)
        if sm_id < n_signal_sms:
            self.mark(state.trace, group, Event.MONITOR_BEGIN)
            self.monitor_and_signal_completion(
                tokens.topk_ids,
                tokens.n_tokens,
                state.recv_counts,
                state.reservations,
                state.mailbox,
                reserved,
                finished,
                completion,
                state.my_rank,
                sm_id,
                epoch,
                comm_warp_base=comm_thread_base // ep.warp_size(),
                n_comm_threads=n_threads,
            )
            self.mark(state.trace, group, Event.MONITOR_END)
        else:
            scales = tokens.scales
            wrapper = None
            if self.token_fmt_type.prequantized and self.token_fmt_type.scale_bytes == 1:
                wrapper = lambda i: scales[i]  # noqa: E731
            elif self.token_fmt_type.prequantized and self.token_fmt_type.scale_bytes == 4:
                wrapper = lambda i: scales.cast(ep.f32)[i]  # noqa: E731
            elif self.token_fmt_type.has_global_scale:
                wrapper = lambda i: scales.cast(ep.f32)[i]  # noqa: E731
            self.mark(state.trace, group, Event.SEND_BEGIN)
            self.copy_and_send_tokens(
                tokens,
                state.recv_bufs,
                reserved,
                finished,
                state.status,
                state.my_rank,
                sm_id - n_signal_sms,
                self.n_dispatch_async_comm_sms(ep.warp_size()),
                state.mailbox,
                ep.i32(epoch),
                input_scales_wrapper=wrapper,
                comm_thread_base=comm_thread_base,
                n_comm_threads=n_threads,
                comm_barrier_id=comm_barrier_id,
            )
            if self.fused_shared_expert:
                self.publish_send_buf(counters + (self.counters.dispatch_wait_base + self.send_buf_ready_offset), group)
            self.mark(state.trace, group, Event.SEND_END)

    @ep.func
    def mark(self, trace: ep.Ptr[ep.u64], group, event: int):
        """Stamps a phase's begin or end, by the class's first thread; a phase has ended where every thread of the class has."""
        if self.trace.enabled:
            ep.group_barrier(group)
            if ep.thread_idx.x == group.thread_base:
                self.trace.stamp(trace, self.trace.ring(ep.block_idx.x, 0), event, ep.i32(0))
