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

from .bootstrap import RankFailed, is_news
from .errors import CodedError, traceback_text
from .health import Health, Watcher, timed_out
from .rank import Rank
from .rendezvous import Hub, SocketBootstrap

# How long the news of another rank's failure waits for that rank's own report.
_CAUSE_SECONDS = 2.0
_TERMINATE_SECONDS = 2.0
# A rank that gave its result is about to end by itself.
_END_SECONDS = 0.2
_ORPHAN_EXIT = 70


class SpawnError(CodedError, RuntimeError):
    """Ranks cannot be started as processes from here, or cannot be given what they are to run."""


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
    _refuse_where_none_can_start(main)
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
            _start(process)
            # The child holds the other copy: its end is then the end of the stream.
            writer.close()
            processes.append(process)
            readers.append(reader)
        return _Watch(hub, processes, readers, timeout, Watcher(watch, hub.health), survive).results()
    finally:
        try:
            _end(processes)
        except BaseException:
            # A second Ctrl-C: the end of this process would wait for ranks that do not end when asked.
            _kill(processes)
            raise
        finally:
            hub.close()
        for reader in readers:
            reader.close()


def refuse_while_importing() -> None:
    """Raises SpawnError in a rank's process that is still importing the script that started it."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise SpawnError(
            "EP317",
            "spawn was called while a rank's process was importing this script; put the call under: if __name__ == '__main__':",
        )


def _refuse_where_none_can_start(main: Callable[..., Any]) -> None:
    here = multiprocessing.current_process()
    if here.daemon:
        raise SpawnError(
            "EP317",
            f"spawn was called in {here.name}, a process that may start no others (a rank of a job, a worker of a pool); call it where the "
            "program begins, or use device='sim', whose ranks are threads",
        )
    name = getattr(main, "__qualname__", "")
    if "<" in name:
        raise SpawnError(
            "EP317",
            f"main is {name}, which a rank's process cannot import; write it with def at the top of a module, or use device='sim', whose "
            "ranks are threads",
        )
    program = sys.modules["__main__"]
    file = getattr(program, "__file__", None)
    theirs = getattr(main, "__module__", "__main__") == "__main__" if file is None else not os.path.exists(file)
    if theirs and getattr(program, "__spec__", None) is None:
        where = "a notebook, a prompt or python -c" if file is None else f"{file}, which is no file"
        raise SpawnError("EP317", f"this program is {where}: a rank's process cannot import it. Put it into a file, or use device='sim'")


def _start(process: BaseProcess) -> None:
    try:
        process.start()
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        raise SpawnError(
            "EP317",
            f"main, args or device cannot be sent to a rank's process: {error}; main and device are functions at the top of a module, args "
            "what pickle takes",
        ) from error


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
                raise timed_out(self._timeout, sorted(self._open), self._hub.health())
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
            text = f"its process {process.pid} {_how_it_ended(process.exitcode)}"
            by_itself = process.exitcode is not None and process.exitcode > 0
            kind, value = "failed", _Failure(f"{text}, {_BEFORE_MAIN}" if by_itself and not self._hub.came(index) else text)
        if kind == "result":
            self._results[index] = value
        else:
            self._failures[index] = value
            if value.about is None:
                self._hub.abort(index, value.text)


_BEFORE_MAIN = (
    "and before it met the others: it may have failed in importing the script that starts the ranks. What it printed says why; "
    "that script calls spawn under: if __name__ == '__main__':"
)


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
    _join(processes, _END_SECONDS)
    for process in processes:
        if process.is_alive():
            process.terminate()
    _join(processes, _TERMINATE_SECONDS)
    _kill(processes)


def _kill(processes: list[BaseProcess]) -> None:
    for process in processes:
        if process.is_alive():
            process.kill()
    _join(processes, _TERMINATE_SECONDS)


def _join(processes: list[BaseProcess], seconds: float) -> None:
    """Waits for all of them, so long together."""
    deadline = time.monotonic() + seconds
    for process in processes:
        process.join(max(deadline - time.monotonic(), 0))


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
        about = error.rank if isinstance(error, RankFailed) and bootstrap is not None and is_news(bootstrap, error) else None
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
