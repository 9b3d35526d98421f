"""A word sent to every rank and back, stamped with both clocks."""

from __future__ import annotations

import epdsl as ep

from .layout import DEFAULT_TIMEOUT_NS


@ep.kernel
def clock_handshake(words: ep.Peers[ep.u64], stamps: ep.Ptr[ep.u64], me: ep.i32, rounds: ep.i32):
    """stamps [n_ranks, rounds, 2]: on rank 0 row r the times before and after each trip to r; on rank r row r its own time, first of two.

    One thread of each rank works; words start at 0.
    """
    if ep.thread_idx.x == 0:
        if me == 0:
            for r in range(1, words.size):
                for i in range(rounds):
                    place = stamps + 2 * (r * rounds + i)
                    turn = ep.u64(i + 1)
                    place[0] = ep.globaltimer()
                    # Relaxed both ways: the word is all that travels.
                    ep.store(words[r], turn, order=ep.RELAXED, scope=ep.SYSTEM)
                    ep.wait(
                        words[0] + r,
                        until=lambda v: v == turn,  # noqa: B023
                        order=ep.RELAXED,
                        scope=ep.SYSTEM,
                        timeout_ns=DEFAULT_TIMEOUT_NS,
                    )
                    place[1] = ep.globaltimer()
        else:
            for i in range(rounds):
                turn = ep.u64(i + 1)
                ep.wait(words[me], until=lambda v: v == turn, order=ep.RELAXED, scope=ep.SYSTEM, timeout_ns=DEFAULT_TIMEOUT_NS)  # noqa: B023
                stamps[2 * (me * rounds + i)] = ep.globaltimer()
                ep.store(words[0] + me, turn, order=ep.RELAXED, scope=ep.SYSTEM)
