"""Which kind of peer memory the ranks of a job use: the first that works between all of them, found by trying.

Trying means everything a buffer needs: every rank allocates and exports, opens every other rank's memory, writes into it and finds what the
others wrote in its own. What a driver promises is not believed: an H200 may claim fabric handles and refuse to make one.
"""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .env import PEER_MEMORY
from .errors import CodedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from .protocol import Device

    Gather = Callable[[str, tuple[Any, ...], Any], list[Any]]

log = logging.getLogger("epdsl.runtime")
AUTO = "auto"
KINDS = ("fabric", "fd", "ipc")


@dataclass(frozen=True)
class Sharing:
    """The kind in use, and why those before it were not taken: (kind, reason)."""

    kind: str
    refused: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return self.kind + (f" ({'; '.join(f'no {kind}: {why}' for kind, why in self.refused)})" if self.refused else "")


class NoSharing(CodedError, RuntimeError):
    """No kind of peer memory works between the ranks, or not the one that was asked for."""


def check_kind(wanted: str | None) -> None:
    """Raises ValueError for a text that names no kind of peer memory on any device."""
    if wanted is not None and wanted not in (AUTO, *KINDS):
        raise ValueError(f"peer memory by {wanted!r}: it is {', '.join(KINDS)} or {AUTO}")


def try_here(device: Device) -> list[tuple[str, str | None]]:
    """Every kind the device's driver knows, with the reason when it cannot even be allocated and exported."""
    found: list[tuple[str, str | None]] = []
    for kind in device.share_kinds:
        try:
            address, _ = device.allocate_shared(1, kind)
            try:
                device.export_memory(address)
            finally:
                device.free(address)
            found.append((kind, None))
        except Exception as error:
            found.append((kind, _first_line(error)))
    return found


def choose(device: Device, index: int, size: int, gather: Gather, wanted: str | None = None) -> Sharing:
    """Collective: the kind for this job.

    wanted  a kind, "auto", or None for what EPDSL_PEER_MEMORY says; equal on every rank
    gather  (operation, what must be equal, this rank's value) -> every rank's value

    Raises NoSharing on every rank alike, ValueError for a kind that the device does not have.
    """
    wanted = wanted or PEER_MEMORY.get()
    kinds = device.share_kinds
    if len(kinds) == 1 and (wanted in (AUTO, kinds[0]) or device.info.kind == "sim"):
        return Sharing(kinds[0])
    if wanted != AUTO and wanted not in kinds:
        raise ValueError(f"peer memory by {wanted!r}: {device!r} has {', '.join(kinds)} (EPDSL_PEER_MEMORY, or {AUTO})")
    devices = gather("peer memory", (wanted,), device.info.uuid)
    _warn_of_shared_devices(index, devices)
    refused: list[tuple[str, str]] = []
    for kind in kinds if wanted == AUTO else (wanted,):
        why = _trial(device, kind, index, size, gather)
        if why is None:
            made = Sharing(kind, tuple(refused))
            log.info("rank %d of %d, %s: peer memory by %s", index, size, device.info.uuid or device, made)
            return made
        refused.append((kind, why))
    text = "; ".join(f"{kind}: {why}" for kind, why in refused)
    if wanted != AUTO:
        raise NoSharing("EP315", f"peer memory by {wanted} was asked for (EPDSL_PEER_MEMORY) and does not work: {text}")
    raise NoSharing("EP315", f"no kind of peer memory works between the {size} ranks: {text}")


def _trial(device: Device, kind: str, index: int, size: int, gather: Gather) -> str | None:
    """Why a kind does not work between the ranks, None when it does. Every rank comes to the same answer."""
    address: int | None = None
    opened: list[int] = []

    def step(name: str, act: Callable[[], Any]) -> tuple[str | None, list[Any]]:
        try:
            mine = (None, act())
        except Exception as error:
            mine = (_first_line(error), None)
        every = gather(f"peer memory by {kind}: {name}", (), mine)
        failed = [f"rank {rank}: {why}" for rank, (why, _) in enumerate(every) if why is not None]
        return (failed[0] if failed else None), [value for _, value in every]

    def export() -> Any:
        nonlocal address
        address, room = device.allocate_shared(4 * size, kind)
        device.memset(address, 0xFF, room)
        device.synchronize()
        return device.export_memory(address)

    def write() -> None:
        for rank, handle in enumerate(handles):
            where = address if rank == index else device.open_memory(handle)
            assert where is not None
            if rank != index:
                opened.append(where)
            device.upload(where + 4 * index, np.array([index], np.int32))
        device.synchronize()

    def read() -> None:
        assert address is not None
        found = np.empty(size, np.int32)
        device.download(found, address)
        if found.tolist() != list(range(size)):
            raise RuntimeError(f"the ranks wrote their numbers into one another's memory and rank {index} found {found.tolist()}")

    def close() -> None:
        for where in opened:
            device.close_memory(where)

    why, handles = step("export", export)
    if why is None:
        why, _ = step("write", write)
        if why is None:
            why, _ = step("read", read)
        ended, _ = step("close", close)
        why = why or ended
    if address is not None:
        device.free(address)
    return why


def _warn_of_shared_devices(index: int, devices: list[str]) -> None:
    mine = devices[index]
    others = [rank for rank, device in enumerate(devices) if device == mine and rank != index]
    if mine and others:
        warnings.warn(
            f"ranks {', '.join(map(str, sorted([index, *others])))} are all on {mine}: kernels that wait for one another take turns there; "
            "give each rank a GPU of its own",
            stacklevel=2,
        )


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
