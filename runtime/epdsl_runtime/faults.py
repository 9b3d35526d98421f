"""What kernels report through the context block: faults become exceptions, log records and waits lines of text."""

from __future__ import annotations

import re
import string
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TextIO

from . import context_layout as layout
from .artifact import Artifact, Site
from .dtypes import decode_word
from .errors import CodedError
from .waits import Wait, Waits

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True)
class FaultReport:
    """One fault record, decoded.

    rank      rank whose kernel reported it
    kernel    the kernel's name, None when no loaded kernel has the record's tag
    site      the place in the source, None likewise
    block     number of the block in the grid, x fastest
    thread    number of the thread in the block, x fastest
    address   device address waited on; an assert's third operand
    buffer    the named buffer the address lies in, with the offset
    expected  the word the wait compared with, 0 when it compared with none; an assert's second operand
    last      the last value seen; an assert's first operand
    peers     ranks that did not write what this wait, in any thread, was for; empty where the buffer does not say who writes it
    """

    kind: int
    rank: int
    kernel: str | None
    site: Site | None
    block: int
    thread: int
    address: int
    buffer: str | None
    expected: int
    last: int
    note: str = ""
    peers: tuple[int, ...] = ()

    @property
    def place(self) -> str:
        return _place(self.site)

    def describe(self) -> str:
        """The whole report, several lines."""
        head = f"rank {self.rank}, kernel {self.kernel or 'unknown'}, {self.place}, block {self.block} thread {self.thread}"
        where = f"0x{self.address:x}" + (f" ({self.buffer})" if self.buffer else "")
        text = self.site.text if self.site else ""
        if self.kind == layout.KIND_TIMEOUT:
            dtype = _waited_dtype(self.site)
            against = f" (compared with {decode_word(self.expected, dtype)})" if self.expected else ""
            lines = [
                f"a wait timed out: {head}",
                f"  waited for: {text or 'a value'}{against}",
                f"  address: {where}",
                f"  last value: {decode_word(self.last, dtype)}",
            ]
            if self.peers:
                lines.append(f"  did not arrive: {_ranks(self.peers)}")
        elif self.kind == layout.KIND_ASSERT:
            words = (self.last, self.expected, self.address)
            dtypes = self.site.operand_dtypes if self.site else ()
            values = [decode_word(word, dtype) for word, dtype in zip(words, dtypes, strict=False)]
            lines = [f"a device assert failed: {head}", f"  {format_values(text, values) if text else 'no message'}"]
        else:
            lines = [f"a fault of kind {self.kind}: {head}", f"  address: {where}", f"  words: {self.expected:#x}, {self.last:#x}"]
        if self.note:
            lines.append(f"  {self.note}")
        return "\n".join(lines)


def _place(site: Site | None) -> str:
    return f"{site.file}:{site.line}" if site else "an unknown place (no kernel loaded on this device has this record's tag)"


def _waited_dtype(site: Site | None) -> str:
    return site.operand_dtypes[0] if site and site.operand_dtypes else "u64"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


class KernelFault(CodedError, RuntimeError):
    """A kernel reported that something went wrong.

    report  the first fault
    count   how many there were
    """

    code = "EP303"

    def __init__(self, report: FaultReport, count: int = 1, detail: str = "") -> None:
        Exception.__init__(self, report, count, detail)
        self.report = report
        self.count = count
        self.detail = detail

    @property
    def rank(self) -> int:
        return self.report.rank

    @property
    def kernel(self) -> str | None:
        return self.report.kernel

    @property
    def site(self) -> Site | None:
        return self.report.site

    @property
    def message(self) -> str:
        more = f"\n  and {self.count - 1} more fault{'s' if self.count > 2 else ''}" if self.count > 1 else ""
        return self.report.describe() + more + (f"\n  {self.detail}" if self.detail else "")


class PeerTimeout(KernelFault):
    """A device wait reached its deadline."""

    code = "EP301"

    @property
    def peers(self) -> tuple[int, ...]:
        """Ranks that did not arrive. Empty where the buffer waited on does not say who writes it."""
        return self.report.peers


class DeviceAssertionError(KernelFault):
    """A `device_assert` failed."""

    code = "EP302"


