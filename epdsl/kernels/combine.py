"""Combine: what the experts made of every token travels back to the token's rank and is summed there, each row times its weight.

The epoch is as in the dispatch (`epochs[COMBINE_EPOCH]` is the last one finished). Who writes what, who waits for it:

    send block    rows of a (local expert, source rank) pair -> recv_buf of that rank, then the pair's word (ep_signal_completion)
    wait block    waits for the words of all ranks (acquire, system); ready = epoch (release, device)
    reduce block  waits ready == epoch (acquire, device); sums recv_buf -> output
    last block out tells every rank "epoch consumed" (release, system), which that rank's next combine waits for (acquire, system)

A row's place in the receive buffer is (token, k) of its source, so nobody reserves anything and the sum is always taken in order of k.
Two schedules send. "legacy": a block takes a pair at a time. "balanced": all rows of all pairs are divided evenly over the warps of all
blocks, so that one busy expert does not keep one block busy; who sends the last row of a pair publishes it.

Buffers may be used again for the reason given in `dispatch`, with the combine's own buffers, words and epoch.
"""

from __future__ import annotations

from dataclasses import dataclass

import epdsl as ep

from .buffers import CombineState
from .combine_parameters import VECTOR_ELEMENTS
from .combine_send import CombineSend
from .layout import COMBINE_EPOCH
from .signal import acknowledge_and_rest, on_this_device, wait_for_consumption
from .trace import Event


