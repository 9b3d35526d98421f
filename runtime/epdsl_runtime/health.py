"""What each rank of a job does now, as it says itself, for a look from outside while the job seems stuck."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from .errors import CodedError

State = Literal["running", "left", "failed", "absent"]


@dataclass(frozen=True)
class Activity:
    """What a rank does.

    doing     "its own work" is whatever the program does outside this package
    seconds   since when
    launches  how often each kernel was launched, as (name, number)
    waits     what its kernels wait for, or have reported, in lines; one that goes on with the one above begins with a space
    """

    doing: str
    seconds: float
    launches: tuple[tuple[str, int], ...] = ()
    waits: tuple[str, ...] = ()

    def __bytes__(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def read(cls, data: bytes) -> Activity:
        """Inverse of `bytes`."""
        found = json.loads(data)
        launches = tuple((str(name), int(number)) for name, number in found["launches"])
        return cls(found["doing"], float(found["seconds"]), launches, tuple(found["waits"]))


@dataclass(frozen=True)
class Health:
    """A rank as another sees it.

    state     "absent": it has not come yet; "left": it closed in order, or `why` says after which failure or without whom it goes on;
              "failed": `why` says how
    activity  what it last said, None when nothing
    heard     seconds since it said so, or since it came
    """

    rank: int
    state: State
    activity: Activity | None = None
    heard: float = 0.0
    why: str = ""

    def __str__(self) -> str:
        silent = f"nothing was heard of it for {self.heard:.1f} s" if self.heard > 3 and self.state == "running" else ""
        if self.activity is None or self.state != "running":
            return f"rank {self.rank}: {self.state}{f' ({self.why or silent})' if self.why or silent else ''}"
        done = ", ".join(f"{name} {number} times" for name, number in self.activity.launches) or "nothing"
        lines = [f"rank {self.rank}: in {self.activity.doing} for {self.activity.seconds + self.heard:.1f} s; launched {done}"]
        if silent:
            lines.append(f"  {silent}")
        return "\n".join([*lines, *(f"  {line}" for line in self.activity.waits)])


Source = Callable[[], Activity]
"""Called from any thread; returns soon."""


def first_line(text: str) -> str:
    """What a traceback ends with, in one line."""
    lines = [line for line in text.strip().splitlines() if line and not line.startswith(" ")]
    return lines[-1] if text.startswith("Traceback") and lines else (lines or ["unknown"])[0]


def stuck(ranks: Sequence[Health], seconds: float) -> bool:
    """Whether no rank that runs has begun anything new for so long."""
    running = [found.activity.seconds + found.heard for found in ranks if found.state == "running" and found.activity is not None]
    return bool(running) and min(running) >= seconds


class JobTimeout(CodedError, TimeoutError):
    """A job took longer than its `timeout`; the text has what the ranks still running did."""


def timed_out(timeout: float | None, running: Sequence[int], ranks: Sequence[Health]) -> JobTimeout:
    """The error of a job that took too long, from what every rank last said."""
    lines = [str(found).replace("\n", "\n  ") for found in ranks if found.rank in running]
    return JobTimeout("EP318", "\n  ".join([f"the job took more than {timeout:g} s; still running: ranks {list(running)}", *lines]))


class Watcher:
    """Calls `told` with every rank's health about every `period` seconds. `look` is to be called often."""

    def __init__(self, told: Callable[[list[Health]], None] | None, health: Callable[[], list[Health]], period: float = 1.0) -> None:
        self._told, self._health, self._period = told, health, period
        self._next = time.monotonic() + period

    def look(self) -> None:
        if self._told is not None and time.monotonic() >= self._next:
            self._told(self._health())
            self._next = time.monotonic() + self._period

    @property
    def patience(self) -> float | None:
        """Seconds until it is to be called again, None when it need not be."""
        return None if self._told is None else max(self._next - time.monotonic(), 0.0)
