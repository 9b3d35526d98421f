"""The throughput mode: each token crosses the link once for each destination rank.

dispatch, block b of rank s (its tokens are the b-th of n_blocks equal runs of tokens):
    all threads count how many of the rank's tokens go to each rank, in all and before this block; the totals go to every rank
    the rows of a destination are in order of (source, token), so a token's row is: rows of earlier sources + tokens before it
    then every piece of its tokens is read once and stored to each rank that has one of the token's experts: by 16-byte stores of all
    threads, or without `wide_stores` by thread 0 through shared memory with the bulk copy engine
    when its stores are made the block releases done[s][b] at every rank; block 0 of each rank waits for all of them

combine, block b of rank d (the rows of each source in n_blocks equal runs):
    PUSHERS threads stream rows back to their sources with the bulk copy engine and count what has arrived in progress[d][b], every few rows
    the other warps sum: a token's row here and, when the progress words say so, the rows the other ranks have sent

Reuse of buffers: two banks by the launch's number, as in `low_latency`: a rank ends launch n only after every block of every peer has
released its flag of launch n, so launch n + 2 cannot overwrite what launch n still reads. A dispatched row therefore stays valid until the
second dispatch after it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import epdsl as ep
from epdsl.env import TIMEOUT_NS

from .blockwise import GROUP
from .rounding import floats_of

PUSH_THREADS = 128
STAGE_BYTES = 200 * 1024
SUM_GROUP = 128
VECTORS_A_TURN = 4
PIECES_A_TURN = 4
PUSHERS = 2


@dataclass(frozen=True)
class ThroughputExchange:
    """The kernels of one configuration; equal on every rank.

    hidden               elements of a token; a multiple of 128
    n_experts, n_ranks   rank r has the experts from r * n_experts / n_ranks on
    top_k                selections a token has
    max_tokens_per_rank  most tokens a rank may dispatch at once
    n_blocks             blocks of a launch, all resident at once: the share of the device it takes
    num_threads          threads of a block
    fp8                  whether a dispatched token is e4m3 with its scales (given, not made here); else bf16
    max_stages           most tokens a block has in flight at once
    lag                  how many of them may be on their way out before the next is fetched; 0: half
    wide_stores          move dispatched rows by 16-byte stores of all threads instead of the bulk copy engine
    report_every         rows after which a combine's pusher says how many have arrived
    report_behind        how many of its rows may still be on their way then
    timeout_ns           how long any wait may take
    """

    hidden: int
    n_experts: int
    n_ranks: int
    top_k: int
    max_tokens_per_rank: int
    n_blocks: int
    num_threads: int = 896
    fp8: bool = False
    max_stages: int = 24
    lag: int = 0
    wide_stores: bool = True
    report_every: int = 4
    report_behind: int = 8
    timeout_ns: int = field(default_factory=TIMEOUT_NS.get)

    def __post_init__(self) -> None:
        unit = 4 * GROUP if self.fp8 else GROUP
        if self.hidden < unit or self.hidden % unit:
            raise ValueError(f"hidden={self.hidden} is not a multiple of {unit}, so that a token and its scales are multiples of 16 bytes")
        if self.n_experts % self.n_ranks:
            raise ValueError(f"n_experts={self.n_experts} does not divide among n_ranks={self.n_ranks}")
        if not 1 <= self.top_k <= min(32, self.n_experts):
            raise ValueError(f"top_k={self.top_k} of {self.n_experts} experts; it must be from 1 to {min(32, self.n_experts)}")
        if self.num_threads % SUM_GROUP or not PUSH_THREADS < self.num_threads <= 1024:
            raise ValueError(f"num_threads={self.num_threads}; it must be a multiple of {SUM_GROUP} above {PUSH_THREADS}, at most 1024")
        if self.n_ranks > 8:
            raise ValueError(f"n_ranks={self.n_ranks}; the throughput mode keeps a counter per rank in registers and takes at most 8")
        if self.run > self.num_threads:
            raise ValueError(
                f"{self.max_tokens_per_rank} tokens in {self.n_blocks} blocks are {self.run} a block; "
                f"at most num_threads={self.num_threads}: use more blocks"
            )
        if self.n_stages < 2 or self.back_stages < 2:
            raise ValueError(f"a token of {self.stage_bytes} bytes does not fit often enough into {STAGE_BYTES} bytes of shared memory")

    # ---- sizes

    @property
    def n_local_experts(self) -> int:
        return self.n_experts // self.n_ranks

    @property
    def run(self) -> int:
        """Most tokens a block has."""
        return -(-self.max_tokens_per_rank // self.n_blocks)

    @property
    def payload_bytes(self) -> int:
        return self.hidden if self.fp8 else 2 * self.hidden

    @property
    def scale_bytes(self) -> int:
        return 4 * self.hidden // GROUP if self.fp8 else 0

    @property
    def stage_bytes(self) -> int:
        return -(-(self.payload_bytes + self.scale_bytes) // 128) * 128

    @property
    def n_stages(self) -> int:
        return min(self.max_stages, STAGE_BYTES // self.stage_bytes)

    @property
    def back_stages(self) -> int:
        """Rows each pusher has in flight."""
        return min(self.max_stages, STAGE_BYTES // (2 * self.hidden)) // PUSHERS

    @property
    def max_rows(self) -> int:
        """Rows a rank may receive."""
        return self.n_ranks * self.max_tokens_per_rank

    @property
    def vectors(self) -> int:
        return self.hidden // 8

    @property
    def sum_threads(self) -> int:
        return self.num_threads - PUSH_THREADS

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(range(self.n_ranks))

    def flag_words(self) -> int:
        """u64 words of the done flags: bank, rank, block."""
        return 2 * self.n_ranks * self.n_blocks

    def progress_words(self) -> int:
        """u64 words of the progress flags: bank, rank, block, pusher."""
        return PUSHERS * self.flag_words()

    def count_words(self) -> int:
        """u64 words of the counts: bank, source, destination."""
        return 2 * self.n_ranks * self.n_ranks

    # ---- dispatch

    @ep.func
    def hits(self, topk_ids: ep.Ptr[ep.i32], token: ep.i32, valid: ep.i1):
        """For each rank, 1 where the token goes there."""
        found: tuple[Any, ...] = tuple(ep.i32(0) for _ in self.ranks)
        if valid:
            ids = topk_ids + token * self.top_k
            for k in ep.unroll(range(self.top_k)):
                expert = ep.load(ids + k // 4 * 4, width=4)[k % 4] if self.top_k % 4 == 0 else ids[k]
                found = tuple(
                    ep.select((expert >= r * self.n_local_experts) & (expert < (r + 1) * self.n_local_experts), 1, found[r])
                    for r in self.ranks
                )
        return found

    @ep.func
    def start_stage(self, x: ep.Ptr[ep.u8], x_scales: ep.Ptr[ep.u8], token: ep.i32, stage: ep.i32, stages: Any, full: Any):
        """Thread 0: a token of the input into a stage."""
        bar = ep.MBarrier(full + stage)
        bar.expect(self.payload_bytes + self.scale_bytes)
        at = stages + stage * self.stage_bytes
        ep.bulk_copy(at, x + ep.i64(token) * self.payload_bytes, self.payload_bytes, barrier=bar)
        if self.fp8:
            ep.bulk_copy(at + self.payload_bytes, x_scales + ep.i64(token) * self.scale_bytes, self.scale_bytes, barrier=bar)

    @ep.kernel(max_threads=lambda self: self.num_threads)
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
    ):
        """Every token to the ranks of its experts, once each.

        x [n_tokens, hidden] bf16 or e4m3, x_scales [n_tokens, hidden / 128] f32, topk_ids, topk_weights [n_tokens, top_k]
        recv_x, recv_scales, recv_ids (local expert, -1 elsewhere), recv_weights, recv_token (index at its source): two banks of rows
        row_of [max_tokens, n_ranks]: a token's row at each rank, -1 where it does not go
        sent [2, n_ranks]: where this rank's rows begin at each rank, and how many they are
        rank_rows [n_ranks + 1]: where each source's rows begin, and their number
        """
        stages = ep.shared(ep.u8, 16 if self.wide_stores else self.n_stages * self.stage_bytes)
        full = ep.shared(ep.u64, self.n_stages)
        index = ep.shared(ep.i32, self.run * self.n_ranks)
        before = ep.shared(ep.i32, self.n_ranks)
        totals = ep.shared(ep.i32, self.n_ranks)
        matrix = ep.shared(ep.i32, self.n_ranks * self.n_ranks)
        tid, block = ep.thread_idx.x, ep.block_idx.x
        epoch = epochs[block] + 1
        bank = ep.i32(epoch & 1)
        run = (n_tokens + self.n_blocks - 1) // self.n_blocks
        first = ep.min(block * run, n_tokens)
        last = ep.min(first + run, n_tokens)
        if tid == 0 and not self.wide_stores:
            for s in range(self.n_stages):
                ep.MBarrier(full + s).init(1)
            ep.proxy_fence("shared")
            for token in range(first, ep.min(last, first + self.n_stages)):
                self.start_stage(x, x_scales, token, token - first, stages, full)
        if tid < self.n_ranks:
            before[tid] = 0
            totals[tid] = 0
        ep.barrier()
        self.count_tokens(topk_ids, n_tokens, first, before, totals)
        if block == 0 and tid < self.n_ranks * self.n_ranks:
            word = counts[tid // self.n_ranks] + (bank * self.n_ranks + my_rank) * self.n_ranks + tid % self.n_ranks
            # RELAXED: the word is all that is read; pairs with the wait below on that rank.
            ep.store(word, (ep.u64(epoch) << 32) | ep.u64(totals[tid % self.n_ranks]), order=ep.RELAXED, scope=ep.SYSTEM)
        self.index_tokens(topk_ids, first, last, before, index)
        if tid < self.n_ranks * self.n_ranks:
            found = ep.wait(
                counts[my_rank] + bank * (self.n_ranks * self.n_ranks) + tid,
                until=lambda v: ep.u32(v >> 32) == epoch,
                order=ep.RELAXED,
                scope=ep.SYSTEM,
                timeout_ns=self.timeout_ns,
            )
            matrix[tid] = ep.i32(ep.u32(found))
        ep.barrier()
        base = tuple(self.rows_before(matrix, my_rank, r) for r in self.ranks)
        row_bank = ep.i64(bank) * self.max_rows
        if tid >= PUSH_THREADS:
            self.send_headers(topk_ids, topk_weights, first, last, index, base, recv_ids, recv_weights, recv_token, row_of, row_bank)
        targets = tuple(recv_x[r] for r in self.ranks)
        scale_targets = tuple(recv_scales[r] for r in self.ranks)
        if self.wide_stores:
            self.store_rows(x, self.payload_bytes // 16, first, last, index, base, targets, row_bank, 0, self.ranks)
            if self.fp8:
                self.store_rows(x_scales, self.scale_bytes // 16, first, last, index, base, scale_targets, row_bank, 0, self.ranks)
        elif tid == 0:
            self.stream_out(x, x_scales, first, last, stages, full, index, base, targets, scale_targets, row_bank, my_rank)
        elif tid >= PUSH_THREADS:
            # The copy engine is left to the link.
            for r in self.ranks:
                if r == my_rank:
                    self.store_rows(x, self.payload_bytes // 16, first, last, index, base, targets, row_bank, PUSH_THREADS, (r,))
                    if self.fp8:
                        pieces = self.scale_bytes // 16
                        self.store_rows(x_scales, pieces, first, last, index, base, scale_targets, row_bank, PUSH_THREADS, (r,))
        ep.barrier()
        if tid == 0:
            # One release for all peers, cumulative over the block's stores through the barrier; thread 0's bulk stores are complete.
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
    def count_tokens(self, topk_ids: ep.Ptr[ep.i32], n_tokens: ep.i32, first: ep.i32, before: ep.Ptr[ep.i32], totals: ep.Ptr[ep.i32]):
        """totals[r] = tokens that go to rank r, before[r] = those of them before token `first`. Ends with a barrier."""
        every: tuple[Any, ...] = tuple(ep.i32(0) for _ in self.ranks)
        earlier: tuple[Any, ...] = tuple(ep.i32(0) for _ in self.ranks)
        for token in range(ep.thread_idx.x, n_tokens, self.num_threads):
            hit = self.hits(topk_ids, token, ep.i1(True))
            every = tuple(every[r] + hit[r] for r in self.ranks)
            earlier = tuple(earlier[r] + ep.select(token < first, hit[r], 0) for r in self.ranks)
        for r in self.ranks:
            all_here, early_here = ep.warp_reduce("add", every[r]), ep.warp_reduce("add", earlier[r])
            if ep.lane_id() == 0:
                # RELAXED: the barrier below orders the adds before the reads.
                ep.reduce_add(totals + r, all_here, order=ep.RELAXED, scope=ep.BLOCK)
                ep.reduce_add(before + r, early_here, order=ep.RELAXED, scope=ep.BLOCK)
        ep.barrier()

    @ep.func
    def index_tokens(self, topk_ids: ep.Ptr[ep.i32], first: ep.i32, last: ep.i32, before: ep.Ptr[ep.i32], index: ep.Ptr[ep.i32]):
        """index[j * n_ranks + r] = how many earlier tokens go to rank r, for the block's j-th token; -1 where it does not go there."""
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
                index[tid * self.n_ranks + r] = ep.select(hit[r] != 0, place, -1)

    @ep.func
    def rows_before(self, matrix: ep.Ptr[ep.i32], source: ep.i32, destination: int):
        """Rows of earlier sources at a rank."""
        rows = ep.i32(0)
        for s in range(source):
            rows += matrix[s * self.n_ranks + destination]
        return rows

    @ep.func
    def stream_out(self, x, x_scales, first, last, stages, full, index, base, targets, scale_targets, row_bank, my_rank):
        """Thread 0: the block's tokens, stage by stage, to the other ranks. Returns when the stores are complete."""
        behind = self.lag or self.n_stages // 2
        stage = ep.i32(0)
        phase = ep.i32(0)
        for token in range(first, last):
            ep.MBarrier(full + stage).wait(phase, timeout_ns=self.timeout_ns)
            at = stages + stage * self.stage_bytes
            for r in self.ranks:
                place = index[(token - first) * self.n_ranks + r]
                if place >= 0 and r != my_rank:
                    row = row_bank + (base[r] + place)
                    ep.bulk_copy(targets[r] + row * self.payload_bytes, at, self.payload_bytes)
                    if self.fp8:
                        ep.bulk_copy(scale_targets[r] + row * self.scale_bytes, at + self.payload_bytes, self.scale_bytes)
            ep.bulk_commit()
            # The stage of `behind` tokens ago has been read by now or soon: it takes the token n_stages after that one.
            ep.bulk_wait(behind, read="source")
            again = token - behind + self.n_stages
            if token - first >= behind and again < last:
                reused = stage - behind
                if reused < 0:
                    reused += self.n_stages
                self.start_stage(x, x_scales, again, reused, stages, full)
            stage += 1
            if stage == self.n_stages:
                stage = ep.i32(0)
                phase = phase ^ 1
        ep.bulk_wait(0, read="full")
        # The bulk stores were made by the copy engine; the block's release is of ordinary accesses.
        ep.proxy_fence("global")

    @ep.func
    def send_headers(self, topk_ids, topk_weights, first, last, index, base, recv_ids, recv_weights, recv_token, row_of, row_bank):
        """The threads above PUSH_THREADS: each token's selections and index beside its row, and its rows for the combine."""
        tid = ep.thread_idx.x - PUSH_THREADS
        for r in self.ranks:
            ids, weights, tokens = recv_ids[r], recv_weights[r], recv_token[r]
            for i in range(tid, (last - first) * self.top_k, self.sum_threads):
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
            for j in range(tid, last - first, self.sum_threads):
                place = index[j * self.n_ranks + r]
                row_of[(first + j) * self.n_ranks + r] = ep.select(place >= 0, base[r] + place, -1)

    @ep.func
    def store_rows(self, source, pieces: int, first, last, index, base, targets, row_bank, thread_base: int, ranks: tuple[int, ...]):
        """The threads from `thread_base` on: the block's tokens to some ranks, 16 bytes a thread; each piece is read once."""
        tid = ep.thread_idx.x - thread_base
        threads = self.num_threads - thread_base
        total = (last - first) * pieces
        for begin in range(tid, total, threads * PIECES_A_TURN):
            # All loads of a turn before the first store, so that they are in flight together.
            found: tuple[Any, ...] = ()
            for i in ep.unroll(range(PIECES_A_TURN)):
                at = ep.min(begin + i * threads, total - 1)
                found = (*found, ep.load((source + (ep.i64(first) * pieces + at) * 16).cast(ep.u32), width=4))
            for i in ep.unroll(range(PIECES_A_TURN)):
                at = begin + i * threads
                if at < total:
                    for r in ranks:
                        place = index[at // pieces * self.n_ranks + r]
                        if place >= 0:
                            row = row_bank + (base[r] + place)
                            ep.store((targets[r] + (row * pieces + at % pieces) * 16).cast(ep.u32), found[i])

    # ---- combine

    @ep.kernel(max_threads=lambda self: self.num_threads)
    def combine(
        self,
        y: ep.Ptr[ep.u8],
        rank_rows: ep.Ptr[ep.i32],
        row_token: ep.Ptr[ep.i32],
        row_of: ep.Ptr[ep.i32],
        sent: ep.Ptr[ep.i32],
        n_tokens: ep.i32,
        back: ep.Peers[ep.u8],
        progress: ep.Peers[ep.u64],
        epochs: ep.Ptr[ep.u32],
        out: ep.Ptr[ep.u8],
        my_rank: ep.i32,
    ):
        """out[token] = the sum, in f32 and in order of ranks, of the token's rows on every rank it went to; bf16.

        y [rows, hidden] bf16, in the dispatch's order of rows; rank_rows, row_token, row_of, sent as the dispatch left them
        """
        stages = ep.shared(ep.u8, PUSHERS * self.back_stages * 2 * self.hidden)
        full = ep.shared(ep.u64, PUSHERS * self.back_stages)
        tokens = ep.shared(ep.i32, self.n_ranks * (self.run + 1))
        places = ep.shared(ep.i32, self.run * self.n_ranks)
        tid, block = ep.thread_idx.x, ep.block_idx.x
        epoch = epochs[block] + 1
        bank = ep.i32(epoch & 1)
        run = (n_tokens + self.n_blocks - 1) // self.n_blocks
        first = ep.min(block * run, n_tokens)
        last = ep.min(first + run, n_tokens)
        for i in range(tid, (last - first) * self.n_ranks, self.num_threads):
            places[i] = row_of[first * self.n_ranks + i]
        for step in ep.unroll(range(1, self.n_ranks)):
            source = (my_rank + step) % self.n_ranks
            begin, end = self.rows_of_block(rank_rows, source, block)
            for i in range(tid, end - begin, self.num_threads):
                tokens[step * (self.run + 1) + i] = row_token[begin + i]
        ep.barrier()
        pusher = tid // ep.warp_size()
        if tid % ep.warp_size() == 0 and pusher < PUSHERS:
            own_stages = stages + pusher * (self.back_stages * 2 * self.hidden)
            own_full = full + pusher * self.back_stages
            self.stream_back(y, rank_rows, tokens, own_stages, own_full, back, progress, bank, epoch, my_rank, block, pusher)
        elif tid >= PUSH_THREADS:
            self.sum_up(y, places, sent, first, last, back[my_rank], progress[my_rank], out, bank, epoch, my_rank, block)
        if tid == 0:
            epochs[block] = epoch

    @ep.func
    def rows_of_block(self, rank_rows: ep.Ptr[ep.i32], source: ep.i32, block: ep.i32):
        """The block's share of a source's rows."""
        begin = rank_rows[source]
        rows = rank_rows[source + 1] - begin
        share = (rows + self.n_blocks - 1) // self.n_blocks
        return begin + ep.min(block * share, rows), begin + ep.min((block + 1) * share, rows)

    @ep.func
    def stream_back(self, y, rank_rows, tokens, stages, full, back, progress, bank, epoch, my_rank, block, pusher):
        """One thread, one of PUSHERS: every so-manieth of the block's rows to its source; says now and then how many have arrived."""
        behind = self.lag or self.back_stages // 2
        row_bytes = 2 * self.hidden
        for s in range(self.back_stages):
            ep.MBarrier(full + s).init(1)
        ep.proxy_fence("shared")
        stage, phase = ep.i32(0), ep.i32(0)
        for step in ep.unroll(range(1, self.n_ranks)):
            source = (my_rank + step) % self.n_ranks
            begin, end = self.rows_of_block(rank_rows, source, block)
            rows = (end - begin - pusher + PUSHERS - 1) // PUSHERS
            target = back[source] + (ep.i64(bank) * self.n_ranks + my_rank) * self.max_tokens_per_rank * row_bytes
            word = progress[source] + (((bank * self.n_ranks + my_rank) * self.n_blocks + block) * PUSHERS + pusher)
            for i in range(ep.min(self.back_stages, rows)):
                at = stage + i
                if at >= self.back_stages:
                    at -= self.back_stages
                self.start_row(y, begin + pusher + i * PUSHERS, at, stages, full)
            for i in range(rows):
                ep.MBarrier(full + stage).wait(phase, timeout_ns=self.timeout_ns)
                token = tokens[step * (self.run + 1) + (pusher + i * PUSHERS)]
                ep.bulk_copy(target + ep.i64(token) * row_bytes, stages + stage * row_bytes, row_bytes)
                ep.bulk_commit()
                ep.bulk_wait(behind, read="source")
                again = i - behind + self.back_stages
                if i >= behind and again < rows:
                    reused = stage - behind
                    if reused < 0:
                        reused += self.back_stages
                    self.start_row(y, begin + pusher + again * PUSHERS, reused, stages, full)
                if (i + 1) % self.report_every == 0 and i + 1 > self.report_behind:
                    ep.bulk_wait(self.report_behind, read="full")
                    # The bulk stores were made by the copy engine; the release below is of this thread's ordinary accesses.
                    ep.proxy_fence("global")
                    # Pairs with the waits in sum_up on the source: the rows counted are complete.
                    ep.store(word, (ep.u64(epoch) << 32) | ep.u64(i + 1 - self.report_behind), order=ep.RELEASE, scope=ep.SYSTEM)
                stage += 1
                if stage == self.back_stages:
                    stage = ep.i32(0)
                    phase = phase ^ 1
            ep.bulk_wait(0, read="full")
            ep.proxy_fence("global")
            # As above; it is also the flag by which a rank knows that this launch of the peer has begun and ended its sends.
            ep.store(word, (ep.u64(epoch) << 32) | 0xFFFFFFFF, order=ep.RELEASE, scope=ep.SYSTEM)

    @ep.func
    def start_row(self, y: ep.Ptr[ep.u8], row: ep.i32, stage: ep.i32, stages: Any, full: Any):
        """Thread 0: a row of y into a stage."""
        bar = ep.MBarrier(full + stage)
        bar.expect(2 * self.hidden)
        ep.bulk_copy(stages + stage * (2 * self.hidden), y + ep.i64(row) * (2 * self.hidden), 2 * self.hidden, barrier=bar)

    @ep.func
    def sum_up(self, y, places, sent, first, last, back, progress, out, bank, epoch, my_rank, block):
        """A group of SUM_GROUP threads: every so-manieth token of the block's run. The groups do not wait for each other."""
        g = (ep.thread_idx.x - PUSH_THREADS) // SUM_GROUP
        tid = ep.thread_idx.x % SUM_GROUP
        bank_rows = ep.i64(bank) * self.n_ranks * self.max_tokens_per_rank
        words = progress + bank * (self.n_ranks * self.n_blocks * PUSHERS)
        shares = tuple((sent[self.n_ranks + r] + self.n_blocks - 1) // self.n_blocks for r in self.ranks)
        starts = tuple(sent[r] for r in self.ranks)
        for token in range(first + g, last, self.sum_threads // SUM_GROUP):
            rows = tuple(places[(token - first) * self.n_ranks + r] for r in self.ranks)
            for r in self.ranks:
                if tid == r and r != my_rank and rows[r] >= 0:
                    place = rows[r] - starts[r]
                    within = place % shares[r]
                    word = (r * self.n_blocks + place // shares[r]) * PUSHERS + within % PUSHERS
                    self.wait_for_more(words + word, ep.u32(within // PUSHERS), epoch)
            ep.named_barrier(1 + g, SUM_GROUP)
            sources: tuple[Any, ...] = ()
            for r in self.ranks:
                source = back + (bank_rows + ep.i64(r) * self.max_tokens_per_rank + token) * (2 * self.hidden)
                if r == my_rank:
                    source = y + ep.i64(rows[r]) * (2 * self.hidden)
                sources = (*sources, source.cast(ep.u32))
            target = (out + ep.i64(token) * (2 * self.hidden)).cast(ep.u32)
            for v in range(tid, self.vectors, SUM_GROUP * VECTORS_A_TURN):
                # All loads of a turn before the first sum, so that they are in flight together.
                pieces: tuple[Any, ...] = ()
                for i in ep.unroll(range(VECTORS_A_TURN)):
                    at = ep.min(v + i * SUM_GROUP, self.vectors - 1)
                    for r in self.ranks:
                        piece = ep.vec(ep.u32, 4)(ep.u32(0))
                        if rows[r] >= 0:
                            piece = ep.load(sources[r] + at * 4, width=4)
                        pieces = (*pieces, piece)
                for i in ep.unroll(range(VECTORS_A_TURN)):
                    if v + i * SUM_GROUP < self.vectors:
                        parts = pieces[i * self.n_ranks : (i + 1) * self.n_ranks]
                        ep.store(target + (v + i * SUM_GROUP) * 4, self.total(parts))
        # The launch ends when every peer's block of this number has sent all: what it writes next goes to the other bank.
        if g == 0:
            if tid < self.n_ranks * PUSHERS:
                if tid // PUSHERS != my_rank:
                    word = (tid // PUSHERS * self.n_blocks + block) * PUSHERS + tid % PUSHERS
                    self.wait_for_more(words + word, ep.u32(0xFFFFFFFE), epoch)

    @ep.func
    def wait_for_more(self, word: ep.Ptr[ep.u64], rows: ep.u32, epoch: ep.u32):
        """Waits until a peer's block has sent more than `rows` rows in this launch. Pairs with the releases in stream_back."""
        ep.wait(
            word,
            until=lambda v: (ep.u32(v >> 32) == epoch) & (ep.u32(v) > rows),
            order=ep.ACQUIRE,
            scope=ep.SYSTEM,
            timeout_ns=self.timeout_ns,
        )

    @ep.func
    def total(self, parts: Any):
        """Eight sums of bf16 in four words, added in f32 in the order given."""
        words: tuple[Any, ...] = ()
        for i in ep.unroll(range(4)):
            low, high = ep.f32(0.0), ep.f32(0.0)
            for part in parts:
                a, b = floats_of(part[i])
                low, high = low + a, high + b
            words = (*words, ep.u32(ep.bitcast(ep.u16, ep.bf16(low))) | (ep.u32(ep.bitcast(ep.u16, ep.bf16(high))) << 16))
        return ep.vec(ep.u32, 4)(words[0], words[1], words[2], words[3])