_CLASSES: dict[int, type[KernelFault]] = {layout.KIND_TIMEOUT: PeerTimeout, layout.KIND_ASSERT: DeviceAssertionError}

_LENGTH_MODIFIERS = re.compile(r"%([-+ #0]*\d*(?:\.\d+)?)(?:hh|h|ll|l|j|z|t|L)?([diouxXeEfFgGcsp%])")
_PYTHON_CONVERSIONS = {"u": "d", "i": "d", "p": "#x"}


def format_values(text: str, values: list[int | float | bool]) -> str:
    """Fills `values` into a format with `{}` fields, or with C's % conversions.

    A format that does not fit its values is shown as it is, followed by them.
    """
    try:
        if any(name is not None for _, name, _, _ in string.Formatter().parse(text)):
            return text.format(*values)
    except (ValueError, IndexError, KeyError):
        pass
    if "%" in text:
        python = _LENGTH_MODIFIERS.sub(_conversion, text)
        try:
            return python % tuple(values)
        except (TypeError, ValueError):
            pass
    return " ".join((text, *(str(value) for value in values)))


def _conversion(found: re.Match[str]) -> str:
    flags, letter = found[1], found[2]
    if letter == "p":
        return f"%#{flags.replace('#', '')}x"
    return f"%{flags}{_PYTHON_CONVERSIONS.get(letter, letter)}"


Writer = Callable[[int], int | None]
"""From a byte's offset in a buffer to the rank that writes it, None where several do."""


