"""The throughput mode with expert-major rows: each token crosses the link once for each destination rank and is expanded on arrival.

Some blocks send, the others expand (dispatch) or sum (combine). Senders and adders work in groups of 128 threads, expanders in warps, a
token each.

dispatch
    a sender moves a token to recv[bank][source][token] of each other rank that has one of its experts (quantised on the way with fp8), and
    from the same registers to the rows of its own rank's experts; then to the other ranks its header (per selection: local expert, slot,
    weight), then releases flag[bank][source][token] there
    block 0 tells every rank how many of its tokens chose each of that rank's experts; from these an expander knows every expert's place
    an expander copies the other ranks' tokens, when their flags say so, to the rows of their experts

    expert e's rows begin at expert_rows[e], a multiple of `alignment`, and are in order of (source, token). A token's slot, how many
    earlier tokens of its source chose the expert, is counted by the block that sends it: all tokens before the block's own by adding, those
    of the block by one bit each.

combine
    a sender sums a token's rows with their weights in f32, moves the sum in bf16 to its source, then releases flag[bank][rank][token] there
    the other groups add the ranks' sums of an own token, in order of ranks

Buffers that peers write have two banks, by the launch's number: see `launch_order`.
"""

from __future__ import annotations

from dataclasses import dataclass

import epdsl as ep

from .exchange import GROUP_THREADS, distances
from .expert_major_combine import ExpertMajorCombine
from .expert_major_dispatch import ExpertMajorDispatch
from .launch_order import begin_launch, end_launch


