"""Device memory in a reserved address range, which other processes map through a file descriptor or a fabric handle (CUDA, HIP).

An allocation is created, exported, mapped and made accessible; its handle is released at once, as the mapping keeps it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Payload = int | bytes


@dataclass(frozen=True)
class Mapping:
    """Memory mapped at `address`.

    sizes    bytes of each allocation mapped there, in order
    payload  what `kind` exports of memory created here: a file descriptor, which `unmap` closes, or a fabric handle's bytes
    """

    address: int
    sizes: tuple[int, ...]
    payload: Payload | None = None

    @property
    def nbytes(self) -> int:
        return sum(self.sizes)


class Calls(Protocol):
    """The driver's calls for it. `kind` is "fd" or "fabric"; a handle is the driver's for an allocation."""

    def granularity(self, kind: str) -> int: ...
    def create(self, nbytes: int, kind: str) -> Any: ...
    def export(self, handle: Any, kind: str) -> Payload: ...
    def import_(self, payload: Payload, kind: str) -> Any: ...
    def release(self, handle: Any) -> None: ...
    def reserve(self, nbytes: int, alignment: int) -> int: ...
    def unreserve(self, address: int, nbytes: int) -> None: ...
    def map(self, address: int, nbytes: int, handle: Any) -> None: ...
    def unmap(self, address: int, nbytes: int) -> None: ...
    def allow(self, address: int, nbytes: int) -> None:
        """Lets this device read and write it."""
        ...


class ForeignCalls(Calls, Protocol):
    """Those of a driver that also shares memory which another library mapped."""

    def retain(self, address: int) -> Any: ...


def create(calls: Calls, nbytes: int, kind: str) -> Mapping:
    """New memory of at least `nbytes`, mapped here and exported. Raises DriverError."""
    granule = calls.granularity(kind)
    room = -(-nbytes // granule) * granule
    handle = calls.create(room, kind)
    try:
        payload = calls.export(handle, kind)
        try:
            return Mapping(_mapped(calls, [(lambda: handle, room)], granule, keep=True), (room,), payload)
        except BaseException:
            close_payload(payload)
            raise
    finally:
        calls.release(handle)


def open_shared(calls: Calls, parts: Sequence[tuple[Payload, int]], kind: str) -> Mapping:
    """Maps another process's allocations one after another. Raises DriverError; the payloads stay the caller's."""
    made = [(lambda payload=payload: calls.import_(payload, kind), nbytes) for payload, nbytes in parts]
    return Mapping(_mapped(calls, made, 0, keep=False), tuple(nbytes for _, nbytes in parts))


def _mapped(calls: Calls, parts: Sequence[tuple[Callable[[], Any], int]], alignment: int, keep: bool) -> int:
    total = sum(nbytes for _, nbytes in parts)
    address = calls.reserve(total, alignment)
    done: list[tuple[int, int]] = []
    try:
        at = address
        for make, nbytes in parts:
            handle = make()
            try:
                calls.map(at, nbytes, handle)
            finally:
                if not keep:
                    calls.release(handle)
            done.append((at, nbytes))
            at += nbytes
        calls.allow(address, total)
    except BaseException:
        for at, nbytes in done:
            calls.unmap(at, nbytes)
        calls.unreserve(address, total)
        raise
    return address


def unmap(calls: Calls, mapping: Mapping) -> None:
    """Gives a mapping back. The memory itself goes when nobody has it mapped or exported."""
    at = mapping.address
    for nbytes in mapping.sizes:
        calls.unmap(at, nbytes)
        at += nbytes
    calls.unreserve(mapping.address, mapping.nbytes)
    close_payload(mapping.payload)


def close_payload(payload: Payload | None) -> None:
    """Closes a file descriptor; anything else needs nothing."""
    if isinstance(payload, int):
        os.close(payload)