@dataclass
class Diagnostics:
    """Reads the context block of one device. Knows the kernels loaded there and the buffers that have names.

    Its counters say how far it has read; it rewinds the block when the device is idle.

    last  the fault that was raised last
    """

    artifacts: dict[int, list[Artifact]] = field(default_factory=dict[int, list[Artifact]])
    buffers: dict[int, tuple[int, str]] = field(default_factory=dict[int, tuple[int, str]])
    writers: dict[int, Writer] = field(default_factory=dict[int, "Writer"])
    last: KernelFault | None = None
    _faults_read: int = 0
    _logs_read: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _waits: Waits = field(default_factory=Waits)

    def register(self, artifact: Artifact) -> None:
        """Makes an artifact's sites known. Kernels that share a tag are told apart by nothing; a report then names each place."""
        known = self.artifacts.setdefault(artifact.site_tag, [])
        if not any(other is artifact or other.sites == artifact.sites for other in known):
            known.insert(0, artifact)

    def name_buffer(self, address: int, nbytes: int, label: str, writer: Writer | None = None) -> None:
        """Gives memory a name for reports, and says who writes it."""
        self.buffers[address] = (nbytes, label)
        if writer is not None:
            self.writers[address] = writer

    def forget_buffer(self, address: int) -> None:
        self.buffers.pop(address, None)
        self.writers.pop(address, None)

    def peek(self, words: NDArray[np.uint64]) -> list[str]:
        """What kernels have reported and nobody has raised yet, a line each, and what they wait for now, three each. Changes nothing.

        Lines that go on with the one above begin with a space.

        Takes `waits.APART_SECONDS` where a wait lasts (see `Waits.going_on`).
        """
        lines: list[str] = []
        for position in self._new(words):
            report = self._report(words, _record(words, position))
            what = "a wait timed out" if report.kind == layout.KIND_TIMEOUT else "a fault"
            lines.append(f"{what}: {report.kernel or 'unknown kernel'} at {report.place}: {report.site.text if report.site else ''}")
        groups: dict[int, list[Wait]] = {}
        for wait in self._waits.going_on(words):
            groups.setdefault(wait.site, []).append(wait)
        rank = int(words[layout.RANK])
        return [*dict.fromkeys(lines), *(line for group in groups.values() for line in self._waiting(rank, group))]

    def _waiting(self, rank: int, waits: list[Wait]) -> list[str]:
        """What waits for what at one place, for whom, and what is there; the wait that lasts longest comes first."""
        longest = waits[0]
        artifact, site = self._lookup(longest.site)
        dtype, buffer = _waited_dtype(site), self._buffer(longest.address)
        against = f" (compared with {decode_word(longest.expected, dtype)})" if longest.expected else ""
        holds = f"address {longest.address:#x} holds {decode_word(longest.last, dtype)}" + (f" ({buffer})" if buffer else "")
        more = f"; {len(waits)} words in all" if len(waits) > 1 else ""
        late = sorted({writer for wait in waits if (writer := self._writer(wait.address)) is not None})
        return [
            f"rank {rank} {artifact.name if artifact else 'unknown kernel'}: waiting for memory at {_place(site)}: "
            f"{site.text if site else 'a value'}{against} for {longest.seconds:.1f} s",
            f"  block {longest.block} thread {longest.thread}{f'; not yet from {_ranks(late)}' if late else ''}",
            f"  {holds}{more}",
        ]

    def reported(self, words: NDArray[np.uint64]) -> tuple[int, int]:
        """How many faults kernels have reported since the device was idle: that nobody has raised yet, and in all."""
        return len(self._new(words)), max(_stored(words), self._faults_read)

    def reporters(self, words: NDArray[np.uint64]) -> list[tuple[int, int]]:
        """The (block, thread) of each of those, without repeats."""
        records = [_record(words, position) for position in self._new(words)]
        return list(dict.fromkeys((record[layout.FAULT_BLOCK], record[layout.FAULT_THREAD]) for record in records))

    def _new(self, words: NDArray[np.uint64]) -> list[int]:
        """The positions of complete records nobody has raised yet."""
        positions = range(min(self._faults_read, layout.FAULT_CAPACITY), min(_stored(words), layout.FAULT_CAPACITY))
        return [p for p in positions if words[layout.FAULT_BASE + p * layout.FAULT_WORDS + layout.FAULT_READY]]

    def check(self, words: NDArray[np.uint64], idle: bool = True, detail: str = "", out: TextIO | None = None) -> None:
        """Prints the new log records, then raises the new faults if there are any.

        words   the context block (context_layout.CONTEXT_WORDS words of u64)
        idle    whether no kernel is running: everything is read and the block is rewound
        detail  a line for the end of the exception's text

        Raises PeerTimeout, DeviceAssertionError or KernelFault for the first record; it counts the others.
        """
        if idle and not self._faults_read and not self._logs_read and not words[layout.FAULT_COUNT] and not words[layout.LOG_COUNT]:
            return
        with self._lock:
            self._print_logs(words, idle, out or sys.stdout)
            fault = self._first_fault(words, idle)
        if fault is not None:
            self.last = fault
            fault.detail = detail
            raise fault

    def _print_logs(self, words: NDArray[np.uint64], idle: bool, out: TextIO) -> None:
        count = int(words[layout.LOG_COUNT])
        rank = int(words[layout.RANK])
        position = min(self._logs_read, layout.LOG_CAPACITY)
        stored = min(count, layout.LOG_CAPACITY)
        lines: list[str] = []
        while position < stored:
            base = layout.LOG_BASE + position * layout.LOG_WORDS
            record = [int(word) for word in words[base : base + layout.LOG_WORDS]]
            if not record[layout.LOG_READY]:
                if not idle:
                    break
                lines.append(f"[rank {rank}] a printf record was left incomplete")
            else:
                lines.append(self._log_line(rank, record))
            words[base + layout.LOG_READY] = 0
            position += 1
        if idle and count > layout.LOG_CAPACITY:
            lost = count - layout.LOG_CAPACITY
            lines.append(f"[rank {rank}] {lost} printf records lost: a device holds {layout.LOG_CAPACITY} between two synchronisations")
        self._logs_read = 0 if idle else position
        if idle:
            words[layout.LOG_COUNT] = 0
        if lines:
            out.write("\n".join(lines) + "\n")
            out.flush()

    def _log_line(self, rank: int, record: list[int]) -> str:
        _, site = self._lookup(record[layout.LOG_SITE])
        prefix = f"[rank {rank} block {record[layout.LOG_BLOCK]} thread {record[layout.LOG_THREAD]}]"
        words = record[layout.LOG_VALUES :]
        if site is None:
            return f"{prefix} a printf of an unknown kernel (site word {record[layout.LOG_SITE]:#x})"
        values = [decode_word(word, dtype) for word, dtype in zip(words, site.operand_dtypes, strict=False)]
        return f"{prefix} {format_values(site.text, values)}"

    def _first_fault(self, words: NDArray[np.uint64], idle: bool) -> KernelFault | None:
        count = _stored(words)
        new = count - self._faults_read
        fault: KernelFault | None = None
        if new > 0:
            stored = min(count, layout.FAULT_CAPACITY)
            positions = range(min(self._faults_read, layout.FAULT_CAPACITY), stored)
            ready = self._new(words)
            chosen = self._first_to_tell(words, ready) if ready else (positions[0] if positions else layout.FAULT_CAPACITY - 1)
            if ready or idle or not positions:
                record = _record(words, chosen)
                report = self._report(words, record)
                if report.kind == layout.KIND_TIMEOUT:
                    report = replace(report, peers=self._missing(words, record[layout.FAULT_SITE], ready))
                fault = _CLASSES.get(report.kind, KernelFault)(report, new)
                self._faults_read = count
        if idle:
            words[layout.FAULT_BASE : layout.LOG_BASE] = 0
            words[layout.FAULT_COUNT] = 0
            self._faults_read = 0
        return fault

    def _first_to_tell(self, words: NDArray[np.uint64], ready: list[int]) -> int:
        """The first record; but of waits that ran out the first that was for another rank: others of a grid wait for that one."""
        records = [_record(words, position) for position in ready]
        if records[0][layout.FAULT_KIND] != layout.KIND_TIMEOUT:
            return ready[0]
        for position, record in zip(ready, records, strict=True):
            writer = self._writer(record[layout.FAULT_ADDRESS]) if record[layout.FAULT_KIND] == layout.KIND_TIMEOUT else None
            if writer is not None and writer != int(words[layout.RANK]):
                return position
        return ready[0]

    def _missing(self, words: NDArray[np.uint64], site: int, positions: list[int]) -> tuple[int, ...]:
        """Who was to write what the waits at a place were for."""
        records = [_record(words, position) for position in positions]
        found = {self._writer(record[layout.FAULT_ADDRESS]) for record in records if record[layout.FAULT_SITE] == site}
        return tuple(sorted(rank for rank in found if rank is not None))

    def _writer(self, address: int) -> int | None:
        for start, writer in self.writers.items():
            if start <= address < start + self.buffers[start][0]:
                return writer(address - start)
        return None

    def _report(self, words: NDArray[np.uint64], record: list[int]) -> FaultReport:
        artifact, site = self._lookup(record[layout.FAULT_SITE])
        others = [a for a in self.artifacts.get(record[layout.FAULT_SITE] >> 32, []) if a is not artifact]
        note = "" if record[layout.FAULT_READY] else "the record was left incomplete: the kernel died while writing it"
        if others:
            note = f"{note}; " if note else ""
            note += f"{len(others)} other kernel(s) loaded here share the name, target and constants: the place may be theirs"
        return FaultReport(
            kind=record[layout.FAULT_KIND],
            rank=int(words[layout.RANK]),
            kernel=artifact.name if artifact else None,
            site=site,
            block=record[layout.FAULT_BLOCK],
            thread=record[layout.FAULT_THREAD],
            address=record[layout.FAULT_ADDRESS],
            buffer=self._buffer(record[layout.FAULT_ADDRESS]),
            expected=record[layout.FAULT_EXPECTED],
            last=record[layout.FAULT_LAST],
            note=note,
        )

    def _lookup(self, word: int) -> tuple[Artifact | None, Site | None]:
        number = word & 0xFFFF_FFFF
        for artifact in self.artifacts.get(word >> 32, []):
            if number < len(artifact.sites):
                return artifact, artifact.sites[number]
        return None, None

    def _buffer(self, address: int) -> str | None:
        for start, (nbytes, label) in self.buffers.items():
            if start <= address < start + nbytes:
                return f"{label} + {address - start} bytes"
        return None


def _stored(words: NDArray[np.uint64]) -> int:
    """How many records there are. While a kernel runs its counter may not have reached the host, but a record that is complete has."""
    ready = words[layout.FAULT_BASE + layout.FAULT_READY : layout.LOG_BASE : layout.FAULT_WORDS].nonzero()[0]
    return max(int(words[layout.FAULT_COUNT]), int(ready[-1]) + 1 if len(ready) else 0)


def _record(words: NDArray[np.uint64], position: int) -> list[int]:
    base = layout.FAULT_BASE + position * layout.FAULT_WORDS
    return [int(word) for word in words[base : base + layout.FAULT_WORDS]]
