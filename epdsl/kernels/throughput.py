"""The throughput mode: each token crosses the link once for each destination rank.

dispatch, block b of rank s:
    all threads count how many of the rank's tokens go to each rank, in all, and block 0 tells every rank
    the first blocks send rows to the other ranks, the rest keep the rank's own rows; the totals say how many, and where one of the two is
    little work every block does both (`share`). A block's tokens are one of as many equal runs of tokens as its role has blocks
    the rows of a destination are in order of (source, token), so a token's row is: rows of earlier sources + tokens before it
    then every piece of its tokens is read once and stored, 16 bytes a thread, to each rank that it serves and that the token goes to
    when its stores are made the block releases done[s][b] at every rank; block 0 of each rank waits for all of them

combine
    the first blocks send rows back to their sources, a row for each group of 128 threads, and release a flag for each
    the other blocks sum: a token's row here and, when their flags say so, the rows that the other ranks have sent

Reuse of buffers: the flags, the counts and the combine's rows have two banks by the launch's number: a rank ends launch n only after every
peer has begun it (`launch_order`; in the dispatch the done flags say so), so launch n + 2 cannot overwrite what launch n still reads. The
bank of a dispatch's rows is named by the launch, so that a captured dispatch fills the same rows at every replay: a rank stores rows only
after it has acquired every peer's counts of this launch, which a peer releases once its stream has done with what came before. Launches
that take turns leave a row valid until the second dispatch after it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import epdsl as ep
from epdsl.env import TIMEOUT_NS

from .blockwise import GROUP
from .exchange import GROUP_THREADS, check_experts, check_groups, check_hidden, check_roles, goes_to, selections
from .launch_order import begin_launch, end_launch
from .rounding import eight_floats
from .weighted_rows import as_bf16, plus8, zeros8

# Pieces of 16 bytes that a thread of the dispatch, and of an adder in the combine, has in flight: as many as its registers hold.
PIECES_A_TURN = 4
SUMMED_A_TURN = 8
# A row that crosses the link takes a block as long as so many kept ones.
LINK_WEIGHT = 2


@dataclass(frozen=True)
class ThroughputExchange:
    """The kernels of the throughput mode, for one configuration; equal on every rank.

    hidden               elements of a token; a multiple of 128
    n_experts, n_ranks   rank r has the experts from r * n_experts / n_ranks on
    top_k                selections a token has
    max_tokens_per_rank  most tokens a rank may dispatch at once
    n_blocks             blocks of a launch, all resident at once: the share of the device it takes
    num_threads          threads of a block
    fp8                  whether a dispatched token is e4m3 with its scales (given, not made here); else bf16
    send_blocks          blocks of a combine that send; the others sum
    timeout_ns           how long any wait may take
    """

    hidden: int
    n_experts: int
    n_ranks: int
    top_k: int
    max_tokens_per_rank: int
    n_blocks: int
    num_threads: int = 1024
    fp8: bool = False
    send_blocks: int = 13
    timeout_ns: int = field(default_factory=TIMEOUT_NS.get)

    def __post_init__(self) -> None:
        check_hidden(self.hidden, self.fp8)
        check_experts(self.n_experts, self.n_ranks, self.top_k)
        check_groups(self.num_threads)
        check_roles("combine", self.send_blocks, self.n_blocks)
        if self.n_ranks > 8:
            raise ValueError(f"n_ranks={self.n_ranks}; the throughput mode keeps a counter per rank in registers and takes at most 8")
        run = -(-self.max_tokens_per_rank // self.n_blocks)
        if run > self.num_threads:
            raise ValueError(
                f"{self.max_tokens_per_rank} tokens in {self.n_blocks} blocks are {run} a block; "
                f"at most num_threads={self.num_threads}: use more blocks"
            )

    # ---- sizes

    @property
    def n_local_experts(self) -> int:
        return self.n_experts // self.n_ranks

    @property
    def run(self) -> int:
        """Most tokens a block has: one a thread when it indexes them."""
        return min(self.max_tokens_per_rank, self.num_threads)

    @property
    def payload_bytes(self) -> int:
        return self.hidden if self.fp8 else 2 * self.hidden

    @property
    def scale_bytes(self) -> int:
        return 4 * self.hidden // GROUP if self.fp8 else 0

    @property
    def max_rows(self) -> int:
        """Rows a rank may receive."""
        return self.n_ranks * self.max_tokens_per_rank

    @property
    def vectors(self) -> int:
        return self.hidden // 8

    @property
    def n_groups(self) -> int:
        return self.num_threads // GROUP_THREADS

    @property
    def trips(self) -> int:
        """How often a group's threads go over a row."""
        return -(-self.vectors // GROUP_THREADS)

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(range(self.n_ranks))

    @property
    def pieces_a_turn(self) -> int:
        """Pieces a thread of the dispatch reads in a turn; each rank's place and pointer take registers too."""
        return PIECES_A_TURN - self.n_ranks // 4

    @property
    def vectors_a_turn(self) -> int:
        """Pieces of a token that an adder sums in a turn, each of them read from every rank."""
        return max(1, min(4, SUMMED_A_TURN // self.n_ranks))

    def flag_words(self) -> int:
        """u64 words of the done flags: bank, rank, block."""
        return 2 * self.n_ranks * self.n_blocks

    def count_words(self) -> int:
        """u64 words of the counts: bank, source, destination."""
        return 2 * self.n_ranks * self.n_ranks

    # ---- dispatch

    @ep.func
    def hits(self, topk_ids: ep.Ptr[ep.i32], token: ep.i32, valid: ep.i1):
        """For each rank, 1 where the token goes there."""
        found: tuple[Any, ...] = tuple(ep.i32(0) for _ in self.ranks)
        if valid:
            ids = selections(topk_ids, token, self.top_k)
            found = tuple(ep.i32(goes_to(ids, ep.i32(r), self.n_local_experts)) for r in self.ranks)
        return found

    @ep.kernel(max_threads=lambda self: self.num_threads, blocks=lambda self: self.n_blocks)
    def dispatch(
        self,
        x: ep.Ptr[ep.u8],
        x_scales: ep.Ptr[ep.u8],
        topk_ids: ep.Ptr[ep.i32],
        topk_weights: ep.Ptr[ep.f32],
        n_tokens: ep.i32,
        recv_x: ep.Peers[ep.u8],
        recv_scales: ep.Peers[ep.u8],
        recv_ids: ep.Peers[ep.i32],
        recv_weights: ep.Peers[ep.f32],
        recv_token: ep.Peers[ep.i32],
        counts: ep.Peers[ep.u64],
        done: ep.Peers[ep.u64],
        epochs: ep.Ptr[ep.u32],
        row_of: ep.Ptr[ep.i32],
        sent: ep.Ptr[ep.i32],
        rank_rows: ep.Ptr[ep.i32],
        my_rank: ep.i32,
        rows_bank: ep.i32,
    ):
        """Every token to the ranks of its experts, once each.

        x [n_tokens, hidden] bf16 or e4m3, x_scales [n_tokens, hidden / 128] f32, topk_ids, topk_weights [n_tokens, top_k]
        recv_x, recv_scales, recv_ids (local expert, -1 elsewhere), recv_weights, recv_token (index at its source): two banks of rows
        row_of [max_tokens, n_ranks]: a token's row at each rank, -1 where it does not go
        sent [2, n_ranks]: where this rank's rows begin at each rank, and how many they are
        rank_rows [n_ranks + 1]: where each source's rows begin, and their number
        rows_bank: the bank of rows this launch fills at every rank; equal on all of them
        """
        index = ep.shared(ep.i32, self.run * self.n_ranks)
        before = ep.shared(ep.i32, self.n_ranks)
        totals = ep.shared(ep.i32, self.n_ranks)
        matrix = ep.shared(ep.i32, self.n_ranks * self.n_ranks)
        tid, block = ep.thread_idx.x, ep.block_idx.x
        epoch = epochs[block] + 1
        bank = ep.i32(epoch & 1)
        if tid < self.n_ranks:
            before[tid] = 0
            totals[tid] = 0
        ep.barrier()
        self.count_tokens(topk_ids, n_tokens, totals)
        ep.barrier()
        if block == 0 and tid < self.n_ranks * self.n_ranks:
            word = counts[tid // self.n_ranks] + (bank * self.n_ranks + my_rank) * self.n_ranks + tid % self.n_ranks
            # RELEASE: what this rank's stream did before is over, so the peers may fill its rows. Pairs with the wait below on that rank.
            ep.store(word, (ep.u64(epoch) << 32) | ep.u64(totals[tid % self.n_ranks]), order=ep.RELEASE, scope=ep.SYSTEM)
        first, last, served = self.share(block, n_tokens, totals, my_rank)
        self.count_tokens(topk_ids, first, before)
        self.index_tokens(topk_ids, first, last, served, before, index)
        if tid < self.n_ranks * self.n_ranks:
            # A thread that gives up leaves the others of its block no row out of bounds.
            matrix[tid] = 0
            found = ep.wait(
                counts[my_rank] + bank * (self.n_ranks * self.n_ranks) + tid,
                until=lambda v: ep.u32(v >> 32) == epoch,
                order=ep.ACQUIRE,
                scope=ep.SYSTEM,
                timeout_ns=self.timeout_ns,
            )
            count = ep.i32(ep.u32(found))
            ep.device_assert(
                (count >= 0) & (count <= self.max_tokens_per_rank),
                "dispatch: {} tokens are said to go from rank {} to rank {}",
                count,
                tid // self.n_ranks,
                tid % self.n_ranks,
            )
            matrix[tid] = count
        ep.barrier()
        base = tuple(self.rows_before(matrix, my_rank, r) for r in self.ranks)
        row_bank = ep.i64(rows_bank) * self.max_rows
        self.send_headers(topk_ids, topk_weights, first, last, served, index, base, recv_ids, recv_weights, recv_token, row_of, row_bank)
        self.store_rows(x, self.payload_bytes // 16, first, last, index, base, tuple(recv_x[r] for r in self.ranks), row_bank)
        if self.fp8:
            scale_targets = tuple(recv_scales[r] for r in self.ranks)
            self.store_rows(x_scales, self.scale_bytes // 16, first, last, index, base, scale_targets, row_bank)
        ep.barrier()
        if tid == 0:
            # One release for all peers, cumulative over the block's stores through the barrier.
            # With the relaxed stores it pairs with block 0's waits on each rank.
            ep.fence(order=ep.RELEASE, scope=ep.SYSTEM)
            for r in self.ranks:
                ep.store(
                    done[r] + ((bank * self.n_ranks + my_rank) * self.n_blocks + block), ep.u64(epoch), order=ep.RELAXED, scope=ep.SYSTEM
                )
            epochs[block] = epoch
        if block == 0:
            for i in range(tid, self.n_ranks * self.n_blocks, self.num_threads):
                ep.wait(
                    done[my_rank] + bank * (self.n_ranks * self.n_blocks) + i,
                    until=lambda v: ep.u32(v) == epoch,
                    order=ep.ACQUIRE,
                    scope=ep.SYSTEM,
                    timeout_ns=self.timeout_ns,
                )
            if tid <= self.n_ranks:
                rows = ep.i32(0)
                for s in range(tid):
                    rows += matrix[s * self.n_ranks + my_rank]
                rank_rows[tid] = rows
            for r in self.ranks:
                if tid == r:
                    sent[r] = base[r]
                    sent[self.n_ranks + r] = totals[r]

    @ep.func
    def count_tokens(self, topk_ids: ep.Ptr[ep.i32], n_tokens: ep.i32, counts: ep.Ptr[ep.i32]):
        """counts[r] += how many of the first n_tokens go to rank r, after the block's next barrier."""
        found: tuple[Any, ...] = tuple(ep.i32(0) for _ in self.ranks)
        for token in range(ep.thread_idx.x, n_tokens, self.num_threads):
            hit = self.hits(topk_ids, token, ep.i1(True))
            found = tuple(found[r] + hit[r] for r in self.ranks)
        for r in self.ranks:
            of_warp = ep.warp_reduce("add", found[r])
            if ep.lane_id() == 0:
                # RELAXED: the barrier orders the adds before the reads.
                ep.reduce_add(counts + r, of_warp, order=ep.RELAXED, scope=ep.BLOCK)

    @ep.func
    def share(self, block: ep.i32, n_tokens: ep.i32, totals: ep.Ptr[ep.i32], my_rank: ep.i32):
        """A block's part: its first token, the one after its last, and for each rank whether the block stores the rows that go there.

        totals: how many of the rank's tokens go to each rank
        """
        own, far = totals[my_rank], ep.i32(0)
        for r in self.ranks:
            far += ep.select(my_rank == r, 0, totals[r])
        # Either role reads all tokens: kept apart only where each has a row for at least every other one.
        least = (n_tokens + self.num_threads - 1) // self.num_threads
        apart = (2 * own > n_tokens) & (2 * far > n_tokens) & (2 * least <= self.n_blocks)
        keeping, sending = n_tokens + own, 2 * LINK_WEIGHT * far
        every = ep.max(keeping + sending, 1)
        keepers = ep.max(least, ep.min((self.n_blocks * keeping + every // 2) // every, self.n_blocks - least))
        keepers = ep.select(apart, keepers, self.n_blocks)
        senders = ep.select(apart, self.n_blocks - keepers, self.n_blocks)
        sends, keeps = block < senders, block >= self.n_blocks - keepers
        run = (n_tokens + ep.select(sends, senders, keepers) - 1) // ep.select(sends, senders, keepers)
        first = ep.min(ep.select(sends, block, block - senders) * run, n_tokens)
        return first, ep.min(first + run, n_tokens), tuple(ep.select(my_rank == r, keeps, sends) for r in self.ranks)

    @ep.func
    def index_tokens(self, topk_ids, first: ep.i32, last: ep.i32, served, before: ep.Ptr[ep.i32], index: ep.Ptr[ep.i32]):
        """index[j * n_ranks + r] = how many earlier tokens go to rank r, for the block's j-th token; -1 where it stores no row of it.

        Has a barrier after which it reads `before`.
        """
        warps = self.num_threads // ep.warp_size()
        sums = ep.shared(ep.i32, self.n_ranks * warps)
        tid = ep.thread_idx.x
        hit = self.hits(topk_ids, first + tid, first + tid < last)
        below = (ep.u64(1) << ep.u64(ep.lane_id())) - 1
        ranks_before: tuple[Any, ...] = ()
        for r in self.ranks:
            votes = ep.ballot(hit[r] != 0)
            ranks_before = (*ranks_before, ep.i32(ep.popcount(votes & below)))
            if ep.lane_id() == 0:
                sums[r * warps + ep.warp_id()] = ep.i32(ep.popcount(votes))
        ep.barrier()
        if first + tid < last:
            for r in self.ranks:
                place = before[r] + ranks_before[r]
                for w in range(ep.warp_id()):
                    place += sums[r * warps + w]
                index[tid * self.n_ranks + r] = ep.select((hit[r] != 0) & served[r], place, -1)

    @ep.func
    def rows_before(self, matrix: ep.Ptr[ep.i32], source: ep.i32, destination: int):
        """Rows of earlier sources at a rank."""
        rows = ep.i32(0)
        for s in range(source):
            rows += matrix[s * self.n_ranks + destination]
        return rows

    @ep.func
    def send_headers(self, topk_ids, topk_weights, first, last, served, index, base, recv_ids, recv_weights, recv_token, row_of, row_bank):
        """Each token's selections and index beside its row, and its rows for the combine."""
        tid = ep.thread_idx.x
        for r in self.ranks:
            ids, weights, tokens = recv_ids[r], recv_weights[r], recv_token[r]
            for i in range(tid, (last - first) * self.top_k, self.num_threads):
                j, k = i // self.top_k, i % self.top_k
                place = index[j * self.n_ranks + r]
                if place >= 0:
                    row = row_bank + (base[r] + place)
                    expert = topk_ids[(first + j) * self.top_k + k] - r * self.n_local_experts
                    here = (expert >= 0) & (expert < self.n_local_experts)
                    ids[row * self.top_k + k] = ep.select(here, expert, -1)
                    weights[row * self.top_k + k] = topk_weights[(first + j) * self.top_k + k]
                    if k == 0:
                        tokens[row] = first + j
            if served[r] and first + tid < last:
                place = index[tid * self.n_ranks + r]
                row_of[(first + tid) * self.n_ranks + r] = ep.select(place >= 0, base[r] + place, -1)

    @ep.func
    def store_rows(self, source, pieces: int, first, last, index, base, targets, row_bank):
        """The block's tokens to their ranks, 16 bytes a thread; each piece is read once."""
        total = (last - first) * pieces
        stride = self.num_threads * self.pieces_a_turn
        if total > 0:
            found = self.load_pieces(source, first, pieces, ep.thread_idx.x, total)
            for begin in range(ep.thread_idx.x, total, stride):
                now = found
                # The next turn's loads are in flight while this turn's pieces are stored.
                found = self.load_pieces(source, first, pieces, begin + stride, total)
                for i in ep.unroll(range(self.pieces_a_turn)):
                    at = begin + i * self.num_threads
                    if at < total:
                        for r in self.ranks:
                            place = index[at // pieces * self.n_ranks + r]
                            if place >= 0:
                                row = row_bank + (base[r] + place)
                                ep.store((targets[r] + (row * pieces + at % pieces) * 16).cast(ep.u32), now[i])

    @ep.func
    def load_pieces(self, source, first, pieces: int, begin, total):
        """A thread's pieces of one turn of store_rows; past the end the last one."""
        found: tuple[Any, ...] = ()
        for i in ep.unroll(range(self.pieces_a_turn)):
            at = ep.min(begin + i * self.num_threads, total - 1)
            found = (*found, ep.load((source + (ep.i64(first) * pieces + at) * 16).cast(ep.u32), width=4))
        return found

    # ---- combine

    @ep.kernel(max_threads=lambda self: self.num_threads, blocks=lambda self: self.n_blocks)
    def combine(
        self,
        y: ep.Ptr[ep.u32],
        rank_rows: ep.Ptr[ep.i32],
        row_token: ep.Ptr[ep.i32],
        row_of: ep.Ptr[ep.i32],
        n_tokens: ep.i32,
        back: ep.Peers[ep.u32],
        flags: ep.Peers[ep.u32],
        begun: ep.Peers[ep.u32],
        epochs: ep.Ptr[ep.u32],
        out: ep.Ptr[ep.u32],
        my_rank: ep.i32,
    ):
        """out[token] = the sum, in f32 and in order of ranks, of the token's rows on every rank it went to; bf16.

        y [rows, hidden] bf16, in the dispatch's order of rows; rank_rows, row_token, row_of as the dispatch left them
        """
        tid, block = ep.thread_idx.x, ep.block_idx.x
        group, t = tid // GROUP_THREADS, tid % GROUP_THREADS
        epoch = epochs[block] + 1
        bank = ep.i64(epoch & 1)
        begin_launch(begun, epoch, my_rank)
        # Every thread has read the launch's number before the first that is done writes it.
        ep.barrier()
        if block < self.send_blocks:
            worker = group * self.send_blocks + block
            for step in ep.unroll(range(1, self.n_ranks)):
                source = (my_rank + step) % self.n_ranks
                for row in range(rank_rows[source] + worker, rank_rows[source + 1], self.send_blocks * self.n_groups):
                    place = (bank * self.n_ranks + my_rank) * self.max_tokens_per_rank + row_token[row]
                    target = back[source] + place * (self.vectors * 4)
                    pieces: tuple[Any, ...] = ()
                    for trip in ep.unroll(range(self.trips)):
                        v = ep.min(t + trip * GROUP_THREADS, self.vectors - 1)
                        pieces = (*pieces, ep.load(y + (ep.i64(row) * self.vectors + v) * 4, width=4))
                    for trip in ep.unroll(range(self.trips)):
                        v = t + trip * GROUP_THREADS
                        if v < self.vectors:
                            ep.store(target + v * 4, pieces[trip])
                    ep.named_barrier(1 + group, GROUP_THREADS)
                    if t == 0:
                        # Cumulative over the group's stores through its barrier; pairs with the wait below on that rank.
                        ep.store(flags[source] + place, epoch, order=ep.RELEASE, scope=ep.SYSTEM)
        else:
            adders = self.n_blocks - self.send_blocks
            for token in range(group * adders + block - self.send_blocks, n_tokens, self.n_groups * adders):
                place = bank * self.n_ranks * self.max_tokens_per_rank + token
                rows = tuple(row_of[token * self.n_ranks + r] for r in self.ranks)
                for r in self.ranks:
                    if t == r and r != my_rank and rows[r] >= 0:
                        # Pairs with the release above on that rank; the group's barrier hands it on.
                        ep.wait(
                            flags[my_rank] + (place + r * self.max_tokens_per_rank),
                            until=lambda v: v == epoch,
                            order=ep.ACQUIRE,
                            scope=ep.SYSTEM,
                            timeout_ns=self.timeout_ns,
                        )
                ep.named_barrier(1 + group, GROUP_THREADS)
                sources: tuple[Any, ...] = ()
                for r in self.ranks:
                    source = back[my_rank] + (place + r * self.max_tokens_per_rank) * (self.vectors * 4)
                    if r == my_rank:
                        source = y + ep.i64(rows[r]) * (self.vectors * 4)
                    sources = (*sources, source)
                target = out + ep.i64(token) * (self.vectors * 4)
                for done in ep.unroll(range(0, self.trips, self.vectors_a_turn)):
                    v = t + done * GROUP_THREADS
                    width = min(self.vectors_a_turn, self.trips - done)
                    # All loads of a turn before the first sum, so that they are in flight together.
                    found: tuple[Any, ...] = ()
                    for i in ep.unroll(range(width)):
                        at = ep.min(v + i * GROUP_THREADS, self.vectors - 1)
                        for r in self.ranks:
                            piece = ep.vec(ep.u32, 4)(ep.u32(0))
                            if rows[r] >= 0:
                                piece = ep.load(sources[r] + at * 4, width=4)
                            found = (*found, piece)
                    for i in ep.unroll(range(width)):
                        if v + i * GROUP_THREADS < self.vectors:
                            total = zeros8()
                            for r in self.ranks:
                                total = plus8(total, eight_floats(found[i * self.n_ranks + r]))
                            ep.store(target + (v + i * GROUP_THREADS) * 4, as_bf16(total))
        end_launch(begun, epoch, my_rank, self.timeout_ns)
        if tid == 0:
            epochs[block] = epoch
