"""Ranks as processes of one machine, watched by the process that started them."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from .bootstrap import RankFailed
from .errors import traceback_text
from .health import Health, Watcher
from .rank import Rank
from .rendezvous import Hub, SocketBootstrap

# How long the news of another rank's failure waits for that rank's own report.
_CAUSE_SECONDS = 2.0
_TERMINATE_SECONDS = 2.0
_ORPHAN_EXIT = 70


@dataclass(frozen=True)
class _Failure:
    """How a rank failed. `about` is the rank whose failure it only passes on; `error` the pickled exception, empty when it cannot be."""

    text: str
    about: int | None = None
    error: bytes = b""


def spawn_processes(
    main: Callable[..., Any],
    ranks: int,
    device: Callable[[int], Any],
    args: Sequence[Any],
    timeout: float | None,
    peer_memory: str | None = None,
    watch: Callable[[list[Health]], None] | None = None,
    survive: bool = False,
) -> list[Any]:
    """Runs `main(rank, *args)` in a process per rank. `device(index)` opens a rank's device, in its process. See `spawn.spawn`."""
    token = secrets.token_bytes(32)
    hub = Hub(ranks, token)
    context = multiprocessing.get_context("spawn")
    processes: list[BaseProcess] = []
    readers: list[Connection] = []
    try:
        for index in range(ranks):
            reader, writer = context.Pipe(duplex=False)
            process = context.Process(
                target=_run,
                args=(main, index, ranks, device, tuple(args), hub.address, token, writer, peer_memory),
                name=f"epdsl-rank-{index}",
                daemon=True,
            )
            process.start()
            # The child holds the other copy: its end is then the end of the stream.
            writer.close()
            processes.append(process)
            readers.append(reader)
        return _Watch(hub, processes, readers, timeout, Watcher(watch, hub.health), survive).results()
    finally:
        _end(processes)
        hub.close()
        for reader in readers:
            reader.close()


class _Watch:
    """Waits for every rank's result or for the first failure."""

    def __init__(
        self, hub: Hub, processes: list[BaseProcess], readers: list[Connection], timeout: float | None, watcher: Watcher, survive: bool
    ) -> None:
        self._hub = hub
        self._processes = processes
        self._open = dict(enumerate(readers))
        self._timeout = timeout
        self._watcher = watcher
        self._survive = survive
        self._results: dict[int, Any] = {}
        self._failures: dict[int, _Failure] = {}

    def results(self) -> list[Any]:
        deadline = None if self._timeout is None else time.monotonic() + self._timeout
        patience: float | None = None
        while self._open:
            limits = [at - time.monotonic() for at in (deadline, patience) if at is not None]
            limits += [] if self._watcher.patience is None else [self._watcher.patience]
            ready = wait(list(self._open.values()), max(min(limits), 0) if limits else None)
            self._watcher.look()
            for index in [index for index, reader in self._open.items() if reader in ready]:
                self._read(index)
            if self._failures and not self._survive:
                cause = self._cause()
                if cause is not None or (patience is not None and time.monotonic() >= patience):
                    break
                patience = patience or time.monotonic() + _CAUSE_SECONDS
            if not ready and deadline is not None and time.monotonic() >= deadline:
                running = sorted(self._open)
                raise TimeoutError(f"the job took more than {self._timeout:g} s; still running: ranks {running}")
        if self._failures and not (self._survive and self._results):
            index = self._cause()
            index = next(iter(self._failures)) if index is None else index
            raise self._failed(index)
        return [self._results[index] if index in self._results else self._failed(index) for index in range(len(self._processes))]

    def _failed(self, index: int) -> RankFailed:
        failure = self._failures[index]
        return RankFailed(index, failure.text, _unpickled(failure.error))

    def _cause(self) -> int | None:
        """The first rank that failed by itself."""
        return next((index for index, failure in self._failures.items() if failure.about is None), None)

    def _read(self, index: int) -> None:
        reader = self._open.pop(index)
        try:
            kind, value = pickle.loads(reader.recv_bytes())
        except (EOFError, OSError):
            process = self._processes[index]
            process.join(_TERMINATE_SECONDS)
            kind, value = "failed", _Failure(f"its process {process.pid} {_how_it_ended(process.exitcode)}")
        if kind == "result":
            self._results[index] = value
        else:
            self._failures[index] = value
            self._hub.abort(index, value.text)


def _how_it_ended(code: int | None) -> str:
    if code is None:
        return "closed its connection and does not end"
    if code < 0:
        with suppress(ValueError):
            return f"was ended by signal {signal.Signals(-code).name} before it gave a result"
    return f"ended with exit status {code} before it gave a result"


def _unpickled(error: bytes) -> BaseException | None:
    with suppress(Exception):
        return pickle.loads(error) if error else None
    return None


def _end(processes: list[BaseProcess]) -> None:
    """Ends what still runs: asks, then kills."""
    deadline = time.monotonic() + _TERMINATE_SECONDS
    for process in processes:
        # A rank that gave its result is about to end by itself.
        if process.is_alive():
            process.join(0.2)
        if process.is_alive():
            process.terminate()
    for process in processes:
        process.join(max(deadline - time.monotonic(), 0))
        if process.is_alive():
            process.kill()
            process.join(_TERMINATE_SECONDS)


def _run(
    main: Callable[..., Any],
    index: int,
    size: int,
    device: Callable[[int], Any],
    args: tuple[Any, ...],
    address: tuple[str, int],
    token: bytes,
    writer: Connection,
    peer_memory: str | None,
) -> None:
    """A rank's process."""
    if sys.stderr is not None:
        with suppress(Exception):
            faulthandler.enable()
    threading.Thread(target=_end_with_parent, name="epdsl-parent", daemon=True).start()
    bootstrap: SocketBootstrap | None = None
    failed = False
    try:
        bootstrap = SocketBootstrap(index, size, address, token)
        rank = Rank(index, size, device(index), bootstrap, peer_memory)
        result = main(rank, *args)
        message = pickle.dumps(("result", result))
        rank.close()
    except BaseException as error:
        failed = True
        text = traceback_text(error)
        about = error.rank if isinstance(error, RankFailed) else None
        message = pickle.dumps(("failed", _Failure(text, about, _pickled(error))))
        if bootstrap is not None and about is None:
            bootstrap.abort(text)
    writer.send_bytes(message)
    writer.close()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    if failed:
        # Peers' memory may still be mapped, and a driver's own clean-up may wait for a rank that is gone.
        os._exit(1)


def _pickled(error: BaseException) -> bytes:
    with suppress(Exception):
        data = pickle.dumps(error)
        pickle.loads(data)
        return data
    return b""


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(_ORPHAN_EXIT)
