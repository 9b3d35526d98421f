"""The latency mode: a decode-sized exchange with no grid-wide join and one system-scope release per block and peer.

Block b of every rank handles the tokens b, b + n_blocks, ... of every source. So what block b receives was sent by the blocks b of its
peers, and one flag per (source, block) says it is there: no election, no count exchange before the payload, no wait for a whole grid.

dispatch, block b of rank s:
    for each of its tokens: payload and header -> each destination's recv[bank][s][token]; then one release (system) of flag[s][b]
    its own tokens -> its own experts' rows, while the peers' are on the way
    for each source: waits flag[source][b], among more than two ranks flag[source][0] too (acquire, system); recv -> the rows of its experts

combine, block b of rank s:
    for each source's tokens: the weighted sum of their rows here, in f32 -> back[bank][s][token] at the source; then one release
    its own tokens: the sum of its own rows, then flag by flag the peers' sums, in order of ranks

A row's place needs no exchange either: expert e's rows are [own tokens | rank s + 1's | rank s + 2's | ...], each in order of tokens, at
e * capacity. A source counts, for each of its selections, how many of its earlier tokens chose the same expert, and sends that.

Reuse of buffers: two banks, by the launch's number (the epoch). Launch n + 1 of rank s writes bank (n + 1) % 2 of a peer, which the peer
last read in its launch n - 1. Rank s ended launch n only after every block of the peer had released its flag of launch n, and the peer's
launch n began after its launch n - 1 had ended. Flags have two banks as well and hold their launch's number, so that a peer that is already
one launch ahead overwrites none. Every block signals every peer in every launch, also without tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import epdsl as ep
from epdsl.env import TIMEOUT_NS

from .blockwise import GROUP, LANES, quantise
from .exchange import check_experts, distances, goes_to
from .rounding import eight_floats
from .weighted_rows import as_bf16, plus8, weighted_sum, zeros8

NO_ROW = -1
HEADER_WORDS_PER_SELECTION = 2


@dataclass(frozen=True)
class LowLatencyExchange:
    """The kernels of the latency mode, for one configuration; equal on every rank.

    hidden               elements of a token, bf16; a multiple of 128
    n_experts, n_ranks   rank r has the experts from r * n_experts / n_ranks on
    top_k                selections a token has
    max_tokens_per_rank  most tokens a rank may dispatch at once
    n_blocks             blocks of a launch, all resident at once; a token's block is its index modulo this
    num_threads          threads of a block
    fp8                  whether the dispatch carries e4m3 with a f32 scale per 128 elements, quantised here; else bf16
    timeout_ns           how long any wait may take
    """

    hidden: int
    n_experts: int
    n_ranks: int
    top_k: int
    max_tokens_per_rank: int
    n_blocks: int
    num_threads: int
    fp8: bool = True
    timeout_ns: int = field(default_factory=TIMEOUT_NS.get)

    def __post_init__(self) -> None:
        if self.hidden < GROUP or self.hidden % GROUP:
            raise ValueError(f"hidden={self.hidden} is not a multiple of {GROUP}, the elements that share a scale")
        check_experts(self.n_experts, self.n_ranks, self.top_k)
        if not 1 <= self.n_blocks:
            raise ValueError(f"n_blocks={self.n_blocks}; it must be at least 1")
        if self.num_threads % 64 or not max(64, self.n_awaited) <= self.num_threads <= 1024:
            raise ValueError(
                f"num_threads={self.num_threads}; it must be a multiple of 64 from 64 to 1024 and, for {self.n_ranks} ranks, "
                f"at least {self.n_awaited}"
            )
        if not 1 <= self.max_tokens_per_rank < 1 << 15:
            raise ValueError(f"max_tokens_per_rank={self.max_tokens_per_rank}; it must be from 1 to {(1 << 15) - 1}")

    # ---- sizes

    @property
    def n_local_experts(self) -> int:
        return self.n_experts // self.n_ranks

    @property
    def capacity(self) -> int:
        """Rows an expert has: one for each token of every rank."""
        return self.n_ranks * self.max_tokens_per_rank

    @property
    def n_rows(self) -> int:
        return self.n_local_experts * self.capacity

    @property
    def vectors(self) -> int:
        """Pieces of 8 elements a token has; a thread handles one at a time."""
        return self.hidden // 8

    @property
    def trips(self) -> int:
        """How often the block's threads go over a token."""
        return -(-self.vectors // self.num_threads)

    @property
    def piece_words(self) -> int:
        """u32 words of a piece on the wire."""
        return 2 if self.fp8 else 4

    @property
    def groups(self) -> int:
        return self.hidden // GROUP

    @property
    def payload_words(self) -> int:
        """u32 words of a token on the wire: its pieces, then its scales."""
        scales = self.groups if self.fp8 else 0
        return -(-(self.vectors * self.piece_words + scales) // 4) * 4

    @property
    def header_words(self) -> int:
        """u32 words of a token's header: per selection the place (expert << 16 | slot, or all ones) and the weight's bits."""
        return HEADER_WORDS_PER_SELECTION * self.top_k

    def bank_payload_words(self) -> int:
        return self.n_ranks * self.max_tokens_per_rank * self.payload_words

    def bank_header_words(self) -> int:
        return self.n_ranks * self.max_tokens_per_rank * self.header_words

    def bank_count_words(self) -> int:
        return self.n_ranks * self.n_local_experts

    @property
    def n_awaited(self) -> int:
        """Flags that a block of the dispatch waits for: each rank's block of its number and, with more than two ranks, each rank's block 0.

        The blocks 0 send their rank's counts, which place the rows of the ranks that come later in the order.
        """
        return self.n_ranks * (2 if self.n_ranks > 2 else 1)

    def flag_words(self) -> int:
        """u64 words of the flags: bank, source, block."""
        return 2 * self.n_ranks * self.n_blocks

    @property
    def tokens_per_block(self) -> int:
        return -(-self.max_tokens_per_rank // self.n_blocks)

    def back_words(self) -> int:
        """u32 words of the combine's receive buffer of one bank."""
        return self.n_ranks * self.max_tokens_per_rank * (self.hidden // 2)

    # ---- dispatch

    @ep.func
    def count(self, topk_ids: ep.Ptr[ep.i32], n_tokens: ep.i32, counts: ep.Ptr[ep.i32], slots: ep.Ptr[ep.i32]):
        """Counts this rank's selections. The whole block calls it; it ends with a barrier.

        counts[e] = how many chose expert e
        slots[j * top_k + k] = how many of the tokens before the block's j-th chose the expert of its selection k
        """
        tid, block = ep.thread_idx.x, ep.block_idx.x
        for e in range(tid, self.n_experts, self.num_threads):
            counts[e] = 0
        for i in range(tid, self.tokens_per_block * self.top_k, self.num_threads):
            slots[i] = 0
        ep.barrier()
        for i in range(tid, n_tokens * self.top_k, self.num_threads):
            expert = topk_ids[i]
            if expert >= 0 and expert < self.n_experts:
                # RELAXED: the barrier below orders all the adds before the reads.
                ep.reduce_add(counts + expert, 1, order=ep.RELAXED, scope=ep.BLOCK)
                token = block
                for j in ep.unroll(range(self.tokens_per_block)):
                    if i < token * self.top_k and token < n_tokens:
                        for k in ep.unroll(range(self.top_k)):
                            if expert == topk_ids[token * self.top_k + k]:
                                ep.reduce_add(slots + (j * self.top_k + k), 1, order=ep.RELAXED, scope=ep.BLOCK)
                    token += self.n_blocks
        ep.barrier()

    @ep.func
    def local_base(self, counts: ep.Ptr[ep.i32], recv_counts: ep.Ptr[ep.u32], source: ep.i32, my_rank: ep.i32, local_expert: ep.i32):
        """The first row of `source`'s tokens among those of a local expert: those of this rank and of the ranks after it come before."""
        before = ep.i32(0)
        if source != my_rank:
            before = counts[my_rank * self.n_local_experts + local_expert]
            if self.n_ranks > 2:
                for step in range(1, (source - my_rank) % self.n_ranks):
                    earlier = (my_rank + step) % self.n_ranks
                    before += ep.i32(recv_counts[earlier * self.n_local_experts + local_expert])
        return before

    @ep.func
    def row_at(self, local_expert: ep.i32, position: ep.i32):
        return ep.i64(local_expert) * self.capacity + position

    @ep.func
    def store_piece(self, rows: ep.Ptr[ep.u32], scales: ep.Ptr[ep.f32], row: ep.i64, v: ep.i32, piece: Any, scale: ep.f32):
        """Piece v of a row of the output, and its scale once per group."""
        ep.store(rows + (row * self.vectors + v) * self.piece_words, piece)
        if self.fp8:
            if v % LANES == 0:
                scales[row * self.groups + v // LANES] = scale

    @ep.func
    def packed(self, x: ep.Ptr[ep.u32], token: ep.i32, v: ep.i32):
        """Piece v of a token of the input as it travels, and its scale. Every thread calls it; past the end the last piece is read."""
        return self.as_sent(ep.load(x + (ep.i64(token) * self.vectors + ep.min(v, self.vectors - 1)) * 4, width=4))

    @ep.func
    def as_sent(self, raw: Any):
        """A piece of the input as it travels, and its scale."""
        if self.fp8:
            return quantise(raw)
        else:
            return raw, ep.f32(0.0)

    @ep.kernel(max_threads=lambda self: self.num_threads, blocks=lambda self: self.n_blocks)
    def dispatch(
        self,
        x: ep.Ptr[ep.u32],
        topk_ids: ep.Ptr[ep.i32],
        topk_weights: ep.Ptr[ep.f32],
        n_tokens: ep.i32,
        recv: ep.Peers[ep.u32],
        headers: ep.Peers[ep.u32],
        recv_counts: ep.Peers[ep.u32],
        flags: ep.Peers[ep.u64],
        epochs: ep.Ptr[ep.u32],
        rows: ep.Ptr[ep.u32],
        scales: ep.Ptr[ep.f32],
        expert_counts: ep.Ptr[ep.i32],
        row_of: ep.Ptr[ep.i32],
        weight_of: ep.Ptr[ep.f32],
        source_tokens: ep.Ptr[ep.i32],
        my_rank: ep.i32,
    ):
        """Sends this rank's tokens and receives the peers'.

        x [n_tokens, hidden] bf16, topk_ids [n_tokens, top_k] global ids (anything outside 0..n_experts-1 is dropped), topk_weights alike
        rows [n_rows, hidden] e4m3 or bf16, scales [n_rows, hidden / 128] f32, expert_counts [n_local_experts]: rows of each expert
        row_of, weight_of [n_ranks, max_tokens_per_rank, top_k]: for the combine; row -1 where a selection is not here
        source_tokens [n_ranks]: tokens each rank dispatched
        """
        counts = ep.shared(ep.i32, self.n_experts)
        slots = ep.shared(ep.i32, self.tokens_per_block * self.top_k)
        sizes = ep.shared(ep.i32, self.n_ranks)
        tid, block = ep.thread_idx.x, ep.block_idx.x
        epoch = epochs[block] + 1
        bank = ep.i64(epoch & 1)
        header_bank = bank * self.bank_header_words()
        count_bank = bank * self.bank_count_words()
        payload_bank = bank * self.bank_payload_words()
        flag_bank = ep.i32(epoch & 1) * (self.n_ranks * self.n_blocks)
        for token in range(block, n_tokens, self.n_blocks):
            ids = tuple(topk_ids[token * self.top_k + k] for k in range(self.top_k))
            place = ep.i64(my_rank) * self.max_tokens_per_rank + token
            for trip in ep.unroll(range(self.trips)):
                v = tid + trip * self.num_threads
                piece, scale = self.packed(x, token, v)
                if v < self.vectors:
                    for step in distances(1, self.n_ranks):
                        peer = (my_rank + step) % self.n_ranks
                        if goes_to(ids, peer, self.n_local_experts):
                            payload = recv[peer] + (payload_bank + place * self.payload_words)
                            ep.store(payload + v * self.piece_words, piece)
                            if self.fp8:
                                if v % LANES == 0:
                                    payload[self.vectors * self.piece_words + v // LANES] = ep.bitcast(ep.u32, scale)
        # The payload is on its way while this rank's selections are counted for the headers.
        self.count(topk_ids, n_tokens, counts, slots)
        # A loop that goes round once at most would be unrolled all the same.
        if self.tokens_per_block > 1:
            for token in range(block, n_tokens, self.n_blocks):
                self.send_headers(topk_ids, topk_weights, token, slots, headers, header_bank, my_rank)
        elif block < n_tokens:
            self.send_headers(topk_ids, topk_weights, block, slots, headers, header_bank, my_rank)
        if block == 0:
            for i in range(tid, self.n_experts, self.num_threads):
                peer = i // self.n_local_experts
                recv_counts[peer][count_bank + my_rank * self.n_local_experts + i % self.n_local_experts] = ep.u32(counts[i])
        ep.barrier()
        if tid < self.n_ranks:
            # Pairs with the peers' wait below: the barrier orders the block's stores before it.
            ep.store(
                flags[tid] + (flag_bank + my_rank * self.n_blocks + block),
                (ep.u64(epoch) << 32) | ep.u64(n_tokens),
                order=ep.RELEASE,
                scope=ep.SYSTEM,
            )

        for token in range(block, n_tokens, self.n_blocks):
            mine = slots + token // self.n_blocks * self.top_k
            self.own_token(x, topk_ids, topk_weights, token, mine, rows, scales, row_of, weight_of, my_rank)

        if tid < self.n_awaited:
            source, other = tid, block
            if self.n_awaited > self.n_ranks:
                source, other = tid % self.n_ranks, ep.select(tid < self.n_ranks, block, 0)
            if tid < self.n_ranks:
                # A thread that gives up leaves the others of its block nothing to read out of bounds.
                sizes[tid] = 0
            size = self.wait_for(flags[my_rank] + (flag_bank + source * self.n_blocks + other), epoch)
            ep.device_assert((size >= 0) & (size <= self.max_tokens_per_rank), "dispatch: rank {} says it has {} tokens", source, size)
            if tid < self.n_ranks:
                sizes[tid] = size
        ep.barrier()
        my_counts = recv_counts[my_rank] + count_bank
        for step in range(1, self.n_ranks):
            source = (my_rank + step) % self.n_ranks
            for token in range(block, sizes[source], self.n_blocks):
                place = ep.i64(source) * self.max_tokens_per_rank + token
                header = headers[my_rank] + (header_bank + place * self.header_words)
                payload = recv[my_rank] + (payload_bank + place * self.payload_words)
                self.received_token(header, payload, place, counts, my_counts, source, rows, scales, row_of, weight_of, my_rank)
        if block == 0:
            for e in range(tid, self.n_local_experts, self.num_threads):
                total = ep.i32(0)
                for r in range(self.n_ranks):
                    total += ep.i32(my_counts[r * self.n_local_experts + e])
                expert_counts[e] = total
            for r in range(tid, self.n_ranks, self.num_threads):
                source_tokens[r] = sizes[r]
        if tid == 0:
            epochs[block] = epoch

    @ep.func
    def send_headers(self, topk_ids, topk_weights, token, slots, headers, header_bank, my_rank):
        """A token's header to every other rank: its places there and their weights."""
        mine = slots + token // self.n_blocks * self.top_k
        place = ep.i64(my_rank) * self.max_tokens_per_rank + token
        for i in range(ep.thread_idx.x, self.top_k * (self.n_ranks - 1), self.num_threads):
            k = i % self.top_k
            peer = (my_rank + 1 + i // self.top_k) % self.n_ranks
            expert = topk_ids[token * self.top_k + k]
            first = peer * self.n_local_experts
            here = expert >= first and expert < first + self.n_local_experts
            header = headers[peer] + (header_bank + place * self.header_words)
            header[2 * k] = ep.select(here, (ep.u32(expert - first) << 16) | ep.u32(mine[k]), ep.u32(0xFFFFFFFF))
            header[2 * k + 1] = ep.bitcast(ep.u32, topk_weights[token * self.top_k + k])

    @ep.func
    def wait_for(self, flag: ep.Ptr[ep.u64], epoch: ep.u32):
        """Waits for a block's flag of this launch; returns the token count it carries."""
        # Pairs with the release of that flag by the block that it belongs to, on that rank.
        value = ep.wait(flag, until=lambda v: ep.u32(v >> 32) == epoch, order=ep.ACQUIRE, scope=ep.SYSTEM, timeout_ns=self.timeout_ns)
        return ep.i32(ep.u32(value))

    @ep.func
    def own_token(self, x, topk_ids, topk_weights, token, slots, rows, scales, row_of, weight_of, my_rank):
        """A token of this rank to the rows of this rank's experts."""
        first = my_rank * self.n_local_experts
        targets: tuple[Any, ...] = ()
        for k in ep.unroll(range(self.top_k)):
            expert = topk_ids[token * self.top_k + k] - first
            here = (expert >= 0) & (expert < self.n_local_experts)
            targets = (*targets, ep.select(here, self.row_at(expert, slots[k]), ep.i64(NO_ROW)))
        for trip in ep.unroll(range(self.trips)):
            v = ep.thread_idx.x + trip * self.num_threads
            piece, scale = self.packed(x, token, v)
            if v < self.vectors:
                for k in ep.unroll(range(self.top_k)):
                    if targets[k] >= 0:
                        self.store_piece(rows, scales, targets[k], v, piece, scale)
        if ep.thread_idx.x < self.top_k:
            k = ep.thread_idx.x
            expert = topk_ids[token * self.top_k + k] - first
            here = (expert >= 0) & (expert < self.n_local_experts)
            at = (ep.i64(my_rank) * self.max_tokens_per_rank + token) * self.top_k + k
            row_of[at] = ep.select(here, ep.i32(self.row_at(expert, slots[k])), NO_ROW)
            weight_of[at] = topk_weights[token * self.top_k + k]

    @ep.func
    def received_token(self, header, payload, place, counts, recv_counts, source, rows, scales, row_of, weight_of, my_rank):
        """A token of another rank from the receive buffer to the rows of this rank's experts."""
        pieces: tuple[Any, ...] = ()
        scale_words: tuple[Any, ...] = ()
        for trip in ep.unroll(range(self.trips)):
            v = ep.min(ep.thread_idx.x + trip * self.num_threads, self.vectors - 1)
            pieces = (*pieces, ep.load(payload + v * self.piece_words, width=self.piece_words))
            if self.fp8:
                scale_words = (*scale_words, payload[self.vectors * self.piece_words + v // LANES])
            else:
                scale_words = (*scale_words, ep.u32(0))
        targets: tuple[Any, ...] = ()
        for k in ep.unroll(range(self.top_k)):
            word = header[2 * k]
            row = ep.i64(NO_ROW)
            if word != 0xFFFFFFFF:
                expert = ep.i32(word >> 16)
                row = self.row_at(expert, self.local_base(counts, recv_counts, source, my_rank, expert) + ep.i32(word & 0xFFFF))
            targets = (*targets, row)
        for trip in ep.unroll(range(self.trips)):
            v = ep.thread_idx.x + trip * self.num_threads
            if v < self.vectors:
                for k in ep.unroll(range(self.top_k)):
                    if targets[k] >= 0:
                        self.store_piece(rows, scales, targets[k], v, pieces[trip], ep.bitcast(ep.f32, scale_words[trip]))
        for k in ep.unroll(range(self.top_k)):
            if ep.thread_idx.x == k:
                row_of[place * self.top_k + k] = ep.i32(targets[k])
                weight_of[place * self.top_k + k] = ep.bitcast(ep.f32, header[2 * k + 1])

    # ---- combine

    @ep.func
    def gather(self, y: ep.Ptr[ep.u32], row_of: ep.Ptr[ep.i32], weight_of: ep.Ptr[ep.f32], place: ep.i64, v: ep.i32):
        """The weighted sum of a token's rows here, eight f32, in order of selections."""
        rows: tuple[Any, ...] = ()
        weights: tuple[Any, ...] = ()
        for k in ep.unroll(range(self.top_k)):
            row, weight = row_of[place * self.top_k + k], ep.f32(0.0)
            if row >= 0:
                weight = weight_of[place * self.top_k + k]
            rows, weights = (*rows, row), (*weights, weight)
        return weighted_sum(y, rows, weights, self.vectors, v)

    @ep.kernel(max_threads=lambda self: self.num_threads, blocks=lambda self: self.n_blocks)
    def combine(
        self,
        y: ep.Ptr[ep.u32],
        row_of: ep.Ptr[ep.i32],
        weight_of: ep.Ptr[ep.f32],
        source_tokens: ep.Ptr[ep.i32],
        topk_ids: ep.Ptr[ep.i32],
        back: ep.Peers[ep.u32],
        flags: ep.Peers[ep.u64],
        epochs: ep.Ptr[ep.u32],
        out: ep.Ptr[ep.u32],
        my_rank: ep.i32,
    ):
        """out[token] = sum over selections of weight * y[row], bf16, summed in f32 on each rank and then over the ranks in order.

        A peer's sum crosses the link rounded to bf16. y [n_rows, hidden] bf16; row_of, weight_of, source_tokens as the dispatch left them.
        """
        tid, block = ep.thread_idx.x, ep.block_idx.x
        epoch = epochs[block] + 1
        bank = ep.i64(epoch & 1) * self.back_words()
        flag_bank = ep.i32(epoch & 1) * (self.n_ranks * self.n_blocks)
        for step in distances(1, self.n_ranks):
            source = (my_rank + step) % self.n_ranks
            for token in range(block, source_tokens[source], self.n_blocks):
                place = ep.i64(source) * self.max_tokens_per_rank + token
                if self.any_row(row_of, place):
                    target = back[source] + (bank + (ep.i64(my_rank) * self.max_tokens_per_rank + token) * (self.hidden // 2))
                    for trip in ep.unroll(range(self.trips)):
                        v = tid + trip * self.num_threads
                        if v < self.vectors:
                            ep.store(target + v * 4, as_bf16(self.gather(y, row_of, weight_of, place, v)))
        ep.barrier()
        if tid < self.n_ranks:
            # Pairs with the peers' wait below: the barrier orders the block's stores before it.
            ep.store(flags[tid] + (flag_bank + my_rank * self.n_blocks + block), ep.u64(epoch) << 32, order=ep.RELEASE, scope=ep.SYSTEM)
        waited = ep.i1(False)
        for token in range(block, source_tokens[my_rank], self.n_blocks):
            place = ep.i64(my_rank) * self.max_tokens_per_rank + token
            ids = tuple(topk_ids[token * self.top_k + k] for k in range(self.top_k))
            for trip in ep.unroll(range(self.trips)):
                v = tid + trip * self.num_threads
                inside = v < self.vectors
                own = self.gather(y, row_of, weight_of, place, ep.min(v, self.vectors - 1))
                if not waited:
                    self.wait_for_peers(flags[my_rank] + (flag_bank + block), epoch)
                    waited = ep.i1(True)
                total = zeros8()
                for r in range(self.n_ranks):
                    part = zeros8()
                    if r == my_rank:
                        part = own
                    elif goes_to(ids, r, self.n_local_experts):
                        sums = back[my_rank] + (bank + (ep.i64(r) * self.max_tokens_per_rank + token) * (self.hidden // 2))
                        part = eight_floats(ep.load(sums + ep.min(v, self.vectors - 1) * 4, width=4))
                    total = plus8(total, part)
                if inside:
                    ep.store(out + (ep.i64(token) * self.vectors + v) * 4, as_bf16(total))
        if not waited:
            self.wait_for_peers(flags[my_rank] + (flag_bank + block), epoch)
        if tid == 0:
            epochs[block] = epoch

    @ep.func
    def any_row(self, row_of: ep.Ptr[ep.i32], place: ep.i64):
        found = ep.i1(False)
        for k in ep.unroll(range(self.top_k)):
            found = found | (row_of[place * self.top_k + k] >= 0)
        return found

    @ep.func
    def wait_for_peers(self, flags: ep.Ptr[ep.u64], epoch: ep.u32):
        """The whole block waits until the blocks of its number on every rank have sent what they have."""
        if ep.thread_idx.x < self.n_ranks:
            self.wait_for(flags + ep.thread_idx.x * self.n_blocks, epoch)
        ep.barrier()
