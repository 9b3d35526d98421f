"""The simulated machine with the checker attached: what the host does, and where launches begin and end, is told to the engine."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from epdsl_runtime import sim_layout as sim
from epdsl_runtime.artifact import Artifact
from epdsl_runtime.bootstrap import ThreadBootstrap, ThreadHub
from epdsl_runtime.context_layout import FAULT_COUNT
from epdsl_runtime.sim import SimDevice, SimEngine, SimFunction, SimStream
from epdsl_runtime.sim_engine import Deadlock, Launch
from numpy.typing import NDArray

from epdsl.targets import CHECKED

from . import layout as check
from .engine import Agent, CheckEngine, HostSite, LaunchRecord, Options, Tuning, launch_words, thread_words
from .instrument import AccessSite, read_sites
from .mutate import Identity, identity

_sites: dict[int, tuple[Artifact, list[AccessSite]]] = {}


def sites_of(artifact: Artifact) -> list[AccessSite]:
    """An artifact's table of sites, read once."""
    found = _sites.get(id(artifact))
    if found is None:
        found = _sites[id(artifact)] = (artifact, read_sites(artifact.texts["sites"]))
    return found[1]


@dataclass
class Buffer:
    """An allocation, also after it was freed. `label` is a symmetric buffer's, `parameter` that of a kernel it was passed to."""

    rank: int
    nbytes: int
    label: str = ""
    parameter: str = ""

    @property
    def name(self) -> str:
        return self.label or f"{self.parameter or 'memory'} of rank {self.rank}"


@dataclass(frozen=True)
class Control:
    """Words that must hold `rest` whenever no kernel of their device is in flight."""

    rank: int
    address: int
    nbytes: int
    size: int
    rest: int
    name: str


