"""The sending half of the combine: rows go back to their tokens' ranks, by either schedule."""

from __future__ import annotations

from dataclasses import dataclass

import epdsl as ep

from .combine_parameters import CombineParameters
from .layout import EP_DATA_READY_FLAG, STATUS_SRC_INFO
from .scan import inclusive_prefix_sum
from .signal import ep_signal_completion, record_fault


@dataclass(frozen=True)
class CombineSend(CombineParameters):
    """Phases that write to peers."""

    @ep.func
    def pair_of(self, index: ep.i32):
        """A pair's target rank, local expert and place in the dispatch's counters; pairs are in order of (target, expert)."""
        target = index // self.n_local_experts
        local_expert = index % self.n_local_experts
        return target, local_expert, local_expert * self.n_targets + target

    @ep.func
    def signal_pair(
        self,
        index: ep.i32,
        count: ep.i32,
        recv_count_ptrs: ep.Peers[ep.u64],
        rank_completion_counter: ep.Ptr[ep.i32],
        my_rank: ep.i32,
        epoch: ep.u32,
    ):
        """One thread publishes a pair, all of whose rows happen before."""
        target, local_expert, _ = self.pair_of(index)
        source = my_rank
        if self.skip_a2a:
            target = my_rank
            source = ep.i32(0)
        ep_signal_completion(
            my_rank,
            target,
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

    @ep.func
    def send_row(
        self,
        i: ep.i32,
        target_rank: ep.i32,
        input_tokens: ep.Ptr[ep.bf16],
        src_info: ep.Ptr[ep.i32],
        recv_buf_ptrs: ep.Peers[ep.u8],
        status: ep.Ptr[ep.u64],
    ):
        """One warp sends row `i` back.

        A row whose `src_info` names no (token, k) a rank can have sent would be written into foreign memory: it is counted and left out.
        """
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
        """Sends every pair's rows back and publishes the pair. atomic_counter holds the pairs' rows as the dispatch left them."""
        if self.schedule == "legacy":
            self.send_pairs(
                input_tokens,
                src_info,
                recv_buf_ptrs,
                recv_count_ptrs,
                atomic_counter,
                rank_completion_counter,
                status,
                my_rank,
                sm_id,
                epoch,
            )
        else:
            ends = ep.shared(ep.i32, self.n_pairs)
            rows = ep.shared(ep.i32, self.n_pairs)
            warp_sums = ep.shared(ep.i32, self.n_warps(ep.warp_size()))
            for index in range(ep.thread_idx.x, self.n_pairs, self.num_threads):
                _, _, pair = self.pair_of(index)
                count = atomic_counter[2 * pair + 1]
                rows[index] = count
                # A pair without rows is a unit of work too: somebody must publish it.
                ends[index] = ep.max(count, 1)
            ep.barrier()
            group = ep.Group(0, self.num_threads, -1)
            inclusive_prefix_sum(ends, warp_sums, self.n_pairs, group)
            n_units = ends[self.n_pairs - 1]
            if self.schedule == "balanced" or n_units >= 4 * self.n_experts:
                self.send_units(
                    input_tokens, src_info, recv_buf_ptrs, recv_count_ptrs, atomic_counter, rank_completion_counter, status, my_rank, sm_id,
                    epoch, ends, rows, n_units,
                )  # fmt: skip
            else:
                self.send_pairs(
                    input_tokens, src_info, recv_buf_ptrs, recv_count_ptrs, atomic_counter, rank_completion_counter, status, my_rank, sm_id,
                    epoch,
                )  # fmt: skip

    @ep.func
    def send_pairs(
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
        """Block `sm_id` sends every n-th pair's rows, a warp a row."""
        for index in range(sm_id, self.n_pairs, self.n_sms):
            target_rank, _, pair = self.pair_of(index)
            if self.skip_a2a:
                target_rank = my_rank
            end = atomic_counter[2 * pair] - EP_DATA_READY_FLAG
            count = atomic_counter[2 * pair + 1]
            for i in range(end - count + ep.warp_id(), end, self.n_warps(ep.warp_size())):
                self.send_row(i, target_rank, input_tokens, src_info, recv_buf_ptrs, status)
            # All warps' stores happen before thread 0's release.
            ep.barrier()
            if ep.thread_idx.x == 0:
                self.signal_pair(index, count, recv_count_ptrs, rank_completion_counter, my_rank, epoch)

    @ep.func
    def send_units(
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
        ends: ep.Ptr[ep.i32],
        rows: ep.Ptr[ep.i32],
        n_units: ep.i32,
    ):
        """Every warp of every block sends an equal, contiguous share of the units: rows in order of pairs, and 1 for a pair without rows.

        ends, rows   shared: running sum of the pairs' units, and the pairs' rows
        """
        n_warps = ep.i32(self.n_warps(ep.warp_size()) * self.n_sms)
        warp = sm_id * self.n_warps(ep.warp_size()) + ep.warp_id()
        begin = ep.i32(ep.i64(n_units) * warp // n_warps)
        end = ep.i32(ep.i64(n_units) * (warp + 1) // n_warps)
        low = ep.i32(0)
        high = ep.i32(self.n_pairs - 1)
        while low < high:
            middle = (low + high) // 2
            if ends[middle] > begin:
                high = middle
            else:
                low = middle + 1
        index = low
        while begin < end:
            stop = ep.min(end, ends[index])
            count = rows[index]
            units = ep.max(count, 1)
            target_rank, _, pair = self.pair_of(index)
            if self.skip_a2a:
                target_rank = my_rank
            if count > 0:
                # Row of a unit: the pair's last row belongs to its last unit.
                offset = atomic_counter[2 * pair] - EP_DATA_READY_FLAG - ends[index]
                for unit in range(begin, stop):
                    self.send_row(unit + offset, target_rank, input_tokens, src_info, recv_buf_ptrs, status)
            # The lanes' stores happen before lane 0's release.
            ep.warp_sync()
            if ep.lane_id() == 0:
                done = atomic_counter + (self.pair_done_offset + pair)
                # Pairs with itself in the other warps: whoever completes the pair happens after all its rows.
                before = ep.atomic_add(done, stop - begin, order=ep.ACQ_REL, scope=ep.DEVICE)
                if before + (stop - begin) == units:
                    # Plain: every warp has added, and the next launch begins after this one.
                    done[0] = 0
                    self.signal_pair(index, count, recv_count_ptrs, rank_completion_counter, my_rank, epoch)
            ep.warp_sync()
            begin = stop
            index += 1
