"""The engine's memory, and calls into its machine code. Everything here runs under the simulated machine's lock."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from epdsl_runtime import sim_layout as sim
from epdsl_runtime.errors import CodedError
from numpy.typing import NDArray

from . import code
from . import layout as check
from .instrument import AccessSite

ARENA_BYTES = 1536 << 20
# Events of a run, after which it is taken for one that does not end.
MOST_EVENTS = 200_000_000
# Beyond the end, so that an allocation that no longer fits still has memory to land in.
_SLACK_BYTES = 1 << 20
_PAGE_SLOTS = 1 << 17
_SITES = 1 << 20
# Host operations are numbered from here on, so that a kernel's sites have the same numbers in every run.
HOST_SITES = 1 << 19
_COLUMNS = 1 << 14
_EXEMPT = 64
_COPY_BYTES = 1 << 16

Words = NDArray[np.uint64]


class OutOfMemory(CodedError, RuntimeError):
    """The run needs more than the checker has: shadow memory, streams of warps, launches."""

    def __init__(self, message: str) -> None:
        super().__init__("EP330", message)

    def __reduce__(self) -> tuple[Any, ...]:
        return OutOfMemory, (self.message,)


@dataclass(frozen=True)
class Options:
    """What a checked run is: replaying it needs the same.

    seed      of the schedule and of weak memory
    schedule  "round", "uniform", "pct" or "starve" (one rank, chosen by the seed, goes on only when no other can)
    weak      probability that an atomic load reads an older value that the model allows
    model     "ptx" or "amdgpu"
    """

    vendor: str = "nvidia"
    model: str = "ptx"
    seed: int = 0
    schedule: str = "uniform"
    weak: float = 0.0
    num_sms: int | None = None

    def command(self, name: str) -> str:
        """How to run it again."""
        weak = f" --weak {self.weak:g}" if self.weak else ""
        sms = f" --num-sms {self.num_sms}" if self.num_sms else ""
        return f"epdsl check {name} --device sim:{self.vendor} --model {self.model} --sched {self.schedule}{weak}{sms} --seed {self.seed}"


@dataclass(frozen=True)
class HostSite:
    """An operation of the host: where the scenario asked for it."""

    operation: str
    places: tuple[tuple[str, int, int], ...]


@dataclass(frozen=True)
class LaunchRecord:
    """A launch as findings name it: who its lanes are. `ordinal`: the how-manieth of its kernel on its rank."""

    sequence: int
    rank: int
    kernel: str
    column: int
    warps: int
    blocks: int
    lanes: int
    asynchronous: int
    ordinal: int


@dataclass(frozen=True)
class Tuning:
    """Rules relaxed on purpose.

    relax       flags of `layout.RELAX_*` for every site
    overrides   global site -> word of `layout.OVERRIDE_*`
    watch       lane (column << 8 | lane) and epoch of a write whose spread is traced
    most_events after which the run is ended
    """

    relax: int = 0
    overrides: dict[int, int] = field(default_factory=dict[int, int])
    watch: tuple[int, int] | None = None
    most_events: int = MOST_EVENTS


class CheckEngine:
    """One checked run's memory."""

    def __init__(self, options: Options, lanes: int, tuning: Tuning | None = None, arena_bytes: int = ARENA_BYTES) -> None:
        tuning = tuning or Tuning()
        self.options = options
        self.lanes = lanes
        self.words: Words = np.zeros(check.ENGINE_WORDS, np.uint64)
        self._arena = np.zeros(arena_bytes + _SLACK_BYTES, np.uint8)
        self._pages = np.zeros(2 * _PAGE_SLOTS, np.uint64)
        self.findings: Words = np.zeros((check.FINDING_CAPACITY, check.FINDING_WORDS), np.uint64)
        self.overrides: Words = np.zeros(_SITES, np.uint64)
        self._proxies = np.zeros(_COLUMNS * 128, np.uint64)
        self._trace: Words = np.zeros((check.TRACE_CAPACITY, check.TRACE_WORDS), np.uint64)
        self._scratch = np.zeros(_COPY_BYTES, np.uint8)
        self._exempt = np.zeros(2 * _EXEMPT, np.uint64)
        self._launches = np.zeros(check.MOST_LAUNCHES, np.uint64)
        self._nothing = np.zeros(2, np.uint64)
        self.sites: list[tuple[str, AccessSite]] = [("", AccessSite("", "", "", (), -1))]
        self.launches: dict[int, LaunchRecord] = {}
        self._tables: dict[int, int] = {}
        self._places: dict[HostSite, int] = {}
        self._host_sites: list[HostSite] = []
        self._functions = {name: ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(a) for name, a in code.functions().items()}
        self.addresses = code.functions()
        start = self._start = self._arena.ctypes.data
        w = self.words
        w[check.K_ACCESS] = self.addresses["access"]
        w[check.K_SYNC] = self.addresses["sync"]
        w[check.K_LIMIT] = tuning.most_events
        w[check.K_INSPECT] = self.addresses["inspect"]
        w[check.K_LAUNCHES] = self._launches.ctypes.data
        w[check.K_JOIN] = self.addresses["join"]
        w[check.K_NEXT] = -(-start // 64) * 64
        w[check.K_END] = start + arena_bytes
        w[check.K_LANES] = lanes
        w[check.K_PAGES] = self._pages.ctypes.data
        w[check.K_PAGE_MASK] = _PAGE_SLOTS - 1
        w[check.K_FINDINGS] = self.findings.ctypes.data
        w[check.K_FINDING_CAPACITY] = check.FINDING_CAPACITY
        w[check.K_MODEL] = check.MODEL_PTX if options.model == "ptx" else check.MODEL_AMDGPU
        w[check.K_FLAGS] = tuning.relax
        w[check.K_WEAK] = round(options.weak * 0x10000)
        w[check.K_RANDOM] = (options.seed * 0x9E3779B97F4A7C15 + 0x2545F4914F6CDD1D) & (2**64 - 1) or 1
        w[check.K_OVERRIDES] = self.overrides.ctypes.data
        w[check.K_SCRATCH] = self._scratch.ctypes.data
        w[check.K_EXEMPT] = self._exempt.ctypes.data
        w[check.K_PROXIES] = self._proxies.ctypes.data
        w[check.K_TRACE] = self._trace.ctypes.data
        for site, word in tuning.overrides.items():
            self.overrides[site] = word
        if tuning.watch is not None:
            w[check.K_WATCH], w[check.K_WATCH_EPOCH] = tuning.watch

    @property
    def address(self) -> int:
        return self.words.ctypes.data

    @property
    def empty_clock(self) -> int:
        return self._nothing.ctypes.data

    @property
    def used_bytes(self) -> int:
        return int(self.words[check.K_NEXT]) - self._start

    @property
    def exhausted(self) -> bool:
        """Whether the run was ended because of its many events."""
        return self.words[check.K_STEPS] > self.words[check.K_LIMIT]

    def release(self) -> None:
        """Gives the shadow memory back once findings have been collected. The engine is not to be called any more."""
        self._arena = self._pages = self._proxies = self._scratch = np.zeros(0, np.uint8)
        self.words[check.K_FULL] = 1

    @property
    def trace(self) -> Words:
        return self._trace[: int(self.words[check.K_TRACED])]

    @property
    def found(self) -> Words:
        return self.findings[: int(self.words[check.K_FOUND])]

    def check_memory(self) -> None:
        """Raises OutOfMemory when the arena is used up."""
        if self.words[check.K_FULL]:
            raise OutOfMemory(
                f"the checked run needs more than {self._arena.nbytes >> 20} MiB of shadow memory; check a smaller shape (fewer tokens, "
                "blocks or threads)"
            )

    # ---- calls

    def call(self, name: str, words: Words) -> None:
        """Calls `access` or `sync` for a thread's words."""
        self._functions[name](words.ctypes.data, None)

    def join(self, holder: Words, clock: int) -> None:
        """Makes the clock in `holder` (clock, owned) cover another."""
        if clock and int(holder[0]) != clock:
            self._join(holder, clock, 0)

    def learn(self, holder: Words, packed: int) -> None:
        """Makes the clock in `holder` cover one lane at one epoch."""
        self._join(holder, 0, packed)

    def _join(self, holder: Words, clock: int, packed: int) -> None:
        arguments = np.array([holder.ctypes.data, clock, packed, self.address], np.uint64)
        self._functions["join"](arguments.ctypes.data, None)

    # ---- who and where

    def columns(self, count: int, asynchronous: bool) -> int:
        """Reserves columns for so many warps, and behind them those of their copy engine; returns the first."""
        first = int(self.words[check.K_COLUMNS])
        last = first + count * (1 + check.STORE_WRITES if asynchronous else 1)
        if last > _COLUMNS:
            raise OutOfMemory(f"the checked run has more than {_COLUMNS} warps in all streams; check fewer blocks or threads")
        self._proxies[(first + count) * 128 : last * 128] = check.ENGINE
        self.words[check.K_COLUMNS] = last
        return first

    def exempt(self, address: int, nbytes: int) -> None:
        """Memory of the runtime, whose use is not checked."""
        count = int(self.words[check.K_EXEMPT_COUNT])
        self._exempt[2 * count : 2 * count + 2] = (address, address + nbytes)
        self.words[check.K_EXEMPT_COUNT] = count + 1

    def table(self, key: int, kernel: str, sites: list[AccessSite]) -> int:
        """Where a kernel's sites begin in the table of all sites. `key` stands for the artifact."""
        base = self._tables.get(key)
        if base is None:
            base = self._tables[key] = len(self.sites)
            self.sites += [(kernel, site) for site in sites]
        return base

    def first_site(self, key: int) -> int:
        """Where the sites of a kernel that was launched begin. `key` as for `table`."""
        return self._tables[key]

    def host_site(self, site: HostSite) -> int:
        number = self._places.get(site)
        if number is None:
            number = self._places[site] = HOST_SITES + len(self._host_sites)
            self._host_sites.append(site)
        return number

    def site(self, number: int) -> tuple[str, AccessSite | HostSite]:
        """Kernel and place of a global site number; the kernel is "" for the host's."""
        return ("", self._host_sites[number - HOST_SITES]) if number >= HOST_SITES else self.sites[number]

    def begin(self, sequence: int, words: Words) -> None:
        """Lets the engine find a launch by its number."""
        if sequence >= check.MOST_LAUNCHES:
            raise OutOfMemory(f"a checked run has at most {check.MOST_LAUNCHES} launches; check a shorter scenario")
        self._launches[sequence] = words.ctypes.data


class Agent:
    """What performs a stream's host operations, one after the other: a thread of one lane."""

    def __init__(self, engine: CheckEngine, rank: int) -> None:
        self.engine = engine
        self.words: Words = np.zeros(check.THREAD_WORDS, np.uint64)
        w = self.words
        w[check.X_SELF] = w.ctypes.data
        w[check.X_ENGINE] = engine.address
        w[check.X_COLUMN] = column = engine.columns(1, False)
        w[check.X_TID] = column << 8
        w[check.X_EPOCH] = 1
        w[check.X_CLOCK] = engine.empty_clock
        w[check.X_RANK] = rank
        w[check.X_BLOCK] = (1 << 50) + column

    @property
    def holder(self) -> Words:
        return self.words[check.X_CLOCK : check.X_OWNED + 1]

    def snapshot(self) -> int:
        """The clock as it is now, never to be changed."""
        self.words[check.X_OWNED] = 0
        return int(self.words[check.X_CLOCK])

    def access(self, kind: int, address: int, nbytes: int, site: int = 0) -> bool:
        """One access by the stream. False when the memory may not be used."""
        w = self.words
        w[check.X_ADDRESS] = address
        w[check.X_INFO] = kind | site << check.INFO_SITE
        w[check.X_VALUE] = nbytes
        self.engine.call("access", w)
        return int(w[check.X_RESULT]) == address

    def tick(self) -> None:
        """Ends an operation: what comes after it in the stream is ordered after it."""
        packed = int(self.words[check.X_TID]) << 40 | int(self.words[check.X_EPOCH])
        self.engine.learn(self.holder, packed)
        self.words[check.X_EPOCH] += np.uint64(1)


def thread_words(engine: CheckEngine, threads: NDArray[np.uint64], launch: Words) -> Words:
    """The checker's words of every thread of a launch's resident blocks, and their address put into the simulator's."""
    slots, count = threads.shape[:2]
    words = np.zeros((slots, count, check.THREAD_WORDS), np.uint64)
    step = np.uint64(check.THREAD_WORDS * 8)
    own = np.uint64(words.ctypes.data) + np.arange(slots * count, dtype=np.uint64).reshape(slots, count) * step
    words[:, :, check.X_SELF] = own
    words[:, :, check.X_ACCESS] = engine.addresses["access"]
    words[:, :, check.X_SYNC] = engine.addresses["sync"]
    words[:, :, check.X_ENGINE] = engine.address
    words[:, :, check.X_LAUNCH] = launch.ctypes.data
    base = np.uint64(threads.ctypes.data)
    words[:, :, check.X_THREAD] = base + np.arange(slots * count, dtype=np.uint64).reshape(slots, count) * np.uint64(sim.THREAD_WORDS * 8)
    threads[:, :, sim.T_CHECK] = own
    return words


def launch_words(engine: CheckEngine, clock: int, record: LaunchRecord, sites: int, shared_bytes: int, table: Words) -> Words:
    words: Words = np.zeros(check.LAUNCH_WORDS, np.uint64)
    words[check.C_ENGINE] = engine.address
    words[check.C_CLOCK] = clock
    words[check.C_COLUMN] = record.column
    words[check.C_RANK] = record.rank
    words[check.C_SEQUENCE] = record.sequence
    words[check.C_SITES] = sites
    words[check.C_BLOCKS] = table.ctypes.data
    words[check.C_SHARED] = shared_bytes
    words[check.C_WARPS] = record.warps
    words[check.C_ASYNC] = record.asynchronous
    words[check.C_ORDINAL] = record.ordinal
    return words


def block_of(value: Any, launch: LaunchRecord) -> tuple[int, int]:
    """Block and thread of a packed lane (column << 48 | lane << 40 | epoch) of a launch."""
    offset = (int(value) >> 48) - launch.column
    if launch.asynchronous:
        offset %= launch.asynchronous
    return offset // launch.warps, offset % launch.warps * launch.lanes + (int(value) >> 40 & 0xFF)
