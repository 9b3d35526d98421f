"""Where received rows go, and which blocks copy them: places from counts, and the division of blocks among the experts."""

from __future__ import annotations

from dataclasses import dataclass

import epdsl as ep

from .dispatch_send import DispatchSend
from .scan import inclusive_prefix_sum
from .token_format import SCALE_TILE_ROWS, FormatHandler


@dataclass(frozen=True)
class DispatchSchedule(DispatchSend):
    """What the offset block computes from the counts of all pairs. `ends` and `starts` are inclusive sums in shared memory."""

    @ep.func
    def rows_of(self, ends: ep.Ptr[ep.i32], local_expert: ep.i32, padding: int) -> ep.i32:
        """Rows of an expert, rounded up to a multiple of `padding`."""
        rows = ends[(local_expert + 1) * self.n_sources - 1]
        if local_expert > 0:
            rows -= ends[local_expert * self.n_sources - 1]
        return (rows + (padding - 1)) // padding * padding

    @ep.func
    def start_of(self, starts: ep.Ptr[ep.i32], local_expert: ep.i32) -> ep.i32:
        start = ep.i32(0)
        if local_expert > 0:
            start = starts[local_expert - 1]
        return start

    @ep.func
    def place_of(self, ends: ep.Ptr[ep.i32], reservation_p: ep.Ptr[ep.u64], pair: ep.i32, epoch: ep.u32):
        """First row of a pair's block within its expert, and its rows."""
        local_expert = pair // self.n_sources
        begin = ep.i32(0)
        if pair > 0:
            begin = ends[pair - 1]
        expert_begin = ep.i32(0)
        if local_expert > 0:
            expert_begin = ends[local_expert * self.n_sources - 1]
        count = ends[pair] - begin
        before = begin - expert_begin
        if self.ep_prod_reserve:
            word = reservation_p[pair]
            before = ep.i32(word & 0xFFFFFFFF)
            rows = ends[(local_expert + 1) * self.n_sources - 1] - expert_begin
            ep.device_assert(
                ep.u32(word >> 32) == epoch and before >= 0 and (count == 0 or before + count <= rows),
                "dispatch: pair {} reserved row {} in launch {}",
                pair,
                before,
                ep.u32(word >> 32),
            )
        return before, count

    @ep.func
    def token_fmt_type_offsets(
        self, handler: FormatHandler, starts: ep.Ptr[ep.i32], ends: ep.Ptr[ep.i32], warp_sums, shared_rows: ep.i32, shared: ep.i32, group
    ):
        """Where each slot's scale tiles begin, for a format that keeps scales in tiles."""
        if self.token_fmt_type.scales_in_tiles:
            tid = ep.thread_idx.x - group.thread_base
            tiles = ep.shared(ep.i32, self.n_local_experts)
            for e in range(tid, self.n_local_experts, group.num_threads):
                tiles[e] = (self.rows_of(ends, e, 1) + (SCALE_TILE_ROWS - 1)) // SCALE_TILE_ROWS
            ep.group_barrier(group)
            inclusive_prefix_sum(tiles, warp_sums, self.n_local_experts, group)
            for e in range(tid, self.n_local_experts, group.num_threads):
                first = self.start_of(tiles, e)
                if self.fused_shared_expert:
                    first += (shared + (SCALE_TILE_ROWS - 1)) // SCALE_TILE_ROWS
                row = shared_rows + self.start_of(starts, e)
                handler.scale_offsets[e + int(self.fused_shared_expert)] = first - row // SCALE_TILE_ROWS
            if self.fused_shared_expert and tid == 0:
                handler.scale_offsets[0] = 0

    @ep.func
    def claims_of(self, rows: ep.i32) -> ep.i32:
        """Claims that so many rows of an expert take."""
        made = self.token_fmt_type
        return (rows + (made.tile_rows - 1)) // made.tile_rows * made.tile_claims

    @ep.func
    def schedule(self, ends: ep.Ptr[ep.i32], warp_sums: ep.Ptr[ep.i32], atomic_counter: ep.Ptr[ep.i32], group):
        """Writes, for every local expert, the copy block after its last one; or -1 for all, where round robin does as well.

        Every expert with rows has a block, and the other blocks are divided in proportion to tiles.
        """
        if self.sm_schedule != "round_robin":
            tid = ep.thread_idx.x - group.thread_base
            local, n_comm = self.n_local_experts, self.n_dispatch_wait_comm_sms
            active = ep.shared(ep.i32, local)
            tiles = ep.shared(ep.i32, local)
            for e in range(tid, local, group.num_threads):
                rows = self.rows_of(ends, e, 1)
                active[e] = ep.i32(rows > 0)
                tiles[e] = self.claims_of(rows)
            ep.group_barrier(group)
            inclusive_prefix_sum(active, warp_sums, local, group)
            inclusive_prefix_sum(tiles, warp_sums, local, group)
            n_active = active[local - 1]
            total = tiles[local - 1]
            useful = total > 0 and n_active <= n_comm
            if self.sm_schedule == "auto":
                useful = useful and total > n_comm // local
            for e in range(tid, local, group.num_threads):
                bound = ep.i32(-1)
                if useful:
                    bound = active[e] + ep.i32(ep.i64(tiles[e]) * (n_comm - n_active) // total)
                atomic_counter[self.sm_schedule_offset + e] = bound

    @ep.func
    def experts_of(self, atomic_counter: ep.Ptr[ep.i32], scatter_sm_id: ep.i32):
        """The first local expert a copy block takes, and how far on the next one is."""
        local = self.n_local_experts
        first = scatter_sm_id % local
        step = ep.i32(self.n_dispatch_wait_comm_sms)
        if self.sm_schedule != "round_robin":
            bounds = atomic_counter + self.sm_schedule_offset
            if bounds[0] >= 0:
                low = ep.i32(0)
                high = ep.i32(local - 1)
                while low < high:
                    middle = (low + high) // 2
                    if bounds[middle] > scatter_sm_id:
                        high = middle
                    else:
                        low = middle + 1
                first = low
                step = ep.i32(local)
        return first, step
