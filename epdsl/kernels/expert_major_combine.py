"""How an expert-major combine sums a token's rows, on the rank of the experts and then at the token's source."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import epdsl as ep

from .exchange import GROUP_THREADS, distances, goes_to, selections
from .expert_major_parameters import ExpertMajorParameters
from .rounding import eight_floats
from .weighted_rows import EIGHT, as_bf16, plus8, zeros8

# Rows and pieces of a row whose loads a thread has in flight together.
ROWS = 4
PIECES = 2


@dataclass(frozen=True)
class ExpertMajorCombine(ExpertMajorParameters):
    """Device functions of a group."""

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
