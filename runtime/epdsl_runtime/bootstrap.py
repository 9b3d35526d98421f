"""How the ranks of a job find each other on the host: an exchange of objects, a barrier, and word of a rank that failed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

from .errors import CodedError, traceback_text
from .health import Health, Source, first_line

DEFAULT_TIMEOUT = 600.0

Block = Callable[[Callable[[], bool]], None]


NO_RANK = -1
"""Whose failure it is when what started the job ended it."""


class RankFailed(CodedError, RuntimeError):
    """A rank of the job failed.

    rank   the rank that failed first, NO_RANK when the job was ended from outside
    text   its traceback, or how its process ended
    error  its exception where that could be brought here, else None
    """

    code = "EP310"

    def __init__(self, rank: int, text: str, error: BaseException | None = None) -> None:
        Exception.__init__(self, rank, text)
        self.rank = rank
        self.text = text
        self.error = error

    @property
    def message(self) -> str:
        return f"rank {self.rank} failed:\n{self.text}" if self.rank != NO_RANK else self.text


class BootstrapTimeout(CodedError, TimeoutError):
    """Ranks did not meet within the time allowed; the text names those that were missing."""


class LauncherError(CodedError, RuntimeError):
    """This process cannot take its place in a job: what started it says something wrong, or nothing, or the port is taken."""


class Refused(CodedError, ConnectionError):
    """The rendezvous of the ranks did not let this process in."""


class OutOfStep(CodedError, RuntimeError):
    """Ranks are in different collective calls; the job cannot go on."""


class CollectiveError(CodedError, RuntimeError):
    """A collective call failed on every rank alike; the job can go on."""


class Disagreement(CollectiveError, ValueError):
    """Ranks were given different values of what must be equal."""


def check_timeout(timeout: float | None) -> None:
    """Raises TypeError or ValueError for what is no number of seconds above 0 (None: no limit)."""
    if timeout is not None and not isinstance(timeout, (int, float)):
        raise TypeError(f"timeout is a number of seconds, not {timeout!r}")
    if timeout is not None and not timeout > 0:
        raise ValueError(f"timeout={timeout}: a number of seconds above 0")


def ranks_text(ranks: tuple[int, ...]) -> str:
    """Ranks in words: "rank 1", "ranks 1, 3"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def after(failure: tuple[int, str] | None) -> str:
    """Why a rank ended that said nothing of a failure of its own, given the first failure of the job; empty without one."""
    if failure is None:
        return ""
    return f"after rank {failure[0]} failed" if failure[0] != NO_RANK else "after the job was ended"


def tell(bootstrap: Bootstrap, error: BaseException) -> None:
    """Has an error that ends a rank reach the others with its traceback, unless it is the news of another's."""
    if not is_news(bootstrap, error):
        bootstrap.abort(traceback_text(error))


def is_news(bootstrap: Bootstrap, error: BaseException) -> bool:
    """Whether an error is only that another rank of this job failed. (A job inside a rank has failures of its own.)"""
    return isinstance(error, RankFailed) and bootstrap.failed


def check_gone(index: int, gone: tuple[int, ...], rank: int, theirs: tuple[int, ...]) -> None:
    """Raises Disagreement when `rank` goes on without others than `index` does."""
    if index in theirs:
        raise Disagreement("EP312", f"shrink: rank {rank} goes on without {theirs}, and this is rank {index}; end this process")
    if theirs != gone:
        raise Disagreement("EP312", f"shrink: the dead differ by rank: rank {index} has {gone}, rank {rank} has {theirs}")


class Bootstrap(Protocol):
    """The host's connection of one rank to the others.

    All ranks call `allgather` and `barrier` in the same order. Both end within the bootstrap's timeout: with RankFailed when another rank
    called `abort` or disappeared, with BootstrapTimeout when one did not come.
    """

    @property
    def index(self) -> int: ...
    @property
    def size(self) -> int: ...
    def allgather(self, value: Any) -> list[Any]:
        """Every rank's value, by rank."""
        ...

    def barrier(self) -> None: ...
    def abort(self, text: str) -> None:
        """Makes every other rank's present or next wait raise RankFailed with this text."""
        ...

    def check(self) -> None:
        """Raises RankFailed when another rank's failure is known. Never waits."""
        ...

    @property
    def failed(self) -> bool:
        """Whether another rank's failure has been raised here."""
        ...

    def report(self, source: Source) -> None:
        """From now on others may learn from `source` what this rank does."""
        ...

    def health(self) -> list[Health]:
        """What every rank does, by rank. Waits a moment at most."""
        ...

    def without(self, gone: tuple[int, ...], timeout: float | None = None) -> Bootstrap:
        """The connection of a job of the ranks that are not in `gone`, numbered in their order; this one is then closed.

        Collective over those ranks, however the others fare; within `timeout` seconds, by default this connection's.

        Raises Disagreement when one of them goes on without others than `gone`, RankFailed when one of them ends meanwhile,
        BootstrapTimeout when one does not come.
        """
        ...

    def close(self) -> None: ...


