"""Reading rings and merging ranks, on memory written by hand."""

from __future__ import annotations

import numpy as np

from epdsl.kernels.trace import Event, RingTrace
from epdsl.trace import RankTrace, TraceEvent, merge, read_rings


def test_a_ring_keeps_the_last_events_and_counts_the_others() -> None:
    trace = RingTrace(capacity=2, rings_per_block=1)
    words = np.zeros(trace.words(2), np.uint64)
    # Block 5 stamped 3 events: the third lies where the first was.
    words[:6] = [3, 5, 30, Event.SEND_BEGIN << 32 | 7, 20, Event.SEND_END << 32]
    words[6:10] = [1, 6, 25, Event.CONSUME << 32 | 9]
    events, dropped = read_rings(words, trace)
    assert dropped == 1
    assert events == [TraceEvent(20, 3, 0, 5, 0), TraceEvent(25, 20, 9, 6, 1), TraceEvent(30, 2, 7, 5, 0)]


def test_merging_moves_every_rank_to_the_first_ones_clock() -> None:
    first = RankTrace(0, "a", 0.0, 0.0, 0, [TraceEvent(1000, Event.SEND_BEGIN, 0, 0, 0), TraceEvent(3000, Event.SEND_END, 0, 0, 0)])
    second = RankTrace(1, "b", 500.0, 40.0, 2, [TraceEvent(2500, Event.SEND_BEGIN, 0, 3, 3), TraceEvent(4500, Event.SEND_END, 0, 3, 3)])
    document = merge([first, second])
    spans = [(e["pid"], e["tid"], e["ts"], e["dur"]) for e in document["traceEvents"] if e["ph"] == "X"]
    assert spans == [(0, 0, 0.0, 2.0), (1, 3, 1.0, 2.0)]
    assert document["otherData"]["clocks"][1] == {"rank": 1, "offset_ns": 500.0, "uncertainty_ns": 40.0, "events": 2, "dropped": 2}


def test_an_end_without_its_begin_is_left_out() -> None:
    document = merge([RankTrace(0, "a", 0.0, 0.0, 1, [TraceEvent(5, Event.REDUCE_END, 0, 0, 0)])])
    assert [e["ph"] for e in document["traceEvents"]] == ["M"]
