"""The memory of one GPU that other ranks reach: how it is allocated, handed to them and mapped by them.

There are three kinds, and which of them works depends on the driver, the container and the machine (see `sharing`):

    fabric  a handle that also reaches other machines of the same NVLink domain
    fd      a file descriptor, passed over a Unix socket (fd_passing)
    ipc     CUDA's and HIP's own handles for memory of their plain allocators
"""

from __future__ import annotations

import socket
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import fd_passing, virtual_memory
from .errors import CodedError
from .virtual_memory import ForeignCalls, Mapping

if TYPE_CHECKING:
    from .driver_device import Driver

# CUDA gives small allocations out of shared blocks and exports the whole block; a buffer of its own blocks exports nothing else.
IPC_GRANULE = 2 << 20

# One per process: an address is only meaningful in the process whose token the handle carries.
PROCESS = uuid.uuid4().hex


def _machine() -> str:
    # Containers of one machine have names of their own.
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()


MACHINE = _machine()


class SharingError(CodedError, RuntimeError):
    """Memory cannot be handed to another rank, or opened by one; the text says why."""


@dataclass(frozen=True)
class MemoryHandle:
    """By which another rank opens memory. Can be pickled.

    kind     the device's kind, "cuda" or "hip"
    how      "fabric", "fd" or "ipc"
    address  in the process that owns it
    nbytes   from that address on
    offset   where they begin in the first part
    parts    (what opens an allocation, its bytes), in order of addresses
    """

    kind: str
    how: str
    machine: str
    process: str
    index: int
    address: int
    nbytes: int
    offset: int
    parts: tuple[tuple[Any, int], ...]


@dataclass
class _Exported:
    """What was handed out for an address: taken back when it is freed."""

    how: str
    parts: tuple[tuple[Any, int], ...]
    tickets: list[fd_passing.Ticket] = field(default_factory=list[fd_passing.Ticket])
    close: Callable[[], None] = lambda: None


