"""What `exchange.py` has measured so far, and how much time is left: rows in a file, lines on stderr, stacks of ranks that hang."""

from __future__ import annotations

import faulthandler
import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# A job with less than this is not started: its ranks would meet and part.
LEAST_SECONDS = 10.0
# What each later job keeps of the time, where there is so much.
KEPT_SECONDS = 60.0
# Of a job's time: for the work that is under way when nothing new is begun, at most a quarter of it; and to say where the ranks are.
ENDING_SECONDS = 15.0
STACKS_SECONDS = 2.0


@dataclass(frozen=True)
class Limits:
    """Of a job, in seconds of `time.monotonic`, which all processes of a machine share.

    started  of the program
    ends     nothing new is begun after it
    stacks   a rank that still runs writes its Python stacks to stderr
    killed   the ranks are ended
    """

    started: float
    ends: float
    stacks: float
    killed: float


def share(started: float, finish: float, later: int, now: float) -> Limits | None:
    """The time of a job that `later` others follow, `finish` being the program's; None for less than LEAST_SECONDS."""
    left = finish - now
    left -= later * min(KEPT_SECONDS, left / (later + 1))
    if left < LEAST_SECONDS:
        return None
    return Limits(started, now + left - min(ENDING_SECONDS, left / 4), now + left - STACKS_SECONDS, now + left)


class Writer:
    """Appends rank 0's rows to a file as they are made, and says on stderr what is begun, so that whatever ends the job loses neither."""

    def __init__(self, rank: Any, path: Path, limits: Limits) -> None:
        self.rank, self.path, self.limits = rank, path, limits
        self.skipped: list[str] = []

    def write(self, *rows: dict[str, Any]) -> None:
        if self.rank.index == 0:
            add_rows(self.path, rows)
            for row in rows:
                if text := row.get("failed") or (f"{row['less_empty']:.1f} us" if row.get("less_empty") else ""):
                    self.say(f"  {row.get('name') or row['peer']}: {text}")

    def begin(self, what: str) -> bool:
        """Collective: whether there is time for it; what there is none for is kept in `skipped`."""
        if any(self.rank.allgather(time.monotonic() > self.limits.ends)):
            self.skipped.append(what)
            return False
        self.say(what)
        return True

    def say(self, what: str) -> None:
        if self.rank.index == 0:
            say(self.limits.started, what)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Has this rank write its stacks when it still runs at `Limits.stacks`; one rank after another, so that they can be read."""
        faulthandler.dump_traceback_later(max(0.5, self.limits.stacks - time.monotonic() + 0.3 * self.rank.index), exit=False)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()


def say(started: float, what: str) -> None:
    print(f"{time.monotonic() - started:6.1f} s: {what}", file=sys.stderr, flush=True)


def failed(peer: str, text: str, tokens: int = 0) -> dict[str, Any]:
    """The row of what was not measured. tokens: 0 for any number of them."""
    return {"peer": peer, "tokens": tokens, "failed": text}


def add_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Appends them in one write, so that a process that is ended leaves no part of a row."""
    with path.open("a") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file; what several jobs say of the machine as the first of them says it."""
    found: list[dict[str, Any]] = []
    for row in map(json.loads, path.read_text().splitlines()):
        if row["peer"] or "failed" in row or row["name"] not in {other.get("name") for other in found}:
            found.append(row)
    return found


def read_document(paths: Sequence[Path]) -> dict[str, Any]:
    """What `exchange.py --json` wrote, or the rows (.jsonl) of a run that was ended. Of several all rows, and what the first is about."""
    found = [{"about": {}, "rows": read_rows(path)} if path.suffix == ".jsonl" else json.loads(path.read_text()) for path in paths]
    return {"about": next((each["about"] for each in found if each["about"]), {}), "rows": [row for each in found for row in each["rows"]]}
