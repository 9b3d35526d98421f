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

from dataclasses import dataclass, field
from typing import Any

import epdsl as ep
from epdsl.env import TIMEOUT_NS

from .blockwise import GROUP, WIDE_LANES, quantise_wide
from .exchange import GROUP_THREADS, check_experts, check_groups, check_hidden, check_roles, distances, goes_to, selections
from .launch_order import begin_launch, end_launch
from .rounding import eight_floats
from .weighted_rows import EIGHT, as_bf16, plus8, zeros8

MASK_BITS = 32
# Pieces of a token that an expanding thread has in flight.
PIECES_A_TURN = 7
# Rows and pieces of a row whose loads a thread has in flight together.
ROWS = 4
PIECES = 2


@dataclass(frozen=True)
class ExpertMajorExchange:
    """The kernels of the expert-major mode, for one configuration; equal on every rank.

    hidden               elements of a token, bf16; a multiple of 128, of 512 with fp8
    n_experts, n_ranks   rank r has the experts from r * n_experts / n_ranks on
    top_k                selections a token has
    max_tokens_per_rank  most tokens a rank may dispatch at once
    n_blocks             blocks of a launch, all resident at once: the share of the device it takes
    num_threads          threads of a block in the dispatch and in the combine, groups of 128
    send_blocks          blocks that send, in the dispatch and in the combine; the others expand or sum
    fp8                  whether the dispatch carries e4m3 with a f32 scale per 128 elements, quantised here; else bf16
    alignment            an expert's first row is a multiple of it
    timeout_ns           how long any wait may take
    """

    hidden: int
    n_experts: int
    n_ranks: int
    top_k: int
    max_tokens_per_rank: int
    n_blocks: int
    num_threads: tuple[int, int] = (640, 896)
    send_blocks: tuple[int, int] = (80, 56)
    fp8: bool = True
    alignment: int = 1
    timeout_ns: int = field(default_factory=TIMEOUT_NS.get)

    def __post_init__(self) -> None:
        check_hidden(self.hidden, self.fp8)
        check_experts(self.n_experts, self.n_ranks, self.top_k)
        for threads in self.num_threads:
            check_groups(threads)
        if self.n_ranks > GROUP_THREADS:
            raise ValueError(f"n_ranks={self.n_ranks}; a thread of a group waits for each rank's sum, so at most {GROUP_THREADS}")
        if not 1 <= self.max_tokens_per_rank <= 1 << 16:
            raise ValueError(f"max_tokens_per_rank={self.max_tokens_per_rank}; it must be from 1 to {1 << 16}")
        if self.alignment < 1:
            raise ValueError(f"alignment={self.alignment}; it must be at least 1")
        for name, blocks in zip(("dispatch", "combine"), self.send_blocks, strict=True):
            check_roles(name, blocks, self.n_blocks)

    # ---- sizes

    @property
    def n_local_experts(self) -> int:
        return self.n_experts // self.n_ranks

    @property
    def vectors(self) -> int:
        """Pieces of 8 elements a token has."""
        return self.hidden // 8

    @property
    def trips(self) -> int:
        """How often a group's threads go over a token on its way out."""
        return -(-self.pieces // GROUP_THREADS)

    @property
    def pieces(self) -> int:
        """Pieces of 16 bytes that a token's elements are on the wire and in the output."""
        return self.hidden // (16 if self.fp8 else 8)

    @property
    def groups(self) -> int:
        """Scales of a token."""
        return self.hidden // GROUP

    @property
    def payload_words(self) -> int:
        """u32 words of a token on the wire: its pieces, then its scales."""
        return 4 * self.pieces + (self.groups if self.fp8 else 0)

    @property
    def max_rows(self) -> int:
        """Rows a rank may need, each expert's first row aligned."""
        selections = self.n_ranks * self.max_tokens_per_rank * min(self.top_k, self.n_local_experts)
        return selections + self.n_local_experts * (self.alignment - 1)

    @property
    def bank_tokens(self) -> int:
        """Tokens of all sources: entries of one bank of the receive buffers and flags."""
        return self.n_ranks * self.max_tokens_per_rank

    @property
    def bank_counts(self) -> int:
        """u64 words of one bank of the counts: per source each local expert's, then its tokens."""
        return self.n_ranks * (self.n_local_experts + 1)

    @property
    def run(self) -> int:
        """Most tokens a block sends."""
        return -(-self.max_tokens_per_rank // self.send_blocks[0])

    @property
    def mask_words(self) -> int:
        return -(-self.run // MASK_BITS)

    # ---- dispatch: planning

    @ep.func
    def plan(self, topk_ids, n_tokens, first, last, before, masks):
        """Counts the rank's selections. The whole block calls it; it ends with a barrier.

        before[e] = tokens that chose expert e: all of them in block 0, those before `first` elsewhere
        masks[e] = one bit for each of the tokens from `first` to `last`: whether it chose expert e
        """
        tid = ep.thread_idx.x
        for i in range(tid, self.n_experts, self.num_threads[0]):
            before[i] = 0
        for i in range(tid, self.n_experts * self.mask_words, self.num_threads[0]):
            masks[i] = ep.u32(0)
        ep.barrier()
        limit = ep.select(ep.block_idx.x == 0, n_tokens, first)
        for token in range(tid, limit, self.num_threads[0]):
            ids = selections(topk_ids, token, self.top_k)
            for k in ep.unroll(range(self.top_k)):
                counts = (ids[k] >= 0) & (ids[k] < self.n_experts)
                # An expert chosen twice has one row.
                for j in ep.unroll(range(k)):
                    counts = counts & (ids[j] != ids[k])
                if counts:
                    # RELAXED: the barrier below orders all the adds before the reads.
                    ep.reduce_add(before + ids[k], 1, order=ep.RELAXED, scope=ep.BLOCK)
        for token in range(first + tid, last, self.num_threads[0]):
            j = token - first
            for expert in selections(topk_ids, token, self.top_k):
                if expert >= 0 and expert < self.n_experts:
                    # RELAXED: the barrier below orders it before the reads.
                    word = masks + (expert * self.mask_words + j // MASK_BITS)
                    ep.reduce_or(word, ep.u32(1) << ep.u32(j % MASK_BITS), order=ep.RELAXED, scope=ep.BLOCK)
        ep.barrier()

    @ep.func
    def slot_of(self, expert: ep.i32, j: ep.i32, first: ep.i32, before, masks):
        """How many of the rank's tokens before the block's j-th chose the expert."""
        slot = ep.select(first == 0, 0, before[expert])
        words = masks + expert * self.mask_words
        for w in range(j // MASK_BITS):
            slot += ep.i32(ep.popcount(words[w]))
        below = (ep.u32(1) << ep.u32(j % MASK_BITS)) - 1
        return slot + ep.i32(ep.popcount(words[j // MASK_BITS] & below))

    @ep.func
    def tell_counts(self, before, n_tokens, counts, bank, epoch, my_rank):
        """Block 0: each rank's counts to that rank."""
        stride = self.n_local_experts + 1
        at = bank * self.bank_counts + my_rank * stride
        for i in range(ep.thread_idx.x, self.n_experts, self.num_threads[0]):
            word = counts[i // self.n_local_experts] + (at + i % self.n_local_experts)
            # RELAXED: the word holds its launch's number and is all that is read; pairs with the wait in learn_places.
            ep.store(word, (ep.u64(epoch) << 32) | ep.u64(before[i]), order=ep.RELAXED, scope=ep.SYSTEM)
        if ep.thread_idx.x < self.n_ranks:
            word = counts[ep.thread_idx.x] + (at + self.n_local_experts)
            ep.store(word, (ep.u64(epoch) << 32) | ep.u64(n_tokens), order=ep.RELAXED, scope=ep.SYSTEM)

    @ep.func
    def learn_places(self, counts, matrix, starts, totals, bank, epoch):
        """The whole block: every rank's counts, then each expert's first row, then each source's within it.

        matrix [n_ranks, n_local_experts + 1]: first the counts, then the first row of the source's tokens; the last column its tokens
        starts [n_local_experts + 1]: each expert's first row, then the rows in use
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
        for e in range(tid, stride, threads):
            start = ep.i32(0)
            for earlier in range(e):
                rows = ep.i32(0)
                for s in distances(0, self.n_ranks):
                    rows += matrix[s * stride + earlier]
                start += (rows + (self.alignment - 1)) // self.alignment * self.alignment
            starts[e] = start
            if e == self.n_local_experts:
                ep.device_assert(start <= self.max_rows, "dispatch: the ranks' counts need {} rows, there are {}", start, self.max_rows)
        ep.barrier()
        for e in range(tid, self.n_local_experts, threads):
            row = starts[e]
            for s in distances(0, self.n_ranks):
                rows = matrix[s * stride + e]
                matrix[s * stride + e] = row
                row += rows
            totals[e] = row - starts[e]
        ep.barrier()

    # ---- dispatch: moving

    @ep.func
    def all_packed(self, x: ep.Ptr[ep.u32], token: ep.i32, t: ep.i32):
        """The thread's pieces of a token as they travel, and their scales; all loaded before the first is used."""
        wide = 2 if self.fp8 else 1
        raw: tuple[Any, ...] = ()
        for trip in ep.unroll(range(self.trips)):
            v = ep.min(t + trip * GROUP_THREADS, self.pieces - 1)
            for half in ep.unroll(range(wide)):
                raw = (*raw, ep.load(x + ((ep.i64(token) * self.pieces + v) * wide + half) * 4, width=4))
        pieces: tuple[Any, ...] = ()
        scales: tuple[Any, ...] = ()
        for trip in ep.unroll(range(self.trips)):
            if self.fp8:
                piece, scale = quantise_wide(raw[2 * trip], raw[2 * trip + 1])
                pieces, scales = (*pieces, piece), (*scales, scale)
            else:
                pieces = (*pieces, raw[trip])
        return pieces, scales

    @ep.func
    def send_payload(self, x, topk_ids, token, t, recv, bank, staged_scales, my_rank):
        """A group: a token to every other rank that has one of its experts; its scales into shared memory. Returns the thread's pieces."""
        pieces, scales = self.all_packed(x, token, t)
        # Before the stores to peers, so that no thread keeps them in registers meanwhile.
        if self.fp8:
            if t % WIDE_LANES == 0:
                for trip in ep.unroll(range(self.trips)):
                    if t + trip * GROUP_THREADS < self.pieces:
                        staged_scales[t // WIDE_LANES + trip * (GROUP_THREADS // WIDE_LANES)] = scales[trip]
        ids = selections(topk_ids, token, self.top_k)
        place = (bank * self.n_ranks + my_rank) * self.max_tokens_per_rank + token
        for step in distances(1, self.n_ranks):
            peer = (my_rank + step) % self.n_ranks
            if goes_to(ids, peer, self.n_local_experts):
                target = recv[peer] + place * self.payload_words
                for trip in ep.unroll(range(self.trips)):
                    v = t + trip * GROUP_THREADS
                    if v < self.pieces:
                        ep.store(target + v * 4, pieces[trip])
        return pieces

    @ep.func
    def fill_own_rows(self, pieces, topk_ids, topk_weights, token, t, first, before, masks, matrix, rows, row_of, weight_of, my_rank):
        """A group: the token that it holds to the rows of this rank's experts. Returns each selection's row, -1 where it is elsewhere."""
        lane = ep.lane_id()
        row = ep.i32(-1)
        if lane < self.top_k:
            first_expert = my_rank * self.n_local_experts
            expert = topk_ids[token * self.top_k + lane] - first_expert
            if expert >= 0 and expert < self.n_local_experts:
                place = matrix[my_rank * (self.n_local_experts + 1) + expert]
                row = place + self.slot_of(first_expert + expert, token - first, first, before, masks)
                # A thread that has given up leaves places that are none.
                row = ep.select(ep.u32(row) < self.max_rows, row, -1)
            if t < ep.warp_size():
                at = (my_rank * self.max_tokens_per_rank + token) * self.top_k + lane
                row_of[at] = row
                weight_of[at] = topk_weights[token * self.top_k + lane]
        targets = tuple(ep.shfl(row, k) for k in range(self.top_k))
        for target in targets:
            # Unsigned: what a lane that has given up would say is no row either.
            if ep.u32(target) < self.max_rows:
                at = rows + ep.i64(target) * (4 * self.pieces)
                for trip in ep.unroll(range(self.trips)):
                    v = t + trip * GROUP_THREADS
                    if v < self.pieces:
                        ep.store(at + v * 4, pieces[trip], cache="streaming")
        return targets

    @ep.func
    def fill_own_scales(self, targets, t, staged_scales, scales):
        """A group, after its barrier: the token's scales to the same rows, a warp a row."""
        warps = GROUP_THREADS // ep.target.warp_size
        for k in ep.unroll(range(self.top_k)):
            if t // ep.warp_size() == k % warps and ep.u32(targets[k]) < self.max_rows:
                for i in range(ep.lane_id(), self.groups // 4, ep.warp_size()):
                    at = scales + (ep.i64(targets[k]) * self.groups + 4 * i)
                    ep.store(at, self.four_scales(staged_scales, i), cache="streaming")

    @ep.func
    def four_scales(self, staged_scales, i: ep.i32):
        """Scales 4 i to 4 i + 3 of a token, as they are stored."""
        words: tuple[Any, ...] = ()
        for j in ep.unroll(range(4)):
            words = (*words, ep.bitcast(ep.u32, staged_scales[4 * i + j]))
        return ep.vec(ep.u32, 4)(words[0], words[1], words[2], words[3])

    @ep.func
    def send_header(
        self, topk_ids, topk_weights, token, t, first, before, masks, staged_scales, recv, headers, flags, bank, epoch, my_rank
    ):
        """The first warp of a group, after its barrier: scales and header beside the payload, then the flag, at every other rank."""
        place = (bank * self.n_ranks + my_rank) * self.max_tokens_per_rank + token
        ids = selections(topk_ids, token, self.top_k)
        for step in range(1, self.n_ranks):
            peer = (my_rank + step) % self.n_ranks
            first_expert = peer * self.n_local_experts
            if self.fp8:
                if goes_to(ids, peer, self.n_local_experts):
                    target = recv[peer] + (place * self.payload_words + 4 * self.pieces)
                    for i in range(t, self.groups // 4, ep.warp_size()):
                        ep.store(target + 4 * i, self.four_scales(staged_scales, i))
            if t < self.top_k:
                expert = topk_ids[token * self.top_k + t] - first_expert
                word = ep.u32(0xFFFFFFFF)
                if expert >= 0 and expert < self.n_local_experts:
                    slot = self.slot_of(first_expert + expert, token - first, first, before, masks)
                    word = (ep.u32(expert) << 16) | ep.u32(slot)
                weight = ep.bitcast(ep.u32, topk_weights[token * self.top_k + t])
                ep.store(headers[peer] + (place * self.top_k + t) * 2, ep.vec(ep.u32, 2)(word, weight))
        ep.warp_sync()
        for first_rank in ep.unroll(range(0, self.n_ranks, ep.warp_size())):
            rank = first_rank + t
            if rank < self.n_ranks and rank != my_rank:
                # Cumulative over the group's stores through its barrier and the warp's; pairs with the wait in `expand` on that rank.
                ep.store(flags[rank] + place, epoch, order=ep.RELEASE, scope=ep.SYSTEM)

    @ep.func
    def expand(self, source, token, recv, headers, flags, bank, epoch, matrix, rows, scales, row_of, weight_of):
        """A warp: a token of another rank, when it is there, to the rows of this rank's experts."""
        lane = ep.lane_id()
        place = (bank * self.n_ranks + source) * self.max_tokens_per_rank + token
        if lane == 0:
            # Pairs with the release in send_header on that rank; the warp's sync hands it on.
            ep.wait(flags + place, until=lambda v: v == epoch, order=ep.ACQUIRE, scope=ep.SYSTEM, timeout_ns=self.timeout_ns)
        ep.warp_sync()
        row = ep.i32(-1)
        if lane < self.top_k:
            word = ep.load(headers + (place * self.top_k + lane) * 2, width=2)
            if word[0] != 0xFFFFFFFF:
                row = matrix[source * (self.n_local_experts + 1) + ep.i32(word[0] >> 16)] + ep.i32(word[0] & 0xFFFF)
            # After a fault the header may be an earlier launch's.
            row = ep.select(ep.u32(row) < self.max_rows, row, -1)
            at = (source * self.max_tokens_per_rank + token) * self.top_k + lane
            row_of[at] = row
            weight_of[at] = ep.bitcast(ep.f32, word[1])
        if ep.any(row >= 0):
            targets = tuple(ep.shfl(row, k) for k in range(self.top_k))
            payload = recv + place * self.payload_words
            self.spread(payload, rows, targets, self.pieces)
            if self.fp8:
                self.spread(payload + 4 * self.pieces, scales, targets, self.groups // 4)

    @ep.func
    def spread(self, source, rows, targets, pieces: int):
        """A warp: `pieces` of 16 bytes to each of some rows of that many."""
        size = ep.warp_size()
        for first in range(ep.lane_id(), pieces, size * PIECES_A_TURN):
            # All loads of a turn before the first store, so that they are in flight together.
            found: tuple[Any, ...] = ()
            for i in ep.unroll(range(PIECES_A_TURN)):
                found = (*found, ep.load(source + ep.min(first + i * size, pieces - 1) * 4, width=4))
            for row in targets:
                # Unsigned: what a lane that has given up would say is no row either.
                if ep.u32(row) < self.max_rows:
                    at = rows + ep.i64(row) * (4 * pieces)
                    for i in ep.unroll(range(PIECES_A_TURN)):
                        if first + i * size < pieces:
                            ep.store(at + (first + i * size) * 4, found[i], cache="streaming")

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
        before = ep.shared(ep.i32, self.n_experts)
        masks = ep.shared(ep.u32, self.n_experts * self.mask_words)
        matrix = ep.shared(ep.i32, self.bank_counts)
        starts = ep.shared(ep.i32, self.n_local_experts + 1)
        totals = ep.shared(ep.i32, self.n_local_experts)
        n_groups = self.num_threads[0] // GROUP_THREADS
        # Two for each group: one is read for a header while the next token's is written.
        staged = ep.shared(ep.f32, 2 * n_groups * self.groups if self.fp8 else 1)
        tid, block = ep.thread_idx.x, ep.block_idx.x
        group, t = tid // GROUP_THREADS, tid % GROUP_THREADS
        epoch = epochs[block] + 1
        bank = ep.i64(epoch & 1)
        begin_launch(begun, epoch, my_rank)
        senders = self.send_blocks[0]
        if block < senders:
            run = (n_tokens + senders - 1) // senders
            first = ep.min(block * run, n_tokens)
            last = ep.min(first + run, n_tokens)
            token = first + group
            scratch = staged + 2 * group * self.groups
            half = ep.i32(0)
            if token < last:
                # On its way while the selections are counted.
                self.send_payload(x, topk_ids, token, t, recv, bank, scratch, my_rank)
            self.plan(topk_ids, n_tokens, first, last, before, masks)
            if block == 0:
                self.tell_counts(before, n_tokens, counts, ep.i32(epoch & 1), epoch, my_rank)
            self.learn_places(counts[my_rank], matrix, starts, totals, ep.i32(epoch & 1), epoch)
            if token < last:
                # Packed again rather than kept in registers all the while.
                pieces, _ = self.all_packed(x, token, t)
                while token < last:
                    targets = self.fill_own_rows(
                        pieces, topk_ids, topk_weights, token, t, first, before, masks, matrix, rows, row_of, weight_of, my_rank
                    )  # fmt: skip
                    # The group's payload, and its scales in shared memory, come before its first warp's header and release.
                    ep.named_barrier(1 + group, GROUP_THREADS)
                    if self.fp8:
                        self.fill_own_scales(targets, t, scratch + half, scales)
                    if t < ep.warp_size():
                        self.send_header(
                            topk_ids, topk_weights, token, t, first, before, masks, scratch + half, recv, headers, flags, bank, epoch,
                            my_rank,
                        )  # fmt: skip
                    token += n_groups
                    half = self.groups - half
                    if token < last:
                        pieces = self.send_payload(x, topk_ids, token, t, recv, bank, scratch + half, my_rank)
        else:
            share = block - senders
            self.learn_places(counts[my_rank], matrix, starts, totals, ep.i32(epoch & 1), epoch)
            if share == 0:
                for e in range(tid, self.n_local_experts + 1, self.num_threads[0]):
                    expert_rows[e] = starts[e]
                    if e < self.n_local_experts:
                        expert_counts[e] = totals[e]
                if tid < self.n_ranks:
                    source_tokens[tid] = matrix[tid * (self.n_local_experts + 1) + self.n_local_experts]
            number = ep.warp_id() * (self.n_blocks - senders) + share
            more = ep.i1(True)
            while more:
                more = ep.i1(False)
                for step in range(1, self.n_ranks):
                    source = (my_rank + step) % self.n_ranks
                    n_sent = matrix[source * (self.n_local_experts + 1) + self.n_local_experts]
                    run = (n_sent + senders - 1) // senders
                    # In the order in which the senders send: the first of every block's run, the second of every block's run, ...
                    token = number % senders * run + number // senders
                    if number < run * senders:
                        more = ep.i1(True)
                        if token < n_sent:
                            self.expand(
                                source, token, recv[my_rank], headers[my_rank], flags[my_rank], bank, epoch, matrix, rows, scales,
                                row_of, weight_of,
                            )  # fmt: skip
                number += self.num_threads[0] // ep.warp_size() * (self.n_blocks - senders)
        end_launch(begun, epoch, my_rank, self.timeout_ns)
        if tid == 0:
            epochs[block] = epoch

    # ---- combine

    @ep.func
    def rows_here(self, row_of, weight_of, place: ep.i32, listed, listed_weights):
        """A token's rows on this rank in order of selections, without those elsewhere; returns how many. Every warp of the group calls it.

        listed, listed_weights [top_k]: the warp's own
        """
        lane = ep.lane_id()
        row, weight = ep.i32(-1), ep.f32(0.0)
        if lane < self.top_k:
            row, weight = row_of[place * self.top_k + lane], weight_of[place * self.top_k + lane]
        votes = ep.ballot(row >= 0)
        # The lanes have read the list of the token before.
        ep.warp_sync()
        if row >= 0:
            at = ep.i32(ep.popcount(votes & ((ep.u64(1) << ep.u64(lane)) - 1)))
            listed[at] = row
            listed_weights[at] = weight
        ep.warp_sync()
        return ep.i32(ep.popcount(votes))

    @ep.func
    def sums(self, y, listed, listed_weights, n_rows: ep.i32, v: ep.i32):
        """The weighted sums of pieces v, v + GROUP_THREADS, ... of a token's rows, eight f32 each, in order of selections."""
        totals = tuple(zeros8() for _ in range(PIECES))
        for begin in range(0, n_rows, ROWS):
            # All loads first, so that they are in flight together.
            pieces: tuple[Any, ...] = ()
            weights: tuple[Any, ...] = ()
            for j in ep.unroll(range(ROWS)):
                at = ep.min(begin + j, n_rows - 1)
                row = y + ep.i64(listed[at]) * (self.vectors * 4)
                weights = (*weights, listed_weights[at])
                for i in ep.unroll(range(PIECES)):
                    pieces = (*pieces, ep.load(row + ep.min(v + i * GROUP_THREADS, self.vectors - 1) * 4, width=4, cache="streaming"))
            for j in ep.unroll(range(ROWS)):
                if begin + j < n_rows:
                    made: tuple[Any, ...] = ()
                    for i in ep.unroll(range(PIECES)):
                        values = eight_floats(pieces[j * PIECES + i])
                        made = (*made, tuple(totals[i][e] + weights[j] * values[e] for e in EIGHT))
                    totals = made
        return totals

    @ep.func
    def send_sum(self, y, row_of, weight_of, source, token, t, group, listed, listed_weights, back, flags, bank, epoch, my_rank):
        """A group: a peer's token's rows here, summed, to that rank; nothing where it has none."""
        n_rows = self.rows_here(row_of, weight_of, source * self.max_tokens_per_rank + token, listed, listed_weights)
        if n_rows > 0:
            place = (bank * self.n_ranks + my_rank) * self.max_tokens_per_rank + token
            target = back[source] + place * (self.vectors * 4)
            for v in range(t, self.vectors, GROUP_THREADS * PIECES):
                totals = self.sums(y, listed, listed_weights, n_rows, v)
                for i in ep.unroll(range(PIECES)):
                    if v + i * GROUP_THREADS < self.vectors:
                        ep.store(target + (v + i * GROUP_THREADS) * 4, as_bf16(totals[i]))
            ep.named_barrier(1 + group, GROUP_THREADS)
            if t == 0:
                # Cumulative over the group's stores through its barrier; pairs with the wait in add_up on that rank.
                ep.store(flags[source] + place, epoch, order=ep.RELEASE, scope=ep.SYSTEM)

    @ep.func
    def add_up(self, y, row_of, weight_of, topk_ids, token, t, group, listed, listed_weights, back, flags, bank, epoch, out, my_rank):
        """A group: the sum of an own token over the ranks, in order of ranks."""
        n_rows = self.rows_here(row_of, weight_of, my_rank * self.max_tokens_per_rank + token, listed, listed_weights)
        ids = selections(topk_ids, token, self.top_k)
        place = bank * self.bank_tokens + token
        if t < self.n_ranks and t != my_rank and goes_to(ids, t, self.n_local_experts):
            # Pairs with the release in send_sum on that rank; the group's barrier hands it on.
            ep.wait(
                flags + (place + t * self.max_tokens_per_rank),
                until=lambda v: v == epoch,
                order=ep.ACQUIRE,
                scope=ep.SYSTEM,
                timeout_ns=self.timeout_ns,
            )
        ep.named_barrier(1 + group, GROUP_THREADS)
        for v in range(t, self.vectors, GROUP_THREADS * PIECES):
            own = self.sums(y, listed, listed_weights, n_rows, v)
            totals = tuple(zeros8() for _ in range(PIECES))
            for r in distances(0, self.n_ranks, 4):
                if r == my_rank:
                    totals = tuple(plus8(totals[i], own[i]) for i in range(PIECES))
                elif goes_to(ids, r, self.n_local_experts):
                    sums = back + (place + r * self.max_tokens_per_rank) * (self.vectors * 4)
                    made: tuple[Any, ...] = ()
                    for i in ep.unroll(range(PIECES)):
                        made = (*made, ep.load(sums + ep.min(v + i * GROUP_THREADS, self.vectors - 1) * 4, width=4))
                    totals = tuple(plus8(totals[i], eight_floats(made[i])) for i in range(PIECES))
            for i in ep.unroll(range(PIECES)):
                if v + i * GROUP_THREADS < self.vectors:
                    ep.store(out + (ep.i64(token) * self.vectors + v + i * GROUP_THREADS) * 4, as_bf16(totals[i]))

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
        listed = ep.shared(ep.i32, warps * self.top_k) + ep.warp_id() * self.top_k
        listed_weights = ep.shared(ep.f32, warps * self.top_k) + ep.warp_id() * self.top_k
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