@dataclass(frozen=True)
class EPCombineKernel(CombineSend):
    """The combine kernels of one configuration (see `CombineParameters`): `combine_async`, `combine_wait`, and both as `combine`."""

    @ep.func
    def wait_for_all_arrivals(self, recv_count_p: ep.Ptr[ep.u64], ready_flag: ep.Ptr[ep.i32], my_rank: ep.i32, epoch: ep.u32):
        """One block waits until every rank has sent its rows, then lets the reduce blocks go."""
        tid = ep.thread_idx.x
        scope = ep.SYSTEM
        if self.skip_a2a:
            scope = ep.DEVICE
            recv_count_p = on_this_device(recv_count_p)
        if self.ep_ord_r:
            for r in range(tid, self.n_targets, self.num_threads):
                source = r
                if self.skip_a2a:
                    source = my_rank
                # Pairs with the elected producer's release of this flag on rank r, which carries all of rank r's rows.
                ep.wait(
                    recv_count_p + self.rank_flag_offset(source),
                    until=lambda v: ep.u32(v >> 32) == epoch,
                    order=ep.ACQUIRE,
                    scope=scope,
                    timeout_ns=self.timeout_ns,
                )
        else:
            for word in range(tid, self.n_pairs, self.num_threads):
                # Pairs with the release of this word, or of the one its sender elected; some thread of this block acquires that.
                ep.wait(
                    recv_count_p + word,
                    until=lambda v: ep.u32(v >> 32) == epoch,
                    order=ep.ACQUIRE,
                    scope=scope,
                    timeout_ns=self.timeout_ns,
                )
        ep.barrier()
        if tid == 0:
            # Pairs with the reduce blocks' wait; carries everything this block acquired from the peers.
            ep.store(ready_flag, ep.i32(epoch), order=ep.RELEASE, scope=ep.DEVICE)

    @ep.func
    def wait_ready(self, ready_flag: ep.Ptr[ep.i32], epoch: ep.u32):
        """The whole block waits for `wait_for_all_arrivals`."""
        if ep.thread_idx.x == 0:
            # Pairs with the wait block's release of the ready flag.
            ep.wait(ready_flag, until=lambda v: v == ep.i32(epoch), order=ep.ACQUIRE, scope=ep.DEVICE, timeout_ns=self.timeout_ns)
        ep.barrier()

    @ep.func
    def reduce_and_copy_to_output(
        self,
        output: ep.Ptr[ep.u8],
        routed_ids: ep.Ptr[ep.i32],
        router_weights: ep.Ptr[ep.f32],
        n_tokens: ep.i32,
        shared_rows: ep.Ptr[ep.bf16],
        shared_start: ep.i32,
        shared_count: ep.i32,
        recv_buf_p: ep.Ptr[ep.u8],
        reduce_sm_id: ep.i32,
    ):
        """A warp sums a chunk of a token: in f32, in order of k, product rounded before the addition. Dropped selections add nothing.

        The shared expert's row of a token is added last, without a weight.
        """
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
                if self.fused_shared_expert:
                    own = token - shared_start
                    if own >= 0 and own < shared_count:
                        v = ep.load(shared_rows + (ep.i64(own) * self.hid_dim + column), width=VECTOR_ELEMENTS)
                        low += ep.vec(ep.f32, 4)(ep.f32(v[0]), ep.f32(v[1]), ep.f32(v[2]), ep.f32(v[3]))
                        high += ep.vec(ep.f32, 4)(ep.f32(v[4]), ep.f32(v[5]), ep.f32(v[6]), ep.f32(v[7]))
                self.store_eight(output, ep.i64(token) * self.hid_dim + column, low, high)

    @ep.func
    def copy_unreduced(
        self, output: ep.Ptr[ep.u8], routed_ids: ep.Ptr[ep.i32], n_tokens: ep.i32, recv_buf_p: ep.Ptr[ep.u8], reduce_sm_id: ep.i32
    ):
        """A warp copies a chunk of a row to [token, k]; zeros for a selection that was not sent."""
        n_chunks = self.n_chunks(ep.warp_size())
        stride = self.n_warps(ep.warp_size()) * self.n_reduce_sms
        for item in range(reduce_sm_id + ep.warp_id() * self.n_reduce_sms, n_tokens * (self.top_k * n_chunks), stride):
            row = ep.i64(item // n_chunks)
            column = (item % n_chunks * ep.warp_size() + ep.lane_id()) * VECTOR_ELEMENTS
            if column < self.hid_dim:
                low = ep.vec(ep.f32, 4)(0.0, 0.0, 0.0, 0.0)
                high = ep.vec(ep.f32, 4)(0.0, 0.0, 0.0, 0.0)
                if routed_ids[row] >= 0:
                    v = ep.load((recv_buf_p + row * self.msg_bytes).cast(ep.bf16) + column, width=VECTOR_ELEMENTS)
                    low = ep.vec(ep.f32, 4)(ep.f32(v[0]), ep.f32(v[1]), ep.f32(v[2]), ep.f32(v[3]))
                    high = ep.vec(ep.f32, 4)(ep.f32(v[4]), ep.f32(v[5]), ep.f32(v[6]), ep.f32(v[7]))
                self.store_eight(output, row * self.hid_dim + column, low, high)

    @ep.func
    def store_eight(self, output: ep.Ptr[ep.u8], element: ep.i64, low, high):
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
    def mark(self, trace: ep.Ptr[ep.u64], event: int):
        """Stamps a phase's begin or end, where every thread of the block has reached it."""
        if self.trace.enabled:
            ep.barrier()
            if ep.thread_idx.x == 0:
                self.trace.stamp(trace, self.trace.ring(ep.block_idx.x, 0), event, ep.i32(0))

    @ep.func
    def send_phase(self, state: CombineState, input_tokens: ep.Ptr[ep.bf16], src_info: ep.Ptr[ep.i32], epoch: ep.u32):
        """Everything of a launch that writes to peers."""
        if not self.skip_a2a:
            group = ep.Group(0, self.num_threads, -1)
            wait_for_consumption(state.consumed[state.my_rank], epoch, self.n_ranks, self.timeout_ns, group)
        self.mark(state.trace, Event.COMBINE_SEND_BEGIN)
        self.send_tokens_back(
            input_tokens,
            src_info,
            state.recv_bufs,
            state.recv_counts,
            state.counters + self.counters.dispatch_wait_base,
            state.counters + self.counters.combine_base,
            state.status,
            state.my_rank,
            ep.block_idx.x,
            epoch,
        )
        self.mark(state.trace, Event.COMBINE_SEND_END)

    @ep.func
    def receive_phase(
        self, state: CombineState, input_tokens, output, routed_ids, router_weights, n_tokens, shared_start, shared_count, epoch: ep.u32
    ):
        """Everything of a launch that reads what peers wrote."""
        block = state.counters + self.counters.combine_base
        ready_flag = block + self.ready_flag_offset
        my_rank = state.my_rank
        if ep.block_idx.x < self.n_wait_sms:
            self.mark(state.trace, Event.COMBINE_WAIT_BEGIN)
            self.wait_for_all_arrivals(state.recv_counts[my_rank], ready_flag, my_rank, epoch)
            self.mark(state.trace, Event.COMBINE_WAIT_END)
        else:
            self.wait_ready(ready_flag, epoch)
            self.mark(state.trace, Event.REDUCE_BEGIN)
            reduce_sm_id = ep.block_idx.x - self.n_wait_sms
            if self.unreduced:
                self.copy_unreduced(output, routed_ids, n_tokens, state.recv_bufs[my_rank], reduce_sm_id)
            else:
                self.reduce_and_copy_to_output(
                    output, routed_ids, router_weights, n_tokens, input_tokens, shared_start, shared_count, state.recv_bufs[my_rank],
                    reduce_sm_id,
                )  # fmt: skip
            self.mark(state.trace, Event.REDUCE_END)
        acknowledge_and_rest(
            block + self.cleanup_counter_offset,
            state.epochs + COMBINE_EPOCH,
            state.consumed,
            my_rank,
            epoch,
            self.n_sms,
            0 if self.skip_a2a else self.n_ranks,
            ep.Group(0, self.num_threads, -1),
        )

    @ep.kernel(max_threads=lambda self: self.num_threads, blocks=lambda self: self.n_sms)
    def combine_async(self, state: CombineState, input_tokens: ep.Ptr[ep.bf16], src_info: ep.Ptr[ep.i32]):
        """Sends the experts' rows back. `combine_wait` must follow before the next `combine_async`.

        input_tokens [rows, hid_dim] in the order of the dispatch's output; src_info and counters as the dispatch left them
        """
        epoch = state.epochs[COMBINE_EPOCH] + 1
        self.send_phase(state, input_tokens, src_info, epoch)

    @ep.kernel(max_threads=lambda self: self.num_threads, blocks=lambda self: self.n_sms)
    def combine_wait(
        self,
        state: CombineState,
        input_tokens: ep.Ptr[ep.bf16],
        output: ep.Ptr[ep.u8],
        routed_ids: ep.Ptr[ep.i32],
        router_weights: ep.Ptr[ep.f32],
        n_tokens: ep.i32,
        shared_start: ep.i32,
        shared_count: ep.i32,
    ):
        """Receives and sums.

        input_tokens as for `combine_async`; only the shared expert's rows are read
        output [n_tokens, hid_dim] of output_type, routed_ids [n_tokens, top_k] as the dispatch wrote them, router_weights [n_tokens, top_k]
        shared_start, shared_count  tokens whose shared expert's rows are the first of input_tokens
        """
        epoch = state.epochs[COMBINE_EPOCH] + 1
        self.receive_phase(state, input_tokens, output, routed_ids, router_weights, n_tokens, shared_start, shared_count, epoch)

    @ep.kernel(max_threads=lambda self: self.num_threads, blocks=lambda self: self.n_sms)
    def combine(
        self,
        state: CombineState,
        input_tokens: ep.Ptr[ep.bf16],
        src_info: ep.Ptr[ep.i32],
        output: ep.Ptr[ep.u8],
        routed_ids: ep.Ptr[ep.i32],
        router_weights: ep.Ptr[ep.f32],
        n_tokens: ep.i32,
        shared_start: ep.i32,
        shared_count: ep.i32,
    ):
        """`combine_async` and `combine_wait` in one launch."""
        epoch = state.epochs[COMBINE_EPOCH] + 1
        self.send_phase(state, input_tokens, src_info, epoch)
        self.receive_phase(state, input_tokens, output, routed_ids, router_weights, n_tokens, shared_start, shared_count, epoch)
