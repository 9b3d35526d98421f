"""Events of all ranks in one file for ui.perfetto.dev: reading rings, comparing the ranks' clocks, merging.

A rank's file holds its events by its own clock and how its clock differs from rank 0's; `merge` makes one time line of several.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .kernels.trace import NAMES, Event, RingTrace

if TYPE_CHECKING:
    from epdsl_runtime.rank import Rank

ROUNDS = 32
_NAMES = {int(event): name for event, name in NAMES.items()}


@dataclass(frozen=True)
class TraceEvent:
    """time in ns of the rank's clock; block and ring it was stamped by."""

    time: int
    event: int
    argument: int
    block: int
    ring: int


@dataclass(frozen=True)
class RankTrace:
    """One rank's events.

    offset_ns       its clock minus rank 0's, as the handshake found it
    uncertainty_ns  half the shortest round trip: the offset may be wrong by as much
    dropped         events that were overwritten by later ones
    """

    rank: int
    device: str
    offset_ns: float
    uncertainty_ns: float
    dropped: int
    events: list[TraceEvent] = field(default_factory=list[TraceEvent])


def read_rings(words: NDArray[np.uint64], trace: RingTrace) -> tuple[list[TraceEvent], int]:
    """The events in a kernel's trace memory in order of time, and how many were overwritten."""
    events: list[TraceEvent] = []
    dropped = 0
    for ring, memory in enumerate(words.reshape(-1, trace.ring_words).tolist()):
        count, block = memory[0], memory[1]
        kept = min(count, trace.capacity)
        dropped += count - kept
        for i in range(kept):
            time, word = memory[2 + 2 * i], memory[3 + 2 * i]
            events.append(TraceEvent(time, word >> 32, word & 0xFFFFFFFF, block, ring))
    return sorted(events, key=lambda e: e.time), dropped


def compare_clocks(rank: Rank, rounds: int = ROUNDS) -> tuple[float, float]:
    """Collective: this rank's device clock minus rank 0's in ns, and half the shortest round trip.

    Rank 0 sends a word to each rank and back `rounds` times. With t0 and t2 rank 0's times before and after and t1 the other's in
    between, t1 - (t0 + t2) / 2 is the offset, wrong by at most (t2 - t0) / 2; the shortest trip counts.
    """
    from .kernels.clock import clock_handshake

    words = rank.symmetric("u64", max(2, rank.size), "clock handshake")
    stamps = rank.zeros("u64", (rank.size, rounds, 2))
    rank.barrier()
    clock_handshake.launch(rank, grid=1, block=64, args=(words.peers, stamps, rank.index, rounds), cooperative=True)
    mine = stamps.numpy()
    every = rank.allgather(mine[:, :, :].astype(np.int64).tolist())
    rank.release(words)
    if rank.index == 0:
        return 0.0, 0.0
    sent = np.array(every[0][rank.index], np.int64)
    middle = np.array(every[rank.index][rank.index], np.int64)[:, 0]
    trip = sent[:, 1] - sent[:, 0]
    best = int(np.argmin(trip))
    # Differences first: a clock in ns does not fit a double's mantissa.
    offset = int(middle[best] - sent[best, 0]) - float(trip[best]) / 2
    return offset, float(trip[best]) / 2


def write_rank(path: Path, trace: RankTrace) -> None:
    path.write_text(json.dumps(asdict(trace)))


def read_rank(path: Path) -> RankTrace:
    """Raises ValueError for a file that holds no rank's events."""
    try:
        data = json.loads(path.read_text())
        return RankTrace(**{**data, "events": [TraceEvent(**e) for e in data["events"]]})
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} holds no rank's events: {error}") from None


def merge(traces: Sequence[RankTrace]) -> dict[str, Any]:
    """One Perfetto document: a process a rank, a thread a block, times in microseconds from the first event, by rank 0's clock."""
    placed = {t.rank: [(e, e.time - round(t.offset_ns)) for e in t.events] for t in traces}
    start = min((time for events in placed.values() for _, time in events), default=0)
    rows: list[dict[str, Any]] = []
    for trace in traces:
        rows.append({"ph": "M", "name": "process_name", "pid": trace.rank, "args": {"name": f"rank {trace.rank} ({trace.device})"}})
        open_at: dict[tuple[int, int], float] = {}
        for event, time in placed[trace.rank]:
            at = (time - start) / 1e3
            where = {"pid": trace.rank, "tid": event.block}
            base = event.event & ~1
            name = _NAMES.get(base, f"event {event.event}")
            if event.event in (Event.L1_RELEASE, Event.CONSUME):
                rows.append({"ph": "i", "s": "t", "name": name, "ts": at, **where, "args": {"block": event.argument}})
            elif event.event & 1:
                begun = open_at.pop((event.ring, base), None)
                if begun is not None:
                    rows.append({"ph": "X", "name": name, "ts": begun, "dur": at - begun, **where, "args": {}})
            else:
                open_at[event.ring, base] = at
    clocks = [
        {"rank": t.rank, "offset_ns": t.offset_ns, "uncertainty_ns": t.uncertainty_ns, "events": len(t.events), "dropped": t.dropped}
        for t in traces
    ]
    return {"traceEvents": rows, "displayTimeUnit": "ns", "otherData": {"clocks": clocks}}