class ThreadHub:
    """The meeting place of ranks that are threads of this process."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.condition = threading.Condition()
        self.failure: tuple[int, str] | None = None
        self.values: dict[int, dict[int, Any]] = {}
        self.taken: dict[int, int] = {}
        self.sources: dict[int, Source] = {}
        # Ranks that no longer come to meetings, each with the reason where it is not that the job was done.
        self.left: dict[int, str] = {}
        self.failures: dict[int, str] = {}
        # By attempt to go on without some: whom each rank leaves behind, and the hub of those who agree.
        self.leaving: dict[int, dict[int, tuple[int, ...]]] = {}
        self.successors: dict[tuple[int, tuple[int, ...]], ThreadHub] = {}

    def health(self) -> list[Health]:
        """What every rank does."""
        return [self._health_of(rank) for rank in range(self.size)]

    def _health_of(self, rank: int) -> Health:
        if rank in self.failures:
            return Health(rank, "failed", why=first_line(self.failures[rank]))
        if rank in self.left:
            return Health(rank, "left", why=self.left[rank])
        source = self.sources.get(rank)
        return Health(rank, "absent") if source is None else Health(rank, "running", source())

    def abort(self, rank: int, text: str) -> None:
        """Records the first failure and wakes everyone."""
        with self.condition:
            self.failures.setdefault(rank, text)
            if self.failure is None:
                self.failure = (rank, text)
            self.condition.notify_all()


class ThreadBootstrap:
    """A rank that is a thread. See Bootstrap.

    on_block  how to wait: called with a predicate, returns once that is true. A simulator passes its own, to run kernels meanwhile and
              to notice that nothing can go on. None: waits on a condition, up to `timeout` seconds.
    """

    def __init__(self, hub: ThreadHub, index: int, on_block: Block | None = None, timeout: float = DEFAULT_TIMEOUT) -> None:
        self._hub = hub
        self._index = index
        self._on_block = on_block
        self._timeout = timeout
        self._sequence = 0
        self._attempts = 0
        self._successor: ThreadBootstrap | None = None

    @property
    def index(self) -> int:
        return self._index

    @property
    def size(self) -> int:
        return self._hub.size

    def allgather(self, value: Any) -> list[Any]:
        hub, sequence = self._hub, self._sequence
        self._sequence += 1
        with hub.condition:
            values = hub.values.setdefault(sequence, {})
            values[self._index] = value
            hub.condition.notify_all()

        def ready() -> bool:
            return len(values) == hub.size or self.failed

        if not self._wait(ready, self._timeout):
            missing = [rank for rank in range(hub.size) if rank not in values]
            raise BootstrapTimeout("EP311", _late(self._index, self._timeout, missing))
        if len(values) < hub.size:
            self.check()
            raise RuntimeError(f"rank {self._index}: the wait for the other ranks ended early: {len(values)} of {hub.size} came")
        with hub.condition:
            hub.taken[sequence] = hub.taken.get(sequence, 0) + 1
            if hub.taken[sequence] == hub.size:
                del hub.values[sequence], hub.taken[sequence]
        return [values[rank] for rank in range(hub.size)]

    def _wait(self, ready: Callable[[], bool], timeout: float) -> bool:
        """False when the time is up. The simulator knows no time: it raises when nothing can go on."""
        if self._on_block is not None:
            self._on_block(ready)
            return True
        with self._hub.condition:
            return self._hub.condition.wait_for(ready, timeout)

    def barrier(self) -> None:
        self.allgather(None)

    def without(self, gone: tuple[int, ...], timeout: float | None = None) -> ThreadBootstrap:
        hub, attempt = self._hub, self._attempts
        self._attempts += 1
        left = [rank for rank in range(hub.size) if rank not in gone]
        seconds = self._timeout if timeout is None else timeout
        with hub.condition:
            said = hub.leaving.setdefault(attempt, {})
            said[self._index] = gone
            hub.condition.notify_all()

        if not self._wait(lambda: all(rank in said for rank in left), seconds):
            raise BootstrapTimeout("EP311", _late(self._index, seconds, [rank for rank in left if rank not in said]))
        for rank in left:
            check_gone(self._index, gone, rank, said[rank])
        with hub.condition:
            made = hub.successors.setdefault((attempt, gone), ThreadHub(len(left)))
        hub.left[self._index] = f"goes on without {ranks_text(gone)}"
        self._successor = ThreadBootstrap(made, left.index(self._index), self._on_block, self._timeout)
        return self._successor

    def abort(self, text: str) -> None:
        if self._successor is not None:
            self._successor.abort(text)
        else:
            self._hub.abort(self._index, text)

    @property
    def failed(self) -> bool:
        return self._hub.failure is not None and self._hub.failure[0] != self._index

    def check(self) -> None:
        if self.failed and self._hub.failure is not None:
            raise RankFailed(*self._hub.failure)

    def report(self, source: Source) -> None:
        self._hub.sources[self._index] = source

    def health(self) -> list[Health]:
        return self._hub.health()

    def close(self) -> None:
        self._hub.left.setdefault(self._index, after(self._hub.failure))


class SoloBootstrap:
    """A job of one rank. See Bootstrap."""

    index = 0
    size = 1
    failed = False

    def __init__(self) -> None:
        self._source: Source | None = None

    def report(self, source: Source) -> None:
        self._source = source

    def health(self) -> list[Health]:
        return [Health(0, "running", None if self._source is None else self._source())]

    def allgather(self, value: Any) -> list[Any]:
        return [value]

    def barrier(self) -> None:
        """Everyone is here."""

    def abort(self, text: str) -> None:
        """Nobody to tell."""

    def without(self, gone: tuple[int, ...], timeout: float | None = None) -> SoloBootstrap:
        """The same: nobody can be gone."""
        return self

    def check(self) -> None:
        """Nobody to fail."""

    def close(self) -> None:
        """Nothing to give back."""


def _late(index: int, timeout: float, missing: list[int]) -> str:
    return f"rank {index} waited {timeout:g} s for the other ranks; missing: {', '.join(map(str, missing)) or 'unknown'}"
