"""The latency mode for few tokens: every 8-byte word on the wire holds 4 bytes of payload and, above them, its launch's number.

A word says by itself that it has arrived, so nothing is released, no flag follows the payload and no barrier comes before it: words are
RELAXED stores at system scope, and the receiver polls each one. It costs twice the bytes, so `low_latency` remains for more tokens. What
both bring is equal bit for bit.

A block is one token slot of every rank, block b the token b: `n_blocks` is `max_tokens_per_rank`. A word is sent in every launch for every
place that is read, whether the token exists and goes there or not, so that nobody needs to know what comes before waiting for it.

dispatch, block b of rank s:
    its token's payload -> slot [bank][s][b] of every other rank, while the selections are counted; then the header, a place and a weight
        for each selection; a selection that is not there has the place NOWHERE. Its own rows while the words are on the way
    for each source: waits for the words of slot [bank][source][b] -> the rows of its experts
    the block behind the last token's has rank s's counts for the others, and gathers theirs

combine, block b of rank s:
    says to every rank that it has begun; for each source whose token b has rows here: their weighted sum -> sums [bank][s][b] there.
        In the first launches sums go to all sources
    its own token's rows, then the sums of the ranks that the token went to, in order of ranks
    waits until the block b of each other rank has begun, where no sum said so

Reuse of buffers: two banks, by the launch's number (the epoch). A word is read where its upper half equals the epoch; what an earlier
launch left there has another one. Rank s overwrites in launch n + 2 what a peer read in launch n. Rank s began launch n + 2 after every
block of its launch n + 1 had seen a word that the peer sent in its launch n + 1, which began after the peer's launch n had ended, and the
read with it. So the store comes after the read as long as a read of a launch is over when the launch is, and no store is seen before its
launch begins: what a stream's order means on either vendor's machine. By the letter of PTX's model relaxed words promise less: a read might
see a later store of a circle of such reads and stores (load buffering), and a launch's end is not said to be a fence. Within a launch
nothing rests on order: what peers write is accessed by 8-byte atomics alone.

Numbers wrap around after 2**32 launches. A word that is sent in every launch holds the number of two launches before by then. A sum is not,
so the combines numbered 0 to 3, two in each bank, send one for every place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import epdsl as ep

from .blockwise import LANES
from .exchange import distances, goes_to, selections
from .low_latency import NO_ROW, LowLatencyExchange
from .rounding import eight_floats
from .weighted_rows import as_bf16, plus8, weighted_sum, zeros8

NOWHERE = 0xFFFFFFFF
UNROLLED_RANKS = 8
# Combines whose number is below send a sum for every place: see above. One in each bank would leave the number 0 to the next time around.
SWEEPS = 4
# As many as registers allow.
WORDS_AT_ONCE = 10
# Of a warp of either vendor, those that share out the words of a header.
HEADER_LANES = 32
# Words are laid out so that a token's begin at a multiple of 128 bytes.
ALIGNED_WORDS = 16


def aligned(words: int) -> int:
    return -(-words // ALIGNED_WORDS) * ALIGNED_WORDS


@dataclass(frozen=True)
class StampedExchange(LowLatencyExchange):
    """The kernels of the latency mode for few tokens. Fields, inputs and outputs are those of `LowLatencyExchange`.

    n_blocks  the same as max_tokens_per_rank; a dispatch has one more block (`dispatch_blocks`)
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n_blocks != self.max_tokens_per_rank:
            raise ValueError(
                f"n_blocks={self.n_blocks} and max_tokens_per_rank={self.max_tokens_per_rank}; a block has one token of a rank"
            )

    # ---- sizes, in words of 8 bytes

    @property
    def dispatch_blocks(self) -> int:
        """One for each token, and one for the counts."""
        return self.n_blocks + 1

    @property
    def header_at(self) -> int:
        """Where a token's header begins: behind piece_words words of every piece, and the scales."""
        return self.vectors * self.piece_words + (self.groups if self.fp8 else 0)

    @property
    def slot_words(self) -> int:
        return aligned(self.header_at + self.header_words)

    @property
    def table_words(self) -> int:
        """The counts of a rank for another: selections of each of its experts, and all tokens."""
        return aligned(self.n_local_experts + 1)

    @property
    def source_words(self) -> int:
        """What a rank sends to another in one bank of a dispatch: slots, then the table."""
        return self.max_tokens_per_rank * self.slot_words + self.table_words

    @property
    def sum_words(self) -> int:
        return self.hidden // 2

    @property
    def source_sum_words(self) -> int:
        """What a rank sends to another in one bank of a combine: sums, then a word a block that says that it has begun."""
        return self.max_tokens_per_rank * self.sum_words + aligned(self.n_blocks)

    def wire_words(self) -> int:
        return 2 * self.n_ranks * self.source_words

    def back_words(self) -> int:
        return 2 * self.n_ranks * self.source_sum_words

    # ---- words

    @ep.func
    def put(self, at: ep.Ptr[ep.u64], epoch: ep.u32, value: ep.u32):
        # RELAXED: the word is all it says. Pairs with the wait in `arrived` on the rank that it lies on.
        ep.store(at, (ep.u64(epoch) << 32) | ep.u64(value), order=ep.RELAXED, scope=ep.SYSTEM)

    @ep.func
    def arrived(self, pointers: Any, epoch: ep.u32):
        """The lower halves of words, once all of them are this launch's."""
        # Pairs with the stores in `put` by the rank that the places are for.
        words = ep.wait(
            pointers, until=lambda v: ep.u32(v >> 32) == epoch, order=ep.RELAXED, scope=ep.SYSTEM, timeout_ns=self.timeout_ns
        )  # fmt: skip
        return tuple(ep.u32(word) for word in words)

    @ep.func
    def peer_pointers(self, buffer: ep.Peers[ep.u64], my_rank: ep.i32):
        """The other ranks' buffers in order of distance, fetched at once; none where there are too many to hold."""
        found: tuple[Any, ...] = ()
        if self.n_ranks <= UNROLLED_RANKS:
            found = tuple(buffer[(my_rank + step) % self.n_ranks] for step in range(1, self.n_ranks))
        return found

    @ep.func
    def at_distance(self, buffer: ep.Peers[ep.u64], pointers: Any, step: Any, my_rank: ep.i32):
        if self.n_ranks <= UNROLLED_RANKS:
            return pointers[step - 1]
        else:
            return buffer[(my_rank + step) % self.n_ranks]

    # ---- dispatch

    @ep.kernel(max_threads=lambda self: self.num_threads, blocks=lambda self: self.dispatch_blocks)
    def dispatch(
        self,
        x: ep.Ptr[ep.u32],
        topk_ids: ep.Ptr[ep.i32],
        topk_weights: ep.Ptr[ep.f32],
        n_tokens: ep.i32,
        wire: ep.Peers[ep.u64],
        epochs: ep.Ptr[ep.u32],
        rows: ep.Ptr[ep.u32],
        scales: ep.Ptr[ep.f32],
        expert_counts: ep.Ptr[ep.i32],
        row_of: ep.Ptr[ep.i32],
        weight_of: ep.Ptr[ep.f32],
        source_tokens: ep.Ptr[ep.i32],
        my_rank: ep.i32,
    ):
        """As `LowLatencyExchange.dispatch`; row_of is -1 for tokens that do not exist as well."""
        counts = ep.shared(ep.i32, self.n_experts)
        slots = ep.shared(ep.i32, self.top_k)
        tid, token = ep.thread_idx.x, ep.block_idx.x
        # What depends on nothing is fetched first, so that all of it is on the way at once.
        epoch = epochs[token] + 1
        peers = self.peer_pointers(wire, my_rank)
        received = wire[my_rank] + ep.i64(epoch & 1) * (self.n_ranks * self.source_words)
        sent = (ep.i64(epoch & 1) * self.n_ranks + my_rank) * self.source_words
        ids = tuple(ep.i32(-1) for _ in range(self.top_k))
        raws = tuple(ep.vec(ep.u32, 4)(ep.u32(0)) for _ in range(self.trips))
        expert, weight = ep.i32(-1), ep.f32(0.0)
        if token < n_tokens:
            for trip in ep.unroll(range(self.trips)):
                v = ep.min(tid + trip * self.num_threads, self.vectors - 1)
                raw = ep.load(x + (ep.i64(token) * self.vectors + v) * 4, width=4)
                raws = (*raws[:trip], raw, *raws[trip + 1 :])
            ids = tuple(topk_ids[token * self.top_k + k] for k in range(self.top_k))
            if tid < self.top_k:
                expert = topk_ids[token * self.top_k + tid]
                weight = topk_weights[token * self.top_k + tid]
        chosen = ep.i32(-1)
        if tid < n_tokens * self.top_k:
            chosen = topk_ids[tid]
        for e in range(tid, self.n_experts, self.num_threads):
            counts[e] = 0
        if tid < self.top_k:
            slots[tid] = 0
        ep.barrier()
        pieces = tuple(self.as_sent(raw) for raw in raws)
        if token < self.n_blocks:
            self.send_payload(pieces, wire, peers, sent + ep.i64(token) * self.slot_words, epoch, my_rank)
        # The payload is on its way while this rank's selections are counted for the headers.
        self.counted(chosen, tid, token, ids, counts, slots)
        for i in range(tid + self.num_threads, n_tokens * self.top_k, self.num_threads):
            self.counted(topk_ids[i], i, token, ids, counts, slots)
        ep.barrier()
        if token < self.n_blocks:
            self.send_header(expert, weight, slots, wire, peers, sent + ep.i64(token) * self.slot_words, epoch, my_rank)
            own = ep.i64(my_rank) * self.max_tokens_per_rank + token
            self.own_rows(ids, expert, weight, pieces, own, slots, rows, scales, row_of, weight_of, my_rank)
            self.receive(received, epoch, token, counts, rows, scales, row_of, weight_of, my_rank)
        else:
            self.exchange_counts(n_tokens, counts, wire, sent, received, epoch, expert_counts, source_tokens, my_rank)
        if tid == 0:
            epochs[token] = epoch

    @ep.func
    def counted(self, expert: ep.i32, i: ep.i32, token: ep.i32, ids: Any, counts: ep.Ptr[ep.i32], slots: ep.Ptr[ep.i32]):
        """Counts selection i of this rank: for its expert, and for the selections of the block's token that come after."""
        if expert >= 0 and expert < self.n_experts:
            # RELAXED: the barrier after all of them orders the adds before the reads.
            ep.reduce_add(counts + expert, 1, order=ep.RELAXED, scope=ep.BLOCK)
            if i < token * self.top_k:
                for k in ep.unroll(range(self.top_k)):
                    if expert == ids[k]:
                        ep.reduce_add(slots + k, 1, order=ep.RELAXED, scope=ep.BLOCK)

    @ep.func
    def send_payload(self, pieces: Any, wire: ep.Peers[ep.u64], peers: Any, slot: ep.i64, epoch: ep.u32, my_rank: ep.i32):
        """The token's pieces and scales to every other rank; each store of a warp is contiguous."""
        for trip in ep.unroll(range(self.trips)):
            v = ep.thread_idx.x + trip * self.num_threads
            if v < self.vectors:
                piece, scale = pieces[trip]
                for step in distances(1, self.n_ranks, UNROLLED_RANKS):
                    target = self.at_distance(wire, peers, step, my_rank) + slot
                    for w in ep.unroll(range(self.piece_words)):
                        self.put(target + (w * self.vectors + v), epoch, piece[w])
                    if self.fp8:
                        if v % LANES == 0:
                            self.put(target + (self.piece_words * self.vectors + v // LANES), epoch, ep.bitcast(ep.u32, scale))

    @ep.func
    def send_header(self, expert, weight, slots, wire, peers, slot, epoch, my_rank):
        """Thread k: selection k's place and weight to every other rank."""
        k = ep.thread_idx.x
        if k < self.top_k:
            position = ep.u32(slots[k])
            for step in distances(1, self.n_ranks, UNROLLED_RANKS):
                header = self.at_distance(wire, peers, step, my_rank) + (slot + self.header_at)
                local = expert - (my_rank + step) % self.n_ranks * self.n_local_experts
                here = (local >= 0) & (local < self.n_local_experts)
                self.put(header + k, epoch, ep.select(here, (ep.u32(local) << 16) | position, ep.u32(NOWHERE)))
                self.put(header + (self.top_k + k), epoch, ep.bitcast(ep.u32, weight))

    @ep.func
    def own_rows(self, ids, expert, weight, pieces, place, slots, rows, scales, row_of, weight_of, my_rank):
        """The block's token of this rank to the rows of this rank's experts."""
        first = my_rank * self.n_local_experts
        targets: tuple[Any, ...] = ()
        for k in ep.unroll(range(self.top_k)):
            local = ids[k] - first
            here = (local >= 0) & (local < self.n_local_experts)
            targets = (*targets, ep.select(here, local * self.capacity + slots[k], NO_ROW))
        for trip in ep.unroll(range(self.trips)):
            piece, scale = pieces[trip]
            self.store_rows(rows, scales, targets, trip, piece, scale)
        k = ep.thread_idx.x
        if k < self.top_k:
            local = expert - first
            here = (local >= 0) & (local < self.n_local_experts)
            row_of[place * self.top_k + k] = ep.select(here, local * self.capacity + slots[k], NO_ROW)
            weight_of[place * self.top_k + k] = weight

    @ep.func
    def store_rows(self, rows: ep.Ptr[ep.u32], scales: ep.Ptr[ep.f32], targets: Any, trip: int, piece: Any, scale: ep.f32):
        """A piece to each of its token's rows here. A row that a thread which gave up should have computed is none."""
        v = ep.thread_idx.x + trip * self.num_threads
        if v < self.vectors:
            for row in targets:
                if ep.u32(row) < self.n_rows:
                    self.store_piece(rows, scales, ep.i64(row), v, piece, scale)

    @ep.func
    def receive(self, received: ep.Ptr[ep.u64], epoch: ep.u32, token: ep.i32, counts, rows, scales, row_of, weight_of, my_rank: ep.i32):
        """The block's token of every other rank to the rows of this rank's experts."""
        tid = ep.thread_idx.x
        lane = tid % HEADER_LANES
        there = ep.shared(ep.i32, max(1, (self.n_ranks - 2) * self.n_local_experts))
        if self.n_ranks > 2:
            # Where a rank's rows begin depends on the counts of those before it, all but the farthest rank's.
            for i in range(tid, (self.n_ranks - 2) * self.n_local_experts, self.num_threads):
                source = (my_rank + 1 + i // self.n_local_experts) % self.n_ranks
                (count,) = self.arrived((received + (self.table_at(source) + i % self.n_local_experts),), epoch)
                there[i] = ep.i32(count)
            ep.barrier()
        for start in range(1, self.n_ranks, self.at_once):
            slots: tuple[Any, ...] = ()
            asked: tuple[Any, ...] = ()
            for i in ep.unroll(range(self.at_once)):
                source = (my_rank + ep.min(start + i, self.n_ranks - 1)) % self.n_ranks
                slot = received + (ep.i64(source) * self.source_words + ep.i64(token) * self.slot_words)
                header = tuple(slot + (self.header_at + ep.min(lane + at, self.header_words - 1)) for at in self.header_parts)
                slots = (*slots, slot)
                asked = (*asked, *header, *self.piece_pointers(slot, 0))
            words = self.arrived(asked, epoch)
            for i in ep.unroll(range(self.at_once)):
                if start + i < self.n_ranks:
                    first = words[i * self.first_words : (i + 1) * self.first_words]
                    self.received(start + i, slots[i], first, epoch, token, counts, there, rows, scales, row_of, weight_of, my_rank)

    @ep.func
    def received(self, step, slot, first, epoch, token, counts, there, rows, scales, row_of, weight_of, my_rank):
        """The block's token of the rank at a distance. first: the words waited for already, a lane's of the header and those of a piece."""
        lane = ep.thread_idx.x % HEADER_LANES
        place = ep.i64((my_rank + step) % self.n_ranks) * self.max_tokens_per_rank + token
        row = ep.i32(NO_ROW)
        if lane < self.top_k and first[0] != NOWHERE:
            expert = ep.i32(first[0] >> 16)
            row = counts[my_rank * self.n_local_experts + expert] + expert * self.capacity + ep.i32(first[0] & 0xFFFF)
            if self.n_ranks > 2:
                for earlier in range(step - 1):
                    row += there[earlier * self.n_local_experts + expert]
        targets: tuple[Any, ...] = ()
        for k in ep.unroll(range(self.top_k)):
            targets = (*targets, ep.shfl(row, k))
        for trip in ep.unroll(range(self.trips)):
            words = first[len(self.header_parts) :]
            if trip > 0:
                words = self.arrived(self.piece_pointers(slot, trip), epoch)
            scale = ep.f32(0.0)
            if self.fp8:
                scale = ep.bitcast(ep.f32, words[self.piece_words])
            self.store_rows(rows, scales, targets, trip, ep.vec(ep.u32, self.piece_words)(*words[: self.piece_words]), scale)
        if ep.thread_idx.x < HEADER_LANES:
            if lane < self.top_k:
                row_of[place * self.top_k + lane] = row
            for part in ep.unroll(range(len(self.header_parts))):
                k = lane + self.header_parts[part] - self.top_k
                if k >= 0 and k < self.top_k:
                    weight_of[place * self.top_k + k] = ep.bitcast(ep.f32, first[part])

    @property
    def first_words(self) -> int:
        """Words of a source that a thread waits for together."""
        return len(self.header_parts) + self.piece_words + (1 if self.fp8 else 0)

    @property
    def at_once(self) -> int:
        """Sources that a thread waits for together."""
        return max(1, min(self.n_ranks - 1, WORDS_AT_ONCE // self.first_words))

    @property
    def header_parts(self) -> tuple[int, ...]:
        """Which words of a header a lane waits for: its number plus each of these. The first part has all places."""
        return tuple(range(0, self.header_words, HEADER_LANES))

    @ep.func
    def piece_pointers(self, slot: ep.Ptr[ep.u64], trip: int):
        """Where the words of the thread's piece of a token are, and its scale's."""
        v = ep.min(ep.thread_idx.x + trip * self.num_threads, self.vectors - 1)
        found = tuple(slot + (w * self.vectors + v) for w in range(self.piece_words))
        if self.fp8:
            found = (*found, slot + (self.piece_words * self.vectors + v // LANES))
        return found

    @ep.func
    def table_at(self, source: ep.i32):
        return ep.i64(source) * self.source_words + self.max_tokens_per_rank * self.slot_words

    @ep.func
    def exchange_counts(self, n_tokens, counts, wire, sent, received, epoch, expert_counts, source_tokens, my_rank):
        """This rank's counts to the others; the rows of each expert here, and the tokens of each rank."""
        tid = ep.thread_idx.x
        table = sent + self.max_tokens_per_rank * self.slot_words
        for r in range(tid, self.n_ranks, self.num_threads):
            if r != my_rank:
                self.put(wire[r] + (table + self.n_local_experts), epoch, ep.u32(n_tokens))
        for i in range(tid, self.n_experts, self.num_threads):
            if i // self.n_local_experts != my_rank:
                self.put(wire[i // self.n_local_experts] + (table + i % self.n_local_experts), epoch, ep.u32(counts[i]))
        for e in range(tid, self.n_local_experts, self.num_threads):
            total = counts[my_rank * self.n_local_experts + e]
            for step in range(1, self.n_ranks):
                (count,) = self.arrived((received + (self.table_at((my_rank + step) % self.n_ranks) + e),), epoch)
                total += ep.i32(count)
            expert_counts[e] = total
        for r in range(tid, self.n_ranks, self.num_threads):
            size = n_tokens
            if r != my_rank:
                (count,) = self.arrived((received + (self.table_at(r) + self.n_local_experts),), epoch)
                size = ep.i32(count)
                ep.device_assert((size >= 0) & (size <= self.max_tokens_per_rank), "dispatch: rank {} says it has {} tokens", r, size)
            source_tokens[r] = size

    # ---- combine

    @ep.kernel(max_threads=lambda self: self.num_threads, blocks=lambda self: self.n_blocks)
    def combine(
        self,
        y: ep.Ptr[ep.u32],
        row_of: ep.Ptr[ep.i32],
        weight_of: ep.Ptr[ep.f32],
        source_tokens: ep.Ptr[ep.i32],
        topk_ids: ep.Ptr[ep.i32],
        back: ep.Peers[ep.u64],
        epochs: ep.Ptr[ep.u32],
        out: ep.Ptr[ep.u32],
        my_rank: ep.i32,
    ):
        """As `LowLatencyExchange.combine`; row_of, weight_of and source_tokens as `StampedExchange.dispatch` left them."""
        tid, token = ep.thread_idx.x, ep.block_idx.x
        # What depends on nothing is fetched first, so that all of it is on the way at once.
        epoch = epochs[token] + 1
        received = back[my_rank] + ep.i64(epoch & 1) * (self.n_ranks * self.source_sum_words)
        sent = (ep.i64(epoch & 1) * self.n_ranks + my_rank) * self.source_sum_words
        exists = token < source_tokens[my_rank]
        own_rows, own_weights = self.rows_and_weights(row_of, weight_of, my_rank * self.max_tokens_per_rank + token)
        for step in distances(1, self.n_ranks, 2):
            source = (my_rank + step) % self.n_ranks
            chosen, weights = self.rows_and_weights(row_of, weight_of, source * self.max_tokens_per_rank + token)
            target = back[(my_rank + step) % self.n_ranks] + sent
            if tid == 0:
                self.put(target + (self.max_tokens_per_rank * self.sum_words + token), epoch, ep.u32(0))
            some = epoch < SWEEPS
            for row in chosen:
                some = some | (row >= 0)
            if some:
                for trip in ep.unroll(range(self.trips)):
                    v = tid + trip * self.num_threads
                    if v < self.vectors:
                        words = as_bf16(weighted_sum(y, chosen, weights, self.vectors, v))
                        for w in ep.unroll(range(4)):
                            self.put(target + (ep.i64(token) * self.sum_words + w * self.vectors + v), epoch, words[w])
        # Every thread has read the launch's number before thread 0 writes it. Here the peers' sums are on the way meanwhile.
        ep.barrier()
        ids = tuple(ep.i32(-1) for _ in range(self.top_k))
        if exists:
            ids = tuple(topk_ids[token * self.top_k + k] for k in range(self.top_k))
            for trip in ep.unroll(range(self.trips)):
                v = tid + trip * self.num_threads
                inside = ep.min(v, self.vectors - 1)
                own = weighted_sum(y, own_rows, own_weights, self.vectors, inside)
                total = zeros8()
                for r in range(self.n_ranks):
                    part = zeros8()
                    if r == my_rank:
                        part = own
                    elif goes_to(ids, r, self.n_local_experts):
                        sums = received + (ep.i64(r) * self.source_sum_words + ep.i64(token) * self.sum_words)
                        words = self.arrived(tuple(sums + (w * self.vectors + inside) for w in range(4)), epoch)
                        part = eight_floats(words)
                    total = plus8(total, part)
                if v < self.vectors:
                    ep.store(out + (ep.i64(token) * self.vectors + v) * 4, as_bf16(total))
        for r in range(tid, self.n_ranks, self.num_threads):
            if r != my_rank and not goes_to(ids, r, self.n_local_experts):
                begun = received + (ep.i64(r) * self.source_sum_words + self.max_tokens_per_rank * self.sum_words + token)
                self.arrived((begun,), epoch)
        if tid == 0:
            epochs[token] = epoch

    @ep.func
    def rows_and_weights(self, row_of: ep.Ptr[ep.i32], weight_of: ep.Ptr[ep.f32], place: ep.i32):
        """A token's rows here, and the weight of each; 0 where there is none."""
        chosen = selections(row_of, place, self.top_k)
        bits = selections(weight_of.cast(ep.i32), place, self.top_k)
        weights: tuple[Any, ...] = ()
        for k in ep.unroll(range(self.top_k)):
            weights = (*weights, ep.select(chosen[k] >= 0, ep.bitcast(ep.f32, bits[k]), ep.f32(0.0)))
        return chosen, weights