def _caller() -> tuple[tuple[str, int, int], ...]:
    """The scenario's line that asked for a host operation."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename.replace("\\", "/")
        if (
            "/epdsl_runtime/" not in name
            and "/epdsl/check/" not in name
            and "/epdsl/moe" not in name
            and "/epdsl/kernel_object" not in name
        ):
            return ((frame.f_code.co_filename, frame.f_lineno, 0),)
        frame = frame.f_back
    return ()


class CheckedDevice(SimDevice):
    """A simulated device whose memory and streams are checked."""

    def __init__(self, vendor: str, index: int, engine: CheckedMachine, num_sms: int | None) -> None:
        super().__init__(vendor, index, engine, num_sms)
        self._info = replace(self._info, target=f"sim:{vendor}{CHECKED}")
        self.checker = engine.checker
        self.machine = engine
        self.host: NDArray[np.uint64] = np.array([self.checker.empty_clock, 0], np.uint64)
        self.agents: dict[int, Agent] = {}
        self._quarantine: list[Any] = []
        self.checker.exempt(self.context_address, self.context_words.nbytes)

    def agent(self, stream: SimStream) -> Agent:
        found = self.agents.get(stream.handle)
        if found is None:
            found = self.agents[stream.handle] = Agent(self.checker, self.info.index)
        return found

    # ---- memory

    def allocate(self, nbytes: int) -> int:
        address = super().allocate(nbytes)
        with self.engine.lock:
            self.agent(self.default).access(check.KIND_ALLOCATE, address, nbytes)
            self.machine.buffers[address] = Buffer(self.info.index, nbytes)
        return address

    def free(self, address: int) -> None:
        found = self.memory.find(address)
        held = self.memory._held.get(address)
        self.machine.keep_labels()
        super().free(address)
        # Kept, so that the address is not given out again and a late use is seen.
        self._quarantine.append(held)
        if found is not None:
            with self.engine.lock:
                self.agent(self.default).access(check.KIND_FREE, address, found[1])

    # ---- what streams do

    def _operation(self, stream: Any, name: str, accesses: list[tuple[int, int, int]], work: Callable[[], None]) -> None:
        """Queues a host operation with the accesses (kind, address, bytes) it makes."""
        where = self.stream_of(stream)
        if not self.checker.words[check.K_FULL]:
            site = self.checker.host_site(HostSite(name, _caller()))

            def run() -> None:
                agent = self.agent(where)
                good = [agent.access(kind, address, nbytes, site) for kind, address, nbytes in accesses if nbytes]
                agent.tick()
                if all(good):
                    work()

            self.enqueue(where, run)
        else:
            self.enqueue(where, work)

    def enqueue(self, stream: SimStream, work: Launch | Callable[[], None]) -> None:
        with self.engine.lock:
            self.host[1] = 0
            clock = int(self.host[0])
            if isinstance(work, Launch):
                self.machine.ordered_after[id(work)] = clock
                super().enqueue(stream, work)
                return

            def run() -> None:
                self.checker.join(self.agent(stream).holder, clock)
                work()

            super().enqueue(stream, run)

    def memset(self, address: int, byte: int, nbytes: int, stream: Any = None) -> None:
        self._operation(stream, "memset", [(check.KIND_STORE, address, nbytes)], lambda: self.memory.fill(address, byte, nbytes))

    def upload(self, address: int, source: NDArray[Any], stream: Any = None) -> None:
        held = source.copy()
        self._operation(stream, "upload", [(check.KIND_STORE, address, source.nbytes)], lambda: self.memory.write(address, held))

    def download(self, target: NDArray[Any], address: int, stream: Any = None) -> None:
        self._operation(stream, "download", [(check.KIND_LOAD, address, target.nbytes)], lambda: self.memory.read(target, address))
        where = self.stream_of(stream)
        self.wait(lambda: self.idle(where), "to copy to the host")

    def copy(self, target: int, source: int, nbytes: int, stream: Any = None) -> None:
        accesses = [(check.KIND_LOAD, source, nbytes), (check.KIND_STORE, target, nbytes)]
        self._operation(stream, "copy", accesses, lambda: self.memory.move(target, source, nbytes))

    def wait(self, predicate: Callable[[], bool], what: str) -> None:
        super().wait(predicate, what)
        with self.engine.lock:
            for stream in self.streams:
                if not stream.queue and stream.handle in self.agents:
                    self.checker.join(self.host, self.agents[stream.handle].snapshot())

    def load(self, artifact: Artifact) -> SimFunction:
        return super().load(self.machine.replaced(artifact))


class CheckedMachine(SimEngine):
    """A job's machine with one engine of the checker for all its devices."""

    def __init__(
        self, ranks: int, options: Options, tuning: Tuning | None = None, replacements: Mapping[Identity, Artifact] | None = None
    ) -> None:
        lanes = 32 if options.vendor == "nvidia" else 64
        self.options = options
        self.checker = CheckEngine(options, lanes, tuning)
        self.ordered_after: dict[int, int] = {}
        self.controls: list[Control] = []
        self.stuck: list[dict[str, Any]] = []
        self.unrestored: list[dict[str, Any]] = []
        self.buffers: dict[int, Buffer] = {}
        self.shared_ranges: list[tuple[int, int, int]] = []
        self._columns: dict[tuple[int, int], tuple[int, int, int]] = {}
        self._replacements = replacements or {}
        self._held: list[Any] = []
        self._sequence = 0
        self._ordinals: dict[tuple[int, int], int] = {}
        super().__init__(ranks, options.vendor, options.seed, [])
        self.devices = [CheckedDevice(options.vendor, i, self, options.num_sms) for i in range(ranks)]
        for device in self.devices:
            device.agent(device.default)
        mode = sim.MODES.index(options.schedule)
        self.words[sim.E_MODE] = mode
        self.words[sim.E_LEVEL] = sim.LEVELS - 1
        self.words[sim.E_SALT] = self.words[sim.E_RANDOM]

    def replaced(self, artifact: Artifact) -> Artifact:
        return self._replacements.get(identity(artifact), artifact) if self._replacements else artifact

    def declare(self, rank: int, address: int, nbytes: int, size: int, rest: int, name: str) -> None:
        """See `epdsl.scenarios.control_words`."""
        with self.lock:
            self.controls.append(Control(rank, address, nbytes, size, rest, name))

    # ---- launches

    def _range(self, device: CheckedDevice, stream: int, wanted: int, asynchronous: bool) -> tuple[int, int]:
        """Columns for a launch: a stream's launches follow each other, so they share them."""
        key = (device.info.index, stream)
        first, count, width = self._columns.get(key, (0, 0, 0))
        if wanted > count or (asynchronous and not width):
            count = max(wanted, count)
            first = self.checker.columns(count, asynchronous)
            width = count if asynchronous else 0
            self._columns[key] = (first, count, width)
        return first, width

    def started(self, launch: Launch) -> None:
        device: CheckedDevice = launch.device
        checker = self.checker
        stream = next(s for s in device.streams if s.queue and s.queue[0] is launch)
        agent = device.agent(stream)
        checker.join(agent.holder, self.ordered_after.pop(id(launch), 0))
        self._sequence += 1
        lanes = launch.artifact.warp_size
        warps = launch.threads // lanes
        artifact = launch.artifact
        sites = sites_of(artifact)
        bulk = any(s.operation.startswith("ep.bulk") for s in sites)
        first, asynchronous = self._range(device, stream.handle, warps * launch.blocks, bulk)
        ordinal = self._ordinals[device.info.index, id(artifact)] = self._ordinals.get((device.info.index, id(artifact)), 0) + 1
        record = LaunchRecord(self._sequence, device.info.index, artifact.name, first, warps, launch.blocks, lanes, asynchronous, ordinal)
        checker.launches[self._sequence] = record
        table = np.zeros(launch.blocks, np.uint64)
        base = checker.table(id(artifact), artifact.name, sites)
        words = launch_words(checker, agent.snapshot(), record, base, launch.shared_bytes, table)
        checker.begin(self._sequence, words)
        threads = thread_words(checker, launch.held[1], words)
        launch.words[sim.L_SEED] = self._sequence
        self._held.append((table, words, threads, launch.held, launch.artifact))
        self.ordered_after[-id(launch)] = len(self._held) - 1
        self._name_arguments(launch)
        if launch.shared_bytes:
            step = -(-launch.shared_bytes // 256) * 256
            start = int(launch.held[0][0, sim.B_SHARED])
            self.shared_ranges.append((start, step, len(launch.held[0])))
        if device.info.index == self.options.seed % len(self.devices):
            self.words[sim.E_STARVED] = launch.words[sim.L_DEVICE]

    def _name_arguments(self, launch: Launch) -> None:
        """Remembers by which parameter a buffer was passed, for findings."""
        view = launch.parameters
        offset = 0
        memory = launch.device.memory
        for slot in launch.artifact.slots:
            offset = -(-offset // slot.nbytes) * slot.nbytes
            if slot.dtype == "u64" and slot.nbytes == 8:
                address = ctypes.c_uint64.from_address(view.base + offset).value
                found = memory.find(address)
                if found is not None:
                    buffer = self.buffers.get(found[0])
                    if buffer is not None and not buffer.parameter:
                        buffer.parameter = slot.name.removesuffix(".table")
            offset += slot.nbytes

    def _finish(self, launch: Launch) -> None:
        device: CheckedDevice = launch.device
        stream = next((s for s in device.streams if s.queue and s.queue[0] is launch), None)
        complete = launch.words[sim.L_DONE] == launch.words[sim.L_BLOCKS] and not launch.words[sim.L_TRAPS]
        super()._finish(launch)
        position = self.ordered_after.pop(-id(launch), None)
        if stream is None or position is None:
            return
        _, words, _, _, _ = self._held[position]
        agent = device.agent(stream)
        self.checker.join(agent.holder, int(words[check.C_END]))
        # What a thread that left through a fault did not set back is no finding of its own.
        if complete and not device.context_words[FAULT_COUNT]:
            self._check_controls(device, int(words[check.C_SEQUENCE]))
        self.checker.check_memory()

    def _check_controls(self, device: CheckedDevice, sequence: int) -> None:
        for control in self.controls:
            if control.rank != device.info.index:
                continue
            values = device.memory.view(control.address, control.nbytes).view(f"u{control.size}")
            for index in np.flatnonzero(values != control.rest)[:1]:
                self.unrestored.append(
                    {
                        "control": control,
                        "index": int(index),
                        "value": int(values[index]),
                        "sequence": sequence,
                        "writer": self.last_writer(control.address + int(index) * control.size),
                    }
                )

    # ---- what is looked up for findings

    def last_writer(self, address: int) -> tuple[int, int] | None:
        """(packed lane, launch << 32 | site) of the latest store to a word."""
        pages = self.checker._pages
        number = address >> 12
        mask = len(pages) // 2 - 1
        slot = (number * 0x9E3779B97F4A7C15 & (2**64 - 1)) >> 32 & mask
        while int(pages[2 * slot]) not in (0, number + 1):
            slot = (slot + 1) & mask
        if not pages[2 * slot]:
            return None
        cell = self._words(int(pages[2 * slot + 1]) + (address & 0xFFF) // 4 * check.CELL_WORDS * 8, check.CELL_WORDS)
        if int(cell[check.CELL_STATE]) & check.STATE_SPLIT:
            cell = self._words(int(cell[check.CELL_MORE]), check.CELL_WORDS)
        if cell[check.CELL_SYNC]:
            location = self._words(int(cell[check.CELL_SYNC]), check.LOCATION_WORDS)
            at = int(location[check.A_RING + int(location[check.A_LATEST]) % check.RING])
            store = self._words(at, check.STORE_WORDS)
            return int(store[check.W_WRITER]), int(store[check.W_INFO])
        return (int(cell[check.CELL_WRITE]), int(cell[check.CELL_WRITE_INFO])) if cell[check.CELL_WRITE] else None

    @staticmethod
    def _words(address: int, count: int) -> NDArray[np.uint64]:
        return np.ctypeslib.as_array((ctypes.c_uint64 * count).from_address(address))

    def keep_labels(self) -> None:
        """Takes over the names of symmetric buffers, which the runtime forgets when they are freed."""
        for device in self.devices:
            for address, (_, label) in device.diagnostics.buffers.items():
                buffer = self.buffers.get(address)
                if buffer is not None and not buffer.label:
                    buffer.label = label

    def buffer_at(self, address: int) -> str:
        """Which buffer an address lies in, as a finding shows it."""
        self.keep_labels()
        for start, buffer in self.buffers.items():
            if start <= address < start + buffer.nbytes:
                return f"{buffer.name}, byte {address - start} of {buffer.nbytes}"
        for start, step, slots in self.shared_ranges:
            if start <= address < start + step * slots:
                return f"shared memory, byte {(address - start) % step}"
        near = min(
            self.buffers, key=lambda start: min(abs(address - start), abs(address - start - self.buffers[start].nbytes)), default=None
        )
        if near is not None and abs(address - near) < 1 << 20:
            buffer = self.buffers[near]
            return f"byte {address - near} of {buffer.name}, which has {buffer.nbytes} bytes"
        return f"address {address:#x}, which is no allocated memory"

    # ---- what cannot go on

    def _break(self, launches: list[Launch], status: int) -> None:
        """Nothing goes on: notes who waits for what, and gives the launches up."""
        running = [launch for launch in launches if not launch.ended]
        text = self.describe(running, status)
        for launch in running:
            self._note_stuck(launch, status)
        for launch in running:
            self._give_up(launch, Deadlock("EP304", text))

    def _note_stuck(self, launch: Launch, status: int) -> None:
        rows = launch.active_threads
        waiting = int(launch.words[sim.L_BLOCKS]) - int(launch.words[sim.L_NEXT])
        seen: set[tuple[int, int, int]] = set()
        for row in rows:
            op, site = int(row[sim.T_OP]), int(np.int64(row[sim.T_SITE]))
            if op == sim.OP_DONE:
                continue
            key = (op, site, int(row[sim.T_A0]) if op == sim.OP_NAMED else 0)
            if key in seen:
                continue
            seen.add(key)
            block = self._words(int(row[sim.T_BLOCK]), sim.BLOCK_WORDS)
            same = rows[(rows[:, sim.T_OP] == op) & (rows[:, sim.T_SITE].astype(np.int64) == site)]
            self.stuck.append(
                {
                    "rank": launch.device.info.index,
                    "kernel": launch.artifact.name,
                    "artifact": launch.artifact,
                    "op": op,
                    "site": site,
                    "count": len(same),
                    "block": int(block[sim.B_X]),
                    "thread": int(row[sim.T_WARP]) * launch.artifact.warp_size + int(row[sim.T_LANE]),
                    "address": int(row[sim.T_A0]),
                    "value": int(row[sim.T_A1]),
                    "compared": self._compared(row) if op == sim.OP_POLL else None,
                    "mask": int(row[sim.T_A0]),
                    "wanted": int(row[sim.T_A1]),
                    "arrived": int(block[sim.B_NAMED + int(row[sim.T_A0]) % 16]) if op == sim.OP_NAMED else int(block[sim.B_ARRIVED]),
                    "alive": int(block[sim.B_ALIVE]),
                    "unstarted": waiting,
                    "resident": launch.resident,
                    "writer": self.last_writer(int(row[sim.T_A0])) if op == sim.OP_POLL else None,
                    "livelock": status != sim.STATUS_STUCK,
                }
            )

    def _compared(self, row: NDArray[np.uint64]) -> int | None:
        """What a waiting thread compares the word with; None where that is no single number."""
        words = self._words(int(row[sim.T_CHECK]), check.THREAD_WORDS)
        return int(words[check.X_COMPARED]) if words[check.X_COMPARES] else None


class CheckedBootstrap(ThreadBootstrap):
    """A rank's connection to the others; what a rank's host has seen travels with every exchange."""

    def __init__(self, hub: ThreadHub, index: int, machine: CheckedMachine) -> None:
        super().__init__(hub, index, machine.block)
        self._machine = machine

    def allgather(self, value: Any) -> list[Any]:
        device = self._machine.devices[self.index]
        with self._machine.lock:
            device.host[1] = 0
            clock = int(device.host[0])
        found = super().allgather((clock, value))
        with self._machine.lock:
            for other, _ in found:
                self._machine.checker.join(device.host, other)
        return [each for _, each in found]