class PeerMemory:
    """Everything of one device that is shared. `place` names the device in errors, `index` is its number in this process."""

    def __init__(self, driver: Driver, place: str, index: int) -> None:
        self._driver = driver
        self._place = place
        self._index = index
        self._created: dict[int, tuple[Mapping, str]] = {}
        self._exported: dict[int, _Exported] = {}
        # Opened addresses: what ends each use.
        self._opened: dict[int, list[Callable[[], None]]] = {}
        # The driver opens an IPC handle once a process.
        self._ipc: dict[bytes, tuple[int, int]] = {}

    def allocate(self, nbytes: int, how: str) -> tuple[int, int]:
        """Memory of kind `how` ("fabric" or "fd") and its bytes, at least `nbytes`. Raises DriverError."""
        made = virtual_memory.create(self._driver.virtual, nbytes, how)
        self._created[made.address] = (made, how)
        return made.address, made.nbytes

    def owns(self, address: int) -> bool:
        return address in self._created

    def free(self, address: int) -> None:
        """Frees memory of `allocate`."""
        self.withdraw(address)
        mapping, _ = self._created.pop(address)
        virtual_memory.unmap(self._driver.virtual, mapping)

    def export(self, address: int, nbytes: int) -> MemoryHandle:
        """A handle of an allocation, plain or of `allocate`. Raises DriverError when the driver gives none."""
        found = self._exported.get(address)
        if found is None:
            if address in self._created:
                mapping, how = self._created[address]
                found = self._offered(how, [(mapping.payload, mapping.nbytes)])
            else:
                found = _Exported("ipc", ((self._driver.ipc_handle(address), nbytes),))
            self._exported[address] = found
        return self._handle(found, address, nbytes, 0)

    def export_foreign(self, address: int, nbytes: int) -> MemoryHandle:
        """A handle of memory that another library allocated. `withdraw` ends it; the library must keep the memory until then.

        Raises SharingError when its allocator made it in a way that cannot be shared.
        """
        from .driver_device import DriverError

        calls = self._driver.foreign
        if isinstance(calls, str):
            raise SharingError("EP314", f"the {nbytes} bytes at 0x{address:x} on {self._place} cannot be shared with other ranks: {calls}")
        problems: list[str] = []
        for attempt in (lambda: self._foreign_ipc(address), lambda: self._foreign_parts(calls, address, nbytes)):
            try:
                found, offset = attempt()
            except DriverError as error:
                problems.append(str(error))
                continue
            self._exported[address] = found
            return self._handle(found, address, nbytes, offset)
        raise SharingError(
            "EP314",
            f"the {nbytes} bytes at 0x{address:x} on {self._place} cannot be shared with other ranks: their allocator made them without a "
            f"handle for other processes ({'; '.join(problems)}). Use rank.symmetric(...), or an allocator that exports "
            "(PyTorch's default one does)",
        )

    def _foreign_ipc(self, address: int) -> tuple[_Exported, int]:
        base, room = self._driver.allocation_of(address)
        return _Exported("ipc", ((self._driver.ipc_handle(base), room),)), address - base

    def _foreign_parts(self, calls: ForeignCalls, address: int, nbytes: int) -> tuple[_Exported, int]:
        payloads: list[tuple[Any, int]] = []
        base, room = self._driver.allocation_of(address)
        offset, at = address - base, base
        try:
            while at < address + nbytes:
                _, room = self._driver.allocation_of(at)
                handle = calls.retain(at)
                try:
                    payloads.append((calls.export(handle, "fd"), room))
                finally:
                    calls.release(handle)
                at += room
        except BaseException:
            _close_all(payloads)
            raise
        return self._offered("fd", payloads, lambda: _close_all(payloads)), offset

    def _offered(self, how: str, payloads: Sequence[tuple[Any, int]], close: Callable[[], None] = lambda: None) -> _Exported:
        if how != "fd":
            return _Exported(how, tuple(payloads), close=close)
        tickets = [fd_passing.offer(payload) for payload, _ in payloads]
        return _Exported(how, tuple((ticket, room) for ticket, (_, room) in zip(tickets, payloads, strict=True)), tickets, close)

    def _handle(self, found: _Exported, address: int, nbytes: int, offset: int) -> MemoryHandle:
        return MemoryHandle(self._driver.kind, found.how, MACHINE, PROCESS, self._index, address, nbytes, offset, found.parts)

    def withdraw(self, address: int) -> None:
        """Ends the offers of an address. Who has opened it keeps it."""
        found = self._exported.pop(address, None)
        if found is not None:
            for ticket in found.tickets:
                fd_passing.withdraw(ticket)
            found.close()

    def open(self, handle: MemoryHandle) -> int:
        """The address by which this device reaches the memory. Give it back with `close`.

        Raises SharingError for memory out of reach, DriverError when the driver refuses.
        """
        if handle.kind != self._driver.kind:
            raise ValueError(f"memory of a {handle.kind} device cannot be opened on {self._place}")
        if handle.process == PROCESS and handle.how == "ipc":
            if handle.index != self._index:
                self._driver.enable_peer(handle.index)
            return handle.address
        if handle.machine != MACHINE and handle.how != "fabric":
            raise SharingError("EP314", f"memory of another machine cannot be opened by {handle.how}: it reaches the GPUs of one machine")
        if handle.how == "ipc":
            return self._open_ipc(handle)
        fetched: list[tuple[Any, int]] = []
        try:
            for part, room in handle.parts:
                fetched.append((fd_passing.fetch(part) if handle.how == "fd" else part, room))
            mapping = virtual_memory.open_shared(self._driver.virtual, fetched, handle.how)
        finally:
            _close_all(fetched)
        address = mapping.address + handle.offset
        self._opened.setdefault(address, []).append(lambda: virtual_memory.unmap(self._driver.virtual, mapping))
        return address

    def _open_ipc(self, handle: MemoryHandle) -> int:
        opaque: bytes = handle.parts[0][0]
        base, count = self._ipc.get(opaque, (0, 0))
        base = base or self._driver.ipc_open(opaque)
        self._ipc[opaque] = (base, count + 1)
        address = base + handle.offset

        def close() -> None:
            base, count = self._ipc.pop(opaque)
            if count > 1:
                self._ipc[opaque] = (base, count - 1)
            else:
                self._driver.ipc_close(base)

        self._opened.setdefault(address, []).append(close)
        return address

    def close(self, address: int) -> None:
        """Ends the use of an address that `open` returned."""
        ends = self._opened.get(address)
        if ends:
            ends.pop()()
            if not ends:
                del self._opened[address]

    def close_all(self) -> None:
        """Closes what is open, then frees what was allocated here."""
        while self._opened:
            self.close(next(iter(self._opened)))
        for address in list(self._created):
            self.free(address)
        for address in list(self._exported):
            self.withdraw(address)


def _close_all(payloads: Sequence[tuple[Any, int]]) -> None:
    for payload, _ in payloads:
        virtual_memory.close_payload(payload)