@dataclass(frozen=True)
class ExpertMajorExchange(ExpertMajorDispatch, ExpertMajorCombine):
    """The kernels of the expert-major mode, for one configuration (see `ExpertMajorParameters`); equal on every rank."""

    @ep.kernel(max_threads=lambda self: self.num_threads[0], blocks=lambda self: self.n_blocks)
    def dispatch(
        self,
        x: ep.Ptr[ep.u32],
        topk_ids: ep.Ptr[ep.i32],
        topk_weights: ep.Ptr[ep.f32],
        n_tokens: ep.i32,
        recv: ep.Peers[ep.u32],
        headers: ep.Peers[ep.u32],
        counts: ep.Peers[ep.u64],
        flags: ep.Peers[ep.u32],
        begun: ep.Peers[ep.u32],
        epochs: ep.Ptr[ep.u32],
        claims: ep.Ptr[ep.i32],
        rows: ep.Ptr[ep.u32],
        scales: ep.Ptr[ep.u32],
        expert_rows: ep.Ptr[ep.i32],
        expert_counts: ep.Ptr[ep.i32],
        row_of: ep.Ptr[ep.i32],
        weight_of: ep.Ptr[ep.f32],
        source_tokens: ep.Ptr[ep.i32],
        my_rank: ep.i32,
    ):
        """Every token to the rows of its experts.

        x [n_tokens, hidden] bf16, topk_ids [n_tokens, top_k] global ids (anything outside 0..n_experts-1 is dropped), topk_weights alike
        rows [max_rows, hidden] e4m3 or bf16, scales [max_rows, hidden / 128] f32
        expert_rows [n_local_experts + 1]: each expert's first row, then the rows in use; expert_counts [n_local_experts]
        row_of, weight_of [n_ranks, max_tokens_per_rank, top_k]: for the combine; row -1 where a selection is not here
        source_tokens [n_ranks]: tokens each rank dispatched
        """
        tally = ep.shared(ep.u32, self.n_experts * self.tally_words)
        matrix = ep.shared(ep.i32, self.bank_counts)
        ends = ep.shared(ep.i32, self.n_local_experts)
        totals = ep.shared(ep.i32, self.n_local_experts)
        n_groups = self.num_threads[0] // GROUP_THREADS
        # Two for each group: one is read for a header while the next token's is written.
        staged = ep.shared(ep.f32, 2 * n_groups * self.groups if self.fp8 else 1)
        tid, block = ep.thread_idx.x, ep.block_idx.x
        group, t = tid // GROUP_THREADS, tid % GROUP_THREADS
        epoch = epochs[block] + 1
        bank = ep.i32(epoch & 1)
        begin_launch(begun, epoch, my_rank)
        senders = self.send_blocks[0]
        run = ep.max(1, (n_tokens + senders - 1) // senders)
        # The first block that sends nothing counts all tokens.
        first = ep.select(block < senders, ep.min(block * run, n_tokens), ep.select(block == senders, n_tokens, 0))
        last = ep.select(block < senders, ep.min(first + run, n_tokens), first)
        token = first + group
        scratch = staged + 2 * group * self.groups
        half = ep.i32(0)
        pieces = tuple(ep.vec(ep.u32, 4)(ep.u32(0)) for _ in range(self.trips))
        if token < last:
            # On its way while the selections are counted.
            pieces = self.send_payload(x, topk_ids, token, t, recv, bank, scratch, my_rank)
        self.plan(topk_ids, first, last, tally)
        if block == senders:
            self.tell_counts(tally, n_tokens, counts, bank, epoch, my_rank)
            if tid == 0:
                # The next launch's.
                claims[1 - bank] = 0
        self.learn_places(counts[my_rank], matrix, ends, totals, bank, epoch)
        if block == senders:
            for e in range(tid, self.n_local_experts, self.num_threads[0]):
                expert_rows[e] = ends[e] - self.aligned(totals[e])
                expert_counts[e] = totals[e]
            if tid == 0:
                expert_rows[self.n_local_experts] = ends[self.n_local_experts - 1]
            if tid < self.n_ranks:
                source_tokens[tid] = self.tokens_of(tid, matrix)
        while token < last:
            targets = self.fill_own_rows(
                pieces, topk_ids, topk_weights, token, t, first, tally, matrix, rows, row_of, weight_of, my_rank
            )  # fmt: skip
            # The group's payload, and its scales in shared memory, come before its first warp's header and release.
            ep.named_barrier(1 + group, GROUP_THREADS)
            if self.fp8:
                self.fill_own_scales(targets, t, scratch + half, scales)
            if t < ep.warp_size():
                self.send_header(
                    topk_ids, topk_weights, token, t, first, tally, scratch + half, recv, headers, flags, bank, epoch, my_rank
                )  # fmt: skip
            token += n_groups
            half = self.groups - half
            if token < last:
                pieces = self.send_payload(x, topk_ids, token, t, recv, bank, scratch + half, my_rank)
        # Blocks that had nothing to send begin to expand at once.
        busy = (n_tokens + run - 1) // run
        self.expand_all(
            busy, claims + bank, recv[my_rank], headers[my_rank], flags[my_rank], bank, epoch, matrix, rows, scales, row_of, weight_of,
            my_rank,
        )  # fmt: skip
        end_launch(begun, epoch, my_rank, self.timeout_ns)
        if tid == 0:
            epochs[block] = epoch

    @ep.kernel(max_threads=lambda self: self.num_threads[1], blocks=lambda self: self.n_blocks)
    def combine(
        self,
        y: ep.Ptr[ep.u32],
        row_of: ep.Ptr[ep.i32],
        weight_of: ep.Ptr[ep.f32],
        source_tokens: ep.Ptr[ep.i32],
        topk_ids: ep.Ptr[ep.i32],
        back: ep.Peers[ep.u32],
        flags: ep.Peers[ep.u32],
        begun: ep.Peers[ep.u32],
        epochs: ep.Ptr[ep.u32],
        out: ep.Ptr[ep.u32],
        my_rank: ep.i32,
    ):
        """out[token] = sum over selections of weight * y[row], bf16, summed in f32 on each rank and then over the ranks in order.

        A peer's sum crosses the link rounded to bf16. y [max_rows, hidden] bf16; row_of, weight_of, source_tokens as dispatch left them.
        """
        tid, block = ep.thread_idx.x, ep.block_idx.x
        group, t = tid // GROUP_THREADS, tid % GROUP_THREADS
        epoch = epochs[block] + 1
        bank = ep.i64(epoch & 1)
        begin_launch(begun, epoch, my_rank)
        # Every thread has read the launch's number before the first that is done writes it.
        ep.barrier()
        warps = self.num_threads[1] // ep.warp_size()
        listed = ep.shared(ep.i32, warps * self.top_k) + tid // ep.warp_size() * self.top_k
        listed_weights = ep.shared(ep.f32, warps * self.top_k) + tid // ep.warp_size() * self.top_k
        senders = self.send_blocks[1]
        n_groups = self.num_threads[1] // GROUP_THREADS
        if block < senders:
            most = ep.i32(0)
            for step in distances(1, self.n_ranks, 4):
                most = ep.max(most, source_tokens[(my_rank + step) % self.n_ranks])
            for token in range(group * senders + block, most, n_groups * senders):
                for step in distances(1, self.n_ranks, 4):
                    source = (my_rank + step) % self.n_ranks
                    if token < source_tokens[source]:
                        self.send_sum(
                            y, row_of, weight_of, source, token, t, group, listed, listed_weights, back, flags, bank, epoch, my_rank
                        )  # fmt: skip
        else:
            adders = self.n_blocks - senders
            for token in range(group * adders + block - senders, source_tokens[my_rank], n_groups * adders):
                self.add_up(
                    y, row_of, weight_of, topk_ids, token, t, group, listed, listed_weights, back[my_rank], flags[my_rank], bank, epoch,
                    out, my_rank,
                )  # fmt: skip
        end_launch(begun, epoch, my_rank, self.timeout_ns)
        if tid == 0:
            epochs[block] = epoch
