"""One rank of a job: its place among the others, its device, and memory that all ranks reach."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .array import Allocation, DeviceArray, PeerTable, allocate_array
from .bootstrap import Bootstrap, SoloBootstrap
from .context_layout import RANK
from .dtypes import Element, element

if TYPE_CHECKING:
    from .protocol import Device

# CUDA gives small allocations out of shared blocks and exports the whole block; a buffer of its own blocks exports nothing else.
IPC_GRANULE = 2 << 20


@dataclass(frozen=True)
class Symmetric:
    """A buffer that every rank has one of.

    local  this rank's own
    peers  the table by which a kernel reaches every rank's; entry `index` leads to `local`
    """

    local: DeviceArray
    peers: PeerTable
    name: str
    allocation: Allocation


@dataclass(frozen=True)
class _Call:
    """What a rank says in a collective call, so that ranks that are in different calls notice."""

    operation: str
    agreed: tuple[Any, ...] = ()
    value: Any = None
    error: str | None = None


class CollectiveError(RuntimeError):
    """A collective call failed on every rank alike; the job can go on."""


class Rank:
    """A rank of a job. All ranks call the collective methods (marked so) in the same order.

    index   0 to size - 1
    size    ranks of the job
    device  this rank's device
    """

    def __init__(self, index: int, size: int, device: Device, bootstrap: Bootstrap | None = None) -> None:
        self.index = index
        self.size = size
        self.device = device
        self.bootstrap: Bootstrap = bootstrap or SoloBootstrap()
        if (self.bootstrap.index, self.bootstrap.size) != (index, size):
            raise ValueError(f"rank {index} of {size} was given the connection of rank {self.bootstrap.index} of {self.bootstrap.size}")
        self._symmetric: list[Symmetric] = []
        self._callbacks: list[Callable[[], None]] = []
        self._count = 0
        self._closed = False
        device.context_words[RANK] = index

    def __repr__(self) -> str:
        return f"<rank {self.index} of {self.size} on {self.device.info.kind}:{self.device.info.index}>"

    def __enter__(self) -> Rank:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if error is None:
            self.close()
        else:
            self.bootstrap.abort("".join(traceback.format_exception(kind, error, trace)))

    def array(self, source: Any, dtype: Any = None) -> DeviceArray:
        """A copy of `source` (anything NumPy reads) on this rank's device, as `dtype` or as NumPy reads it."""
        host = (
            np.ascontiguousarray(source)
            if dtype is None
            else np.ascontiguousarray(np.asarray(source).astype(element(dtype).numpy, copy=False))
        )
        out = allocate_array(self.device, np.shape(source), host.dtype)
        return out.copy_from(host.reshape(out.shape))

    def empty(self, dtype: Any, shape: int | Sequence[int]) -> DeviceArray:
        """A new array on this rank's device, contents undefined."""
        return allocate_array(self.device, (shape,) if isinstance(shape, (int, np.integer)) else shape, dtype)

    def zeros(self, dtype: Any, shape: int | Sequence[int]) -> DeviceArray:
        """A new array on this rank's device, all bytes 0 before anything launched later."""
        out = self.empty(dtype, shape).zero()
        self.device.synchronize()
        return out

    def symmetric(self, dtype: Any, shape: int | Sequence[int], name: str | None = None) -> Symmetric:
        """Collective: a buffer on every rank, all bytes 0, each mapped into every other rank.

        name  what reports call it

        Raises CollectiveError on every rank when dtype or shape differ, or when one rank could not allocate or map.
        """
        kind = element(dtype)
        extents = (int(shape),) if isinstance(shape, (int, np.integer)) else tuple(int(n) for n in shape)
        label = name or f"symmetric buffer {self._count}"
        self._count += 1
        local: DeviceArray | None = None
        handle: Any = None
        problem: str | None = None
        try:
            local = self._allocate_symmetric(kind, extents, label)
            handle = self.device.export_memory(local.address)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        try:
            handles = self._collect(_Call("symmetric", (kind.name, kind.nbytes, extents), handle, problem))
            assert local is not None
            return self._map(local, handles, label)
        except CollectiveError:
            # Every rank is here and none has the memory mapped. After any other failure a peer may still be using it.
            if local is not None and local._owner is not None:
                local._owner.release()
            raise

    def _allocate_symmetric(self, kind: Element, extents: tuple[int, ...], label: str) -> DeviceArray:
        nbytes = max(int(np.prod(extents, dtype=object)) * kind.nbytes, 1)
        granule = 16 if self.device.info.kind == "sim" else IPC_GRANULE
        room = -(-nbytes // granule) * granule
        address = self.device.allocate(room)
        allocation = Allocation(self.device, address, room, kept_by=f"{label} of {self!r}")
        try:
            self.device.memset(address, 0, room)
            self.device.synchronize()
        except BaseException:
            allocation.release()
            raise
        return DeviceArray(self.device, address, extents, kind, allocation)

    def _map(self, local: DeviceArray, handles: list[Any], label: str) -> Symmetric:
        addresses: list[int] = []
        problem: str | None = None
        table: DeviceArray | None = None
        try:
            for peer, handle in enumerate(handles):
                addresses.append(local.address if peer == self.index else self.device.open_memory(handle))
            table = allocate_array(self.device, (self.size,), "u64").copy_from(np.array(addresses, np.uint64))
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        try:
            self._collect(_Call("symmetric mapping", error=problem))
        except CollectiveError:
            for peer, address in enumerate(addresses):
                if peer != self.index:
                    self.device.close_memory(address)
            self._collect(_Call("symmetric undo"))
            raise
        assert table is not None and local._owner is not None
        for peer, address in enumerate(addresses):
            self.device.diagnostics.name_buffer(
                address, max(local.nbytes, 1), f"{label} ({local.dtype_name} {list(local.shape)}) of rank {peer}"
            )
        made = Symmetric(local, PeerTable(table, local.element, local.nbytes, addresses), label, local._owner)
        self._symmetric.append(made)
        return made

    def release(self, *buffers: Symmetric) -> None:
        """Collective: frees symmetric buffers. Every rank unmaps its peers' before any rank frees its own."""
        for made in buffers:
            if made not in self._symmetric:
                raise ValueError(f"{made.name} is no symmetric buffer of {self!r}, or it was released already")
        self.device.synchronize()
        self._release("release", buffers)

    def _release(self, operation: str, buffers: Sequence[Symmetric]) -> None:
        self._collect(_Call(operation, tuple(made.name for made in buffers)))
        problem: str | None = None
        for made in buffers:
            self._symmetric.remove(made)
            for peer, address in enumerate(made.peers.addresses):
                self.device.diagnostics.forget_buffer(address)
                if peer != self.index:
                    try:
                        self.device.close_memory(address)
                    except Exception as error:
                        problem = f"{type(error).__name__}: {error}"
        self._collect(_Call(f"{operation} mapping", error=problem))
        for made in buffers:
            made.peers.table.free()
            made.allocation.release()

    def allgather(self, value: Any) -> list[Any]:
        """Collective: every rank's value (picklable), by rank."""
        return self._collect(_Call("allgather", value=value))

    def _collect(self, call: _Call) -> list[Any]:
        calls: list[_Call] = self.bootstrap.allgather(call)
        for peer, other in enumerate(calls):
            if other.operation != call.operation:
                raise RuntimeError(
                    f"rank {self.index} is in {call.operation}, rank {peer} in {other.operation}: all ranks must make the same calls"
                )
        for peer, other in enumerate(calls):
            if other.agreed != call.agreed:
                raise CollectiveError(
                    f"{call.operation} differs by rank: rank {self.index} has {call.agreed}, rank {peer} has {other.agreed}"
                )
        failed = [(peer, other.error) for peer, other in enumerate(calls) if other.error is not None]
        if failed:
            raise CollectiveError(f"{call.operation} failed on rank {failed[0][0]} ({len(failed)} of {self.size} ranks): {failed[0][1]}")
        return [other.value for other in calls]

    def on_synchronize(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Has `callback` run after every later synchronisation of this rank. Returns what takes it out again."""
        self._callbacks.append(callback)

        def remove() -> None:
            if callback in self._callbacks:
                self._callbacks.remove(callback)

        return remove

    def synchronize(self) -> None:
        """Waits for everything this rank's device was given.

        Raises what the kernels reported, or RankFailed when a rank is known to be gone.
        """
        self.device.synchronize()
        for callback in list(self._callbacks):
            callback()
        self.bootstrap.check()

    def barrier(self) -> None:
        """Collective: synchronises, then waits for all ranks to have done so."""
        self.synchronize()
        self._collect(_Call("barrier"))

    def close(self) -> None:
        """Collective: synchronises, frees the symmetric buffers and leaves the job. The device is closed too."""
        if self._closed:
            return
        self._closed = True
        self.synchronize()
        self._release("close", tuple(self._symmetric))
        self.device.close()
        self.bootstrap.close()
