"""Runs the kernels in flight while every rank's host thread waits, and reports what cannot go on."""

from __future__ import annotations

import ctypes
import faulthandler
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import sim_code
from . import sim_layout as layout
from .artifact import Artifact
from .errors import CodedError
from .parameters import ParameterBlock
from .protocol import Dim3

# Passes over all threads, and turns of threads, in which only loops without an end of their own and sleepers went on.
SPIN_LIMIT = 20_000
SPIN_RESUMES = 20_000_000
# What an SM holds is counted in these units, so that blocks of different kernels share it.
SM_UNITS = 2048 * 32


class Deadlock(CodedError, RuntimeError):
    """Nothing can go on: the text says who waits for what at which line."""


class TrapError(CodedError, RuntimeError):
    """A kernel executed a trap."""


class OutsideError(CodedError, RuntimeError):
    """Memory beside an allocation was written."""


@dataclass
class Waiter:
    """A host thread that waits in `Engine.block`."""

    predicate: Callable[[], bool]
    what: str
    released: bool = False
    failure: Exception | None = None


@dataclass
class Launch:
    """A kernel launch, queued or in flight. `held` is its own memory, `given` the arguments whose memory it uses."""

    device: Any
    artifact: Artifact
    grid: Dim3
    block: Dim3
    shared_bytes: int
    parameters: ParameterBlock
    resident: int
    blocks_per_sm: int
    started: bool = False
    ended: bool = False
    words: NDArray[np.uint64] = field(default_factory=lambda: np.zeros(layout.LAUNCH_WORDS, np.uint64))
    held: list[NDArray[Any]] = field(default_factory=list[NDArray[Any]])
    given: tuple[Any, ...] = ()

    @property
    def blocks(self) -> int:
        return self.grid[0] * self.grid[1] * self.grid[2]

    @property
    def threads(self) -> int:
        return self.block[0] * self.block[1] * self.block[2]

    def again(self) -> Launch:
        """The same launch, not begun."""
        return replace(self, started=False, ended=False, words=np.zeros(layout.LAUNCH_WORDS, np.uint64), held=[])

    def start(self, engine_words: NDArray[np.uint64], device_words: NDArray[np.uint64], entry: int) -> None:
        """Lays out the memory of the blocks that can be resident at once."""
        slots = min(self.blocks, self.resident)
        blocks = np.zeros((slots, layout.BLOCK_WORDS), np.uint64)
        threads = np.zeros((slots, self.threads, layout.THREAD_WORDS), np.uint64)
        threads[:, :, layout.T_OP] = layout.OP_ABSENT
        step = -(-self.shared_bytes // 256) * 256
        shared = np.full(slots * step + 256, 0xA5, np.uint8)
        base = -(-shared.ctypes.data // 256) * 256
        table = np.array([blocks.ctypes.data + i * layout.BLOCK_WORDS * 8 for i in range(slots)], np.uint64)
        blocks[:, layout.B_LAUNCH] = self.words.ctypes.data
        blocks[:, layout.B_SHARED] = np.uint64(base) + np.arange(slots, dtype=np.uint64) * np.uint64(step)
        blocks[:, layout.B_THREADS] = np.uint64(threads.ctypes.data) + np.arange(slots, dtype=np.uint64) * np.uint64(
            self.threads * layout.THREAD_WORDS * 8
        )
        threads[:, :, layout.T_BLOCK] = table[:, None]
        threads[:, :, layout.T_LAUNCH] = self.words.ctypes.data
        w = self.words
        w[layout.L_ENTRY] = entry
        w[layout.L_ARGS] = self.parameters.base
        w[layout.L_GX : layout.L_GZ + 1] = self.grid
        w[layout.L_DX : layout.L_DZ + 1] = self.block
        w[layout.L_BLOCKS] = self.blocks
        w[layout.L_SLOTS] = table.ctypes.data
        w[layout.L_SLOT_COUNT] = slots
        w[layout.L_THREADS] = self.threads
        w[layout.L_WARP_SIZE] = self.artifact.warp_size
        w[layout.L_LOCKSTEP] = self.artifact.vendor == "amd"
        w[layout.L_DEVICE] = device_words.ctypes.data
        w[layout.L_COST] = SM_UNITS // self.blocks_per_sm
        w[layout.L_ENGINE] = engine_words.ctypes.data
        self.held = [blocks, threads, shared, table]
        self.started = True

    @property
    def active_threads(self) -> NDArray[np.uint64]:
        """The words of every thread of every active block, one row a thread."""
        blocks, threads = self.held[0], self.held[1]
        return threads[blocks[:, layout.B_ACTIVE] != 0].reshape(-1, layout.THREAD_WORDS)


class Engine:
    """Host threads wait in `block`; when all of them do, the kernels in flight run."""

    def __init__(self, ranks: int, seed: int) -> None:
        if not faulthandler.is_enabled():
            with suppress(Exception):
                # An address far outside every array ends the process; this says in which launch.
                faulthandler.enable(all_threads=False)
        self.lock = threading.Condition()
        self.live = ranks
        # Launches that have ended, of all devices.
        self.ended = 0
        self.seed = seed
        self.devices: list[Any] = []
        self.waiters: list[Waiter] = []
        self.words = np.zeros(layout.ENGINE_WORDS, np.uint64)
        self.words[layout.E_RANDOM] = (seed * 0x9E3779B97F4A7C15 + 0xD1B54A32D192ED03) & (2**64 - 1) or 1
        self.words[layout.E_SPIN_LIMIT] = SPIN_LIMIT
        self.words[layout.E_SPIN_RESUMES] = SPIN_RESUMES
        self._debugger: Any = None
        self._device_words: dict[int, NDArray[np.uint64]] = {}

    def block(self, predicate: Callable[[], bool], what: str = "another rank") -> None:
        """Returns once `predicate` is true. The thread that finds every other waiting runs the kernels.

        Raises Deadlock when no kernel is in flight and no rank can go on.
        """
        with self.lock:
            if predicate():
                # What made it true may be what another rank waits for.
                self.lock.notify_all()
                return
            waiter = Waiter(predicate, what)
            self.waiters.append(waiter)
            self.lock.notify_all()
            try:
                while not waiter.released:
                    if self._release():
                        continue
                    if len([w for w in self.waiters if not w.released]) >= self.live:
                        self._run()
                    else:
                        # Bounded, so that a rank which ends in an unforeseen way does not leave the others asleep.
                        self.lock.wait(1.0)
            finally:
                self.waiters.remove(waiter)
            if waiter.failure is not None:
                raise waiter.failure

    def _release(self) -> bool:
        """Marks the waiters whose condition holds. True when there are new ones."""
        found = [w for w in self.waiters if not w.released and w.predicate()]
        for waiter in found:
            waiter.released = True
        if found:
            self.lock.notify_all()
        return bool(found)

    # ---- running

    def _run(self) -> None:
        """One step: host operations at the heads of streams, or kernels until one ends or nothing can go on."""
        launches = self._heads()
        if self._release():
            return
        if not launches:
            text = "every rank waits on the host and no kernel is in flight:\n" + "\n".join(f"  waits for {w.what}" for w in self.waiters)
            for waiter in self.waiters:
                waiter.failure, waiter.released = Deadlock("EP304", text), True
            self.lock.notify_all()
            return
        self._advance(launches)

    def _advance(self, launches: list[Launch]) -> None:
        """Runs kernels until one ends or nothing can go on."""
        status = self._schedule(launches)
        if self._debugger is not None and self._debugger.failure is not None:
            failure, self._debugger.failure = self._debugger.failure, None
            for launch in launches:
                self._give_up(launch, failure)
            return
        for launch in launches:
            if launch.words[layout.L_TRAPS]:
                rows = launch.held[1].reshape(-1, layout.THREAD_WORDS)
                site = int(rows[rows[:, layout.T_OP] == layout.OP_TRAP][0, layout.T_SITE].astype(np.int64))
                self._give_up(launch, TrapError("EP305", self._group(launch, rows, layout.OP_TRAP, site, 1).strip()))
            elif launch.words[layout.L_DONE] == launch.words[layout.L_BLOCKS]:
                self._finish(launch)
        if status != layout.STATUS_FINISHED:
            self._break(launches, status)

    def _heads(self) -> list[Launch]:
        """Performs what is not a kernel at the head of each stream; returns the kernels there, in a fixed order."""
        found: list[Launch] = []
        for device in self.devices:
            for stream in device.streams:
                while stream.queue and not isinstance(stream.queue[0], Launch):
                    stream.queue[0]()
                    stream.queue.popleft()
                if stream.queue:
                    found.append(stream.queue[0])
        return found

    def _schedule(self, launches: list[Launch]) -> int:
        scheduler = b""
        for launch in launches:
            kernel, scheduler = sim_code.unpack(launch.artifact.binary)
            if not launch.started:
                device = launch.device
                words = self._device_words.get(id(device))
                if words is None:
                    words = self._device_words[id(device)] = np.zeros(layout.DEVICE_WORDS, np.uint64)
                    words[layout.D_CAPACITY] = device.info.num_sms * SM_UNITS
                launch.start(self.words, words, sim_code.address_of(kernel, launch.artifact.name))
                self._prepare_debugger(launch)
                self.started(launch)
        table = np.array([launch.words.ctypes.data for launch in launches], np.uint64)
        self.words[layout.E_LAUNCHES] = table.ctypes.data
        self.words[layout.E_COUNT] = len(launches)
        argument = ctypes.c_uint64(self.words.ctypes.data)
        sim_code.Scheduler(sim_code.address_of(scheduler, "run"))(ctypes.addressof(argument), None)
        return int(self.words[layout.E_STATUS])

    def _prepare_debugger(self, launch: Launch) -> None:
        if any(site.kind == "breakpoint" for site in launch.artifact.sites):
            from .sim_debug import Debugger

            self._debugger = self._debugger or Debugger(self)
            self._debugger.prepare(launch)

    def started(self, launch: Launch) -> None:
        """A launch's memory has been laid out; its threads have not begun."""

    def _finish(self, launch: Launch) -> None:
        launch.ended = True
        self.ended += 1
        for stream in launch.device.streams:
            if stream.queue and stream.queue[0] is launch:
                stream.queue.popleft()
        launch.held = []

    def _break(self, launches: list[Launch], status: int) -> None:
        """Nothing goes on: waits with a deadline end now; without any, the kernels in flight are given up."""
        running = [launch for launch in launches if not launch.ended]
        text = self.describe(running, status)
        expired = 0
        for launch in running:
            blocks, threads = launch.held[0], launch.held[1]
            active = blocks[:, layout.B_ACTIVE] != 0
            polling = (threads[:, :, layout.T_OP] == layout.OP_POLL) & active[:, None]
            expire(threads, polling)
            expired += int(polling.sum())
            launch.device.report = launch.device.report or text
        self.words[layout.E_SPINS] = 0
        if expired:
            return
        for launch in running:
            self._give_up(launch, Deadlock("EP304", text))

    def _give_up(self, launch: Launch, why: Exception) -> None:
        """Ends a launch in the middle. Its coroutines' frames are left behind: they have nothing else to give back."""
        launch.device.failure = launch.device.failure or why
        words = self._device_words[id(launch.device)]
        active = int((launch.held[0][:, layout.B_ACTIVE] != 0).sum())
        words[layout.D_USED] -= np.uint64(active * int(launch.words[layout.L_COST]))
        self._finish(launch)

    # ---- reports

    def describe(self, launches: list[Launch], status: int) -> str:
        """Who waits for what, at which line."""
        head = "deadlock: nothing can go on" if status == layout.STATUS_STUCK else "livelock: only loops that look at memory go on"
        lines = [f"{head} (seed {self.seed})"]
        for launch in launches:
            rows = launch.active_threads
            groups: Counter[tuple[int, int]] = Counter(
                (int(op), int(site)) for op, site in zip(rows[:, layout.T_OP], rows[:, layout.T_SITE].astype(np.int64), strict=True)
            )
            waiting = int(launch.words[layout.L_BLOCKS]) - int(launch.words[layout.L_NEXT])
            for (op, site), count in sorted(groups.items()):
                if op == layout.OP_DONE:
                    continue
                lines.append(self._group(launch, rows, op, site, count))
            if waiting:
                who = f"rank {launch.device.info.index} {launch.artifact.name}"
                lines.append(f"  {who}: {waiting} blocks cannot start: the device holds {launch.resident} at once")
        return "\n".join(lines)

    def _group(self, launch: Launch, rows: NDArray[np.uint64], op: int, site: int, count: int) -> str:
        chosen = rows[(rows[:, layout.T_OP] == op) & (rows[:, layout.T_SITE].astype(np.int64) == site)][0]
        block = _word(int(chosen[layout.T_BLOCK]), layout.B_X)
        thread = int(chosen[layout.T_WARP]) * launch.artifact.warp_size + int(chosen[layout.T_LANE])
        who = f"  rank {launch.device.info.index} {launch.artifact.name}: {count} thread{'s' if count > 1 else ''} {layout.OP_NAMES[op]}"
        first = f"first: block {block} thread {thread}"
        where = ""
        if 0 <= site < len(launch.artifact.sites):
            place = launch.artifact.sites[site]
            word = "after" if op in (layout.OP_SPLIT, layout.OP_JOIN, layout.OP_HELD) else "at"
            where = f" {word} {place.file}:{place.line}: {place.text}"
        detail = below = ""
        if op == layout.OP_POLL:
            address = int(chosen[layout.T_A0])
            below = f"\n    address {address:#x} holds {int(chosen[layout.T_A1])}{self.owner(address)}"
        elif op in (layout.OP_NAMED,):
            arrived = _word(int(chosen[layout.T_BLOCK]), layout.B_NAMED + int(chosen[layout.T_A0]) % 16)
            detail = f"; barrier {int(chosen[layout.T_A0])}: {arrived} of {int(chosen[layout.T_A1])} threads have arrived"
        elif op == layout.OP_BARRIER:
            arrived = _word(int(chosen[layout.T_BLOCK]), layout.B_ARRIVED)
            alive = _word(int(chosen[layout.T_BLOCK]), layout.B_ALIVE)
            detail = f"; {arrived} of {alive} threads of the block have arrived"
        return f"{who}{where} ({first}{detail}){below}"

    def owner(self, address: int) -> str:
        """ " (NAME of rank R, byte B of N)" for an address in a device's memory, else ""."""
        for device in self.devices:
            found = device.memory.find(address)
            if found is not None:
                name = device.diagnostics.buffers.get(found[0], (0, f"memory of rank {device.info.index}"))[1]
                return f" ({name}, byte {address - found[0]} of {found[1]})"
        return ""


def expire(threads: NDArray[np.uint64], chosen: NDArray[np.bool_]) -> None:
    """Has the chosen threads of a launch, which wait, give up."""
    threads[:, :, layout.T_RESULT][chosen] = 1
    threads[:, :, layout.T_OP][chosen] = layout.OP_READY


def _word(base: int, index: int) -> int:
    return ctypes.c_uint64.from_address(base + index * 8).value
