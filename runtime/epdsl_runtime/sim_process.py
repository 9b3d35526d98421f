"""A simulated device whose rank is a process of its own, as under torchrun: the memory it shares lies in memory files of Linux.

The kernels of a process run on a thread of it, so that they go on while its host waits for other processes. An atomic of a simulated
kernel is several instructions of the host; so one process of a job at a time runs its kernels, until they only wait. A memory file has
no name, and the socket that says whose turn it is none in the file system: a process that is killed leaves nothing behind.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from . import fd_passing
from . import sim_layout as layout
from .bootstrap import BootstrapTimeout
from .peer_memory import MACHINE, PROCESS, SharingError
from .sim import SimDevice, SimEngine, SimStream
from .sim_engine import Launch, Waiter, expire
from .sim_memory import FRESH

# Between two looks at what another process may have written.
_PAUSE_SECONDS = 0.0003
_IDLE_SECONDS = 1.0
# A process that is stopped in its turn keeps the others out.
_TURN_SECONDS = 60.0
# How long loops that look at memory without `ep.wait` may go on alone.
_LIVELOCK_SECONDS = 10.0


class Turn:
    """Who of a job's processes runs kernels. `job` is a text that its processes have in common and others have not."""

    def __init__(self, job: str) -> None:
        self._name = b"\0epdsl-turn-" + hashlib.sha256(job.encode()).hexdigest()[:32].encode()

    @contextmanager
    def taken(self) -> Any:
        """Raises BootstrapTimeout when another process keeps it."""
        deadline = time.monotonic() + _TURN_SECONDS
        with socket.socket(socket.AF_UNIX) as mine:
            while True:
                try:
                    mine.bind(self._name)
                    break
                except OSError as error:
                    if time.monotonic() > deadline:
                        text = f"another process of this job has run simulated kernels for {_TURN_SECONDS:g} s without giving others a turn"
                        raise BootstrapTimeout("EP311", f"{text}; it may be stopped, or run one very long kernel") from error
                    time.sleep(_PAUSE_SECONDS)
            yield


class ProcessEngine(SimEngine):
    """The machine of one rank that is a process. See SimEngine."""

    def __init__(self, vendor: str, seed: int | None, job: str) -> None:
        super().__init__(1, vendor, seed, devices=[])
        self._turn = Turn(job)
        # By launch: what each thread waited for when it was last looked at, and since when.
        self._seen: dict[int, tuple[Any, Any]] = {}
        self._stuck_since: float | None = None
        self._ended = False
        threading.Thread(target=self._pump, name="epdsl-simulator", daemon=True).start()

    def block(self, predicate: Callable[[], bool], what: str = "another rank") -> None:
        """Returns once `predicate` is true."""
        with self.lock:
            waiter = Waiter(predicate, what)
            self.waiters.append(waiter)
            self.lock.notify_all()
            try:
                while not predicate():
                    if waiter.failure is not None:
                        raise waiter.failure
                    self.lock.wait(_IDLE_SECONDS)
            finally:
                self.waiters.remove(waiter)

    def stop(self) -> None:
        """No kernel runs from now on."""
        with self.lock:
            self._ended = True
            self.lock.notify_all()

    def _pump(self) -> None:
        with self.lock:
            while not self._ended:
                pause = _IDLE_SECONDS
                try:
                    launches = self._heads()
                    if launches:
                        self._advance(launches)
                        pause = _PAUSE_SECONDS
                except Exception as error:
                    for waiter in self.waiters:
                        waiter.failure = error
                    pause = _PAUSE_SECONDS
                self.lock.notify_all()
                self.lock.wait(pause)

    def _schedule(self, launches: list[Launch]) -> int:
        with self._turn.taken():
            return super()._schedule(launches)

    def _finish(self, launch: Launch) -> None:
        super()._finish(launch)
        self._seen.pop(id(launch), None)
        self._stuck_since = None

    def _break(self, launches: list[Launch], status: int) -> None:
        """Nothing of this process goes on; another may do what is waited for, until a wait's own time is up."""
        now = time.monotonic_ns()
        waits = expired = 0
        running = [launch for launch in launches if not launch.ended]
        late: list[tuple[Launch, Any]] = []
        for launch in running:
            blocks, threads = launch.held[0], launch.held[1]
            polling = (threads[:, :, layout.T_OP] == layout.OP_POLL) & (blocks[:, layout.B_ACTIVE] != 0)[:, None]
            key = np.where(polling[:, :, None], threads[:, :, [layout.T_A0, layout.T_A1]], 0)
            before, since = self._seen.get(id(launch), (None, None))
            since = np.full(polling.shape, now) if before is None else np.where((key == before).all(axis=2), since, now)
            self._seen[id(launch)] = (key, since)
            waits += int(polling.sum())
            over = polling & (now - since > threads[:, :, layout.T_A3].astype(np.int64))
            if over.any():
                late.append((launch, over))
        if waits:
            self._stuck_since = None
            text = self.describe(running, status) if late else ""
            for launch, over in late:
                launch.device.report = launch.device.report or text
                expire(launch.held[1], over)
                expired += int(over.sum())
            self.words[layout.E_SPINS] = 0
            return
        self._stuck_since = self._stuck_since or time.monotonic()
        if status == layout.STATUS_STUCK or time.monotonic() - self._stuck_since > _LIVELOCK_SECONDS:
            super()._break(launches, status)
        self.words[layout.E_SPINS] = 0


