"""How an expert-major dispatch moves a token: to its ranks, and there to the rows of its experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import epdsl as ep

from .blockwise import WIDE_LANES, quantise_wide
from .exchange import GROUP_THREADS, distances, goes_to, selections
from .expert_major_places import ExpertMajorPlaces
from .layout import ceildiv

# Pieces of a token that an expanding thread has in flight.
PIECES_A_TURN = 7


@dataclass(frozen=True)
class ExpertMajorDispatch(ExpertMajorPlaces):
    """Device functions of a sending group or of an expanding warp."""

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
                target = recv[peer] + ep.i64(place) * self.payload_words
                for trip in ep.unroll(range(self.trips)):
                    v = t + trip * GROUP_THREADS
                    if v < self.pieces:
                        ep.store(target + v * 4, pieces[trip])
        return pieces

    @ep.func
    def fill_own_rows(self, pieces, topk_ids, topk_weights, token, t, first, tally, matrix, rows, row_of, weight_of, my_rank):
        """A group: the token that it holds to the rows of this rank's experts. Returns each selection's row, -1 where it is elsewhere."""
        lane = ep.lane_id()
        row = ep.i32(-1)
        if lane < self.top_k:
            first_expert = my_rank * self.n_local_experts
            expert = topk_ids[token * self.top_k + lane] - first_expert
            if expert >= 0 and expert < self.n_local_experts:
                place = matrix[my_rank * (self.n_local_experts + 1) + expert]
                row = place + self.slot_of(first_expert + expert, token - first, tally)
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
    def send_header(self, topk_ids, topk_weights, token, t, first, tally, staged_scales, recv, headers, flags, bank, epoch, my_rank):
        """The first warp of a group, after its barrier: scales and header beside the payload, then the flag, at every other rank."""
        place = (bank * self.n_ranks + my_rank) * self.max_tokens_per_rank + token
        ids = selections(topk_ids, token, self.top_k)
        for step in range(1, self.n_ranks):
            peer = (my_rank + step) % self.n_ranks
            first_expert = peer * self.n_local_experts
            if self.fp8:
                if goes_to(ids, peer, self.n_local_experts):
                    target = recv[peer] + (ep.i64(place) * self.payload_words + 4 * self.pieces)
                    for i in range(t, self.groups // 4, ep.warp_size()):
                        ep.store(target + 4 * i, self.four_scales(staged_scales, i))
            if t < self.top_k:
                expert = topk_ids[token * self.top_k + t] - first_expert
                word = ep.u32(0xFFFFFFFF)
                if expert >= 0 and expert < self.n_local_experts:
                    slot = self.slot_of(first_expert + expert, token - first, tally)
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
            payload = recv + ep.i64(place) * self.payload_words
            self.spread(payload, rows, targets, self.pieces)
            if self.fp8:
                self.spread(payload + 4 * self.pieces, scales, targets, self.groups // 4)

    @ep.func
    def spread(self, source, rows, targets, pieces: int):
        """A warp: `pieces` of 16 bytes to each of some rows of that many."""
        size = ep.target.warp_size
        turn = min(PIECES_A_TURN, ceildiv(pieces, size))
        for first in range(ep.lane_id(), pieces, size * turn):
            # All loads of a turn before the first store, so that they are in flight together.
            found: tuple[Any, ...] = ()
            for i in ep.unroll(range(turn)):
                found = (*found, ep.load(source + ep.min(first + i * size, pieces - 1) * 4, width=4))
            for row in targets:
                # Unsigned: what a lane that has given up would say is no row either.
                if ep.u32(row) < self.max_rows:
                    at = rows + ep.i64(row) * (4 * pieces)
                    for i in ep.unroll(range(turn)):
                        if first + i * size < pieces:
                            ep.store(at + (first + i * size) * 4, found[i], cache="streaming")

    @ep.func
    def expand_all(self, busy, claims, recv, headers, flags, bank, epoch, matrix, rows, scales, row_of, weight_of, my_rank):
        """A warp: tokens of the other ranks, until all are taken.

        busy: how many blocks, the first ones, had tokens to send; claims: how many tokens the launch's warps have claimed
        """
        senders, others = self.send_blocks[0], max(1, self.n_ranks - 1)
        most = ep.i32(0)
        for step in range(1, self.n_ranks):
            most = ep.max(most, self.tokens_of((my_rank + step) % self.n_ranks, matrix))
        units = (most + senders - 1) // senders * senders * (self.n_ranks - 1)
        # A warp of the other blocks has its first without a claim: claimed in the order of asking, a few tokens would go to few blocks.
        free = self.n_blocks - busy
        given = free * (self.num_threads[0] // ep.warp_size())
        unit = ep.thread_idx.x // ep.warp_size() * free + ep.block_idx.x - busy
        if ep.block_idx.x < busy:
            unit = self.claim(claims, given, units)
        # Where the lane that claims has given up a wait, what the others read of it is not defined: the turns are counted.
        turns = ep.i32(0)
        while (ep.u32(unit) < ep.u32(units)) & (turns < units):
            turns += 1
            number, source = unit // others, (my_rank + 1 + unit % others) % self.n_ranks
            n_sent = self.tokens_of(source, matrix)
            run = (n_sent + senders - 1) // senders
            # In the order in which the senders send: the first of every block's run, the second of every block's run, ...
            token = number % senders * run + number // senders
            if number < run * senders and token < n_sent:
                self.expand(source, token, recv, headers, flags, bank, epoch, matrix, rows, scales, row_of, weight_of)
            unit = self.claim(claims, given, units)

    @ep.func
    def claim(self, claims, given: ep.i32, units: ep.i32):
        """A warp: the next of the numbers from `given` to `units` that no warp of the launch has; one past them when there is none."""
        claimed = ep.max(units - given, 0)
        if ep.lane_id() == 0 and given < units:
            # RELAXED: the number is all; pairs with the same in the launch's other warps. The launch before has set it to 0.
            claimed = ep.atomic_add(claims, 1, order=ep.RELAXED, scope=ep.DEVICE)
        return given + ep.shfl(claimed, 0)

    @ep.func
    def tokens_of(self, source: ep.i32, matrix):
        """Tokens that a rank dispatches."""
        return matrix[source * (self.n_local_experts + 1) + self.n_local_experts]
