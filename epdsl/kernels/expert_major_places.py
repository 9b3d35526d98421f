"""Where the rows of an expert-major dispatch go: counts of selections, each rank's told to every rank, and a token's place from these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import epdsl as ep

from .exchange import distances, selections
from .expert_major_parameters import MASK_BITS, ExpertMajorParameters
from .scan import inclusive_prefix_sum

# Tokens whose selections a counting thread has in flight.
COUNTED_A_TURN = 4


@dataclass(frozen=True)
class ExpertMajorPlaces(ExpertMajorParameters):
    """Device functions of the whole block but for `slot_of`, which is a thread's."""

    @ep.func
    def plan(self, topk_ids, first, last, tally):
        """Counts selections. The whole block calls it; it ends with a barrier.

        tally [n_experts, tally_words]: tokens before `first` that chose the expert, then a bit for each of those from `first` to `last`
        """
        tid, threads = ep.thread_idx.x, self.num_threads[0]
        for i in range(tid, self.n_experts * self.tally_words, threads):
            tally[i] = ep.u32(0)
        ep.barrier()
        for begin in range(tid, last, threads * COUNTED_A_TURN):
            # All loads of a turn first, so that they are in flight together.
            found: tuple[Any, ...] = ()
            for i in ep.unroll(range(COUNTED_A_TURN)):
                found = (*found, selections(topk_ids, ep.min(begin + i * threads, last - 1), self.top_k))
            for i in ep.unroll(range(COUNTED_A_TURN)):
                token = begin + i * threads
                if token < last:
                    self.count(found[i], token - first, tally)
        ep.barrier()

    @ep.func
    def count(self, ids, j: ep.i32, tally):
        """One token's selections; j: its place in the block's run, negative before it."""
        word = ep.select(j < 0, 0, 1 + j // MASK_BITS)
        value = ep.select(j < 0, ep.u32(1), ep.u32(1) << ep.u32(j % MASK_BITS))
        for k in ep.unroll(range(self.top_k)):
            counts = (ids[k] >= 0) & (ids[k] < self.n_experts)
            # An expert chosen twice has one row, and a bit is added once.
            for earlier in ep.unroll(range(k)):
                counts = counts & (ids[earlier] != ids[k])
            if counts:
                # RELAXED: the barrier at the end of `plan` orders all the adds before the reads.
                ep.reduce_add(tally + (ids[k] * self.tally_words + word), value, order=ep.RELAXED, scope=ep.BLOCK)

    @ep.func
    def slot_of(self, expert: ep.i32, j: ep.i32, tally):
        """How many of the rank's tokens before the block's j-th chose the expert."""
        words = tally + expert * self.tally_words
        slot = ep.i32(words[0])
        for w in range(j // MASK_BITS):
            slot += ep.i32(ep.popcount(words[1 + w]))
        below = (ep.u32(1) << ep.u32(j % MASK_BITS)) - 1
        return slot + ep.i32(ep.popcount(words[1 + j // MASK_BITS] & below))

    @ep.func
    def tell_counts(self, tally, n_tokens, counts, bank, epoch, my_rank):
        """The block that has counted all tokens: each rank's counts to that rank."""
        stride = self.n_local_experts + 1
        at = bank * self.bank_counts + my_rank * stride
        for i in range(ep.thread_idx.x, self.n_experts, self.num_threads[0]):
            word = counts[i // self.n_local_experts] + (at + i % self.n_local_experts)
            # RELAXED: the word holds its launch's number and is all that is read; pairs with the wait in learn_places.
            ep.store(word, (ep.u64(epoch) << 32) | ep.u64(tally[i * self.tally_words]), order=ep.RELAXED, scope=ep.SYSTEM)
        if ep.thread_idx.x < self.n_ranks:
            word = counts[ep.thread_idx.x] + (at + self.n_local_experts)
            ep.store(word, (ep.u64(epoch) << 32) | ep.u64(n_tokens), order=ep.RELAXED, scope=ep.SYSTEM)

    @ep.func
    def learn_places(self, counts, matrix, ends, totals, bank, epoch):
        """The whole block: every rank's counts, then each expert's first row, then each source's within it.

        matrix [n_ranks, n_local_experts + 1]: first the counts, then the first row of the source's tokens; the last column its tokens
        ends [n_local_experts]: where the next expert's first row is
        totals [n_local_experts]: each expert's rows
        """
        tid, threads = ep.thread_idx.x, self.num_threads[0]
        stride = self.n_local_experts + 1
        for i in range(tid, self.bank_counts, threads):
            # A thread that gives up leaves the others of its block no tokens of the source.
            matrix[i] = 0
            # RELAXED: the number is all; pairs with the stores in tell_counts on each rank.
            found = ep.wait(
                counts + (bank * self.bank_counts + i),
                until=lambda v: ep.u32(v >> 32) == epoch,
                order=ep.RELAXED,
                scope=ep.SYSTEM,
                timeout_ns=self.timeout_ns,
            )
            count = ep.i32(ep.u32(found))
            ep.device_assert(
                (count >= 0) & (count <= self.max_tokens_per_rank),
                "dispatch: rank {} says {} tokens (count {}: of each local expert, then of all)",
                i // stride,
                count,
                i % stride,
            )
            matrix[i] = count
        ep.barrier()
        for e in range(tid, self.n_local_experts, threads):
            total = ep.i32(0)
            for s in distances(0, self.n_ranks):
                total += matrix[s * stride + e]
            totals[e] = total
            ends[e] = self.aligned(total)
        ep.barrier()
        warp_sums = ep.shared(ep.i32, threads // ep.warp_size())
        inclusive_prefix_sum(ends, warp_sums, self.n_local_experts, ep.Group(0, threads))
        used = ends[self.n_local_experts - 1]
        # All threads of all blocks: one alone would leave the others of its warp without the lane that claims for them.
        ep.device_assert(used <= self.max_rows, "dispatch: the ranks' counts need {} rows, there are {}", used, self.max_rows)
        for e in range(tid, self.n_local_experts, threads):
            row = ends[e] - self.aligned(totals[e])
            for s in distances(0, self.n_ranks):
                rows = matrix[s * stride + e]
                matrix[s * stride + e] = row
                row += rows
        ep.barrier()

    @ep.func
    def aligned(self, n_rows: ep.i32):
        """Rows up to the first of the next expert."""
        return (n_rows + (self.alignment - 1)) // self.alignment * self.alignment