@dataclass(frozen=True)
class MemoryFile:
    """By which another process opens memory. Can be pickled."""

    machine: str
    process: str
    address: int
    nbytes: int
    ticket: fd_passing.Ticket


@dataclass
class _Shared:
    descriptor: int
    ticket: fd_passing.Ticket | None = None


class ProcessDevice(SimDevice):
    """A simulated device of a rank that is a process. See `protocol.Device`."""

    def __init__(self, vendor: str = "nvidia", index: int = 0, seed: int | None = None, job: str = "") -> None:
        engine = ProcessEngine(vendor, seed, job)
        super().__init__(vendor, index, engine)
        engine.devices.append(self)
        self._engine = engine
        self._shared: dict[int, _Shared] = {}

    def enqueue(self, stream: SimStream, work: Launch | Callable[[], None]) -> None:
        with self.engine.lock:
            stream.queue.append(work)
            self.engine.lock.notify_all()

    @property
    def share_kinds(self) -> tuple[str, ...]:
        return ("fd",)

    def allocate_shared(self, nbytes: int, kind: str) -> tuple[int, int]:
        if nbytes <= 0:
            raise ValueError(f"an allocation of {nbytes} bytes; it must be at least 1")
        self._refuse_when_closed()
        room = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if room > (available := _available_memory()):
            raise MemoryError(f"{nbytes} bytes of shared memory asked for, {available} are available on this machine")
        descriptor = os.memfd_create("epdsl")
        try:
            # Taken now: a page that there is no memory for would end the process when it is first used.
            os.posix_fallocate(descriptor, 0, room)
            memory = _mapped(descriptor, room)
        except OSError as error:
            os.close(descriptor)
            raise MemoryError(f"{nbytes} bytes of shared memory: {error}") from error
        memory.fill(FRESH)
        address = self.memory.adopt(memory)
        self._shared[address] = _Shared(descriptor)
        return address, room

    def free(self, address: int) -> None:
        super().free(address)
        shared = self._shared.pop(address, None)
        if shared is not None:
            if shared.ticket is not None:
                fd_passing.withdraw(shared.ticket)
            os.close(shared.descriptor)

    def export_memory(self, address: int) -> Any:
        shared = self._shared.get(address)
        if shared is None:
            raise ValueError(f"0x{address:x} is no memory that allocate_shared returned on {self!r}")
        shared.ticket = shared.ticket or fd_passing.offer(shared.descriptor)
        found = self.memory.find(address)
        assert found is not None
        return MemoryFile(MACHINE, PROCESS, address, found[1], shared.ticket)

    def export_foreign(self, address: int, nbytes: int) -> Any:
        raise SharingError("EP314", f"the {nbytes} bytes at 0x{address:x} are this process's own; use rank.symmetric(...)")

    def open_memory(self, handle: Any) -> int:
        if not isinstance(handle, MemoryFile):
            raise ValueError(f"{type(handle).__name__} is no handle of a simulated device of another process")
        if handle.machine != MACHINE:
            raise SharingError("EP314", "a simulated rank of another machine cannot be reached; ranks are processes of one machine")
        if handle.process == PROCESS:
            return handle.address
        descriptor = fd_passing.fetch(handle.ticket)
        try:
            return self.memory.adopt(_mapped(descriptor, handle.nbytes))
        finally:
            os.close(descriptor)

    def close_memory(self, address: int) -> None:
        if address not in self._shared:
            self.memory.free(address)

    def close(self) -> None:
        super().close()
        self._engine.stop()
        for address in list(self._shared):
            shared = self._shared.pop(address)
            if shared.ticket is not None:
                fd_passing.withdraw(shared.ticket)
            os.close(shared.descriptor)


def _available_memory() -> int:
    # Taking more would have Linux end some process.
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 1 << 62


def _mapped(descriptor: int, nbytes: int) -> Any:
    return np.frombuffer(mmap.mmap(descriptor, nbytes), np.uint8)


@dataclass(frozen=True)
class SimProcesses:
    """For `spawn(main, ranks, device=SimProcesses())`: every rank a process with a simulated device."""

    vendor: str = "nvidia"
    seed: int | None = None
    job: str = field(default_factory=secrets.token_hex)

    def __call__(self, index: int) -> ProcessDevice:
        return ProcessDevice(self.vendor, index, self.seed, self.job)
