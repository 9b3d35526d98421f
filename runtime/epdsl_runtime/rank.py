"""One rank of a job: its place among the others, its device, and memory that all ranks reach."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from . import VERSION
from .array import Allocation, DeviceArray, PeerTable, allocate_array, extents
from .bootstrap import DEFAULT_TIMEOUT, Bootstrap, CollectiveError, Disagreement, OutOfStep, RankFailed, SoloBootstrap, tell
from .context_layout import RANK
from .dtypes import Element, element
from .errors import shown
from .faults import KernelFault, PeerTimeout
from .foreign import foreign_array
from .graph import Graph, capture, refuse_in_capture
from .health import Activity, Health
from .sharing import Sharing, choose

if TYPE_CHECKING:
    from .protocol import Device


@dataclass(frozen=True)
class Symmetric:
    """A buffer that every rank has one of.

    local  this rank's own
    peers  the table by which a kernel reaches every rank's; entry `index` leads to `local`
    source the other library's array that it is, None for a buffer of ours
    """

    local: DeviceArray
    peers: PeerTable
    name: str
    allocation: Allocation | None
    source: Any = None


@dataclass(frozen=True)
class _Call:
    """What a rank says in a collective call, so that ranks that are in different calls notice."""

    operation: str
    agreed: tuple[Any, ...] = ()
    value: Any = None
    error: str | None = None
    version: str = VERSION


class Rank:
    """A rank of a job. All ranks call the collective methods (marked so) in the same order.

    index   0 to size - 1
    size    ranks of the job
    device  this rank's device
    originals  the number that each rank of the job had when it started, by its number now (see `shrink`)

    peer_memory  "fabric", "fd", "ipc" or "auto"; by default what EPDSL_PEER_MEMORY says. Equal on every rank.
    """

    def __init__(
        self,
        index: int,
        size: int,
        device: Device,
        bootstrap: Bootstrap | None = None,
        peer_memory: str | None = None,
        originals: Sequence[int] | None = None,
    ) -> None:
        self.index = index
        self.size = size
        self.device = device
        self.originals = tuple(range(size) if originals is None else originals)
        self.bootstrap: Bootstrap = bootstrap or SoloBootstrap()
        if (self.bootstrap.index, self.bootstrap.size) != (index, size):
            raise ValueError(f"rank {index} of {size} was given the connection of rank {self.bootstrap.index} of {self.bootstrap.size}")
        self._symmetric: list[Symmetric] = []
        self._callbacks: list[Callable[[], None]] = []
        self._count = 0
        self._closed = False
        self._successor: Rank | None = None
        self._wanted_sharing = peer_memory
        self._sharing: Sharing | None = None
        self._doing = (_OWN_WORK, time.monotonic())
        device.context_words[RANK] = index
        # Weak: the connection lives as long as the process.
        held = weakref.ref(self)
        self.bootstrap.report(lambda: _activity(held()))

    @property
    def original(self) -> int:
        """The number that this rank had when the job started."""
        return self.originals[self.index]

    def __repr__(self) -> str:
        return f"<rank {self.index} of {self.size} on {self.device.info.kind}:{self.device.info.index}>"

    def __enter__(self) -> Rank:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if error is None:
            self.close()
        else:
            tell(self.bootstrap, error)

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
        return allocate_array(self.device, shape, dtype)

    def zeros(self, dtype: Any, shape: int | Sequence[int]) -> DeviceArray:
        """A new array on this rank's device, all bytes 0 before anything launched later."""
        out = self.empty(dtype, shape).zero()
        self.device.synchronize()
        return out

    def sharing(self) -> Sharing:
        """Collective when first called, as the first symmetric buffer does: how this job's ranks reach one another's memory.

        Raises NoSharing when no way works, ValueError for a kind that the device does not have.
        """
        if self._sharing is None:
            self._sharing = choose(
                self.device,
                self.index,
                self.size,
                lambda operation, agreed, value: self._collect(_Call(operation, agreed, value)),
                self._wanted_sharing,
            )
        return self._sharing

    def register(self, array: Any, name: str | None = None) -> Symmetric:
        """Collective: the memory of another library's array (a torch tensor, ...) as a symmetric buffer, without a copy.

        Every rank gives an array of the same shape and element type, contiguous and on its device; it is kept until `release`. Its contents
        stay as they are.

        Raises CollectiveError on every rank when shape or type differ, or when one rank's memory cannot be shared or mapped; TypeError or
        ValueError for what is no such array.
        """
        self._refuse_when_left()
        label = name or f"registered buffer {self._count}"
        found = foreign_array(label, array, self.device)
        if found is None:
            raise TypeError(f"{label}: {type(array).__name__} is no array of another library on this device; use symmetric()")
        self._count += 1
        local = DeviceArray(self.device, found.address, found.shape, found.dtype)
        handle: Any = None
        problem: str | None = None
        if not local.nbytes:
            raise ValueError(f"{label}: an array of no elements has no memory to share")
        try:
            handle = self.device.export_foreign(local.address, local.nbytes)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        try:
            handles = self._collect(_Call("register", (local.dtype_name, local.element.nbytes, local.shape), handle, problem))
            return self._map(local, handles, label, array)
        except CollectiveError:
            self.device.withdraw_foreign(local.address)
            raise

    def symmetric(
        self, dtype: Any, shape: int | Sequence[int], name: str | None = None, writer: Callable[[int], int | None] | None = None
    ) -> Symmetric:
        """Collective: a buffer on every rank, all bytes 0, each mapped into every other rank.

        name    what reports call it
        writer  from an element's index in this rank's own buffer to the rank that writes it: a wait there that runs out then names it

        Raises CollectiveError on every rank when dtype or shape differ, or when one rank could not allocate or map; TypeError or ValueError
        for what is no shape.
        """
        kind, lengths = element(dtype), extents(shape)
        self._refuse_when_left()
        label = name or f"symmetric buffer {self._count}"
        self._count += 1
        sharing = self.sharing()
        local: DeviceArray | None = None
        handle: Any = None
        problem: str | None = None
        try:
            local = self._allocate_symmetric(kind, lengths, label, sharing.kind)
            handle = self.device.export_memory(local.address)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        try:
            handles = self._collect(_Call("symmetric", (kind.name, kind.nbytes, lengths), handle, problem))
            assert local is not None
            return self._map(local, handles, label, writer=writer)
        except CollectiveError:
            # Every rank is here and none has the memory mapped. After any other failure a peer may still be using it.
            if local is not None and local._owner is not None:
                local._owner.release()
            raise

    def _allocate_symmetric(self, kind: Element, lengths: tuple[int, ...], label: str, how: str) -> DeviceArray:
        nbytes = max(math.prod(lengths) * kind.nbytes, 1)
        address, room = self.device.allocate_shared(nbytes, how)
        allocation = Allocation(self.device, address, room, kept_by=f"{label} of {self!r}")
        try:
            self.device.memset(address, 0, room)
            self.device.synchronize()
        except BaseException:
            allocation.release()
            raise
        return DeviceArray(self.device, address, lengths, kind, allocation)

    def _map(
        self, local: DeviceArray, handles: list[Any], label: str, source: Any = None, writer: Callable[[int], int | None] | None = None
    ) -> Symmetric:
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
        assert table is not None
        for peer, address in enumerate(addresses):
            text = f"{label} ({local.dtype_name} {list(local.shape)}) of rank {peer}"
            by = _of_bytes(writer, local.element.nbytes) if peer == self.index and writer is not None else None
            self.device.diagnostics.name_buffer(address, max(local.nbytes, 1), text, by)
        made = Symmetric(local, PeerTable(table, local.element, local.nbytes, addresses), label, local._owner, source)
        self._symmetric.append(made)
        return made

    def release(self, *buffers: Symmetric) -> None:
        """Collective: frees symmetric buffers and lets registered ones go. Every rank unmaps its peers' before any rank frees its own."""
        for made in buffers:
            if made not in self._symmetric:
                raise ValueError(f"{made.name} is no symmetric buffer of {self!r}, or it was released already")
        self.device.synchronize()
        self._release("release", buffers)

    def _release(self, operation: str, buffers: Sequence[Symmetric]) -> None:
        self._collect(_Call(operation, tuple(made.name for made in buffers)))
        for made in buffers:
            self._symmetric.remove(made)
        self._collect(_Call(f"{operation} mapping", error=self._unmap(buffers)))
        self._free(buffers)

    def _unmap(self, buffers: Sequence[Symmetric]) -> str | None:
        """Ends this rank's use of its peers' memory; returns the last problem with that."""
        problem: str | None = None
        for made in buffers:
            for peer, address in enumerate(made.peers.addresses):
                self.device.diagnostics.forget_buffer(address)
                if peer != self.index:
                    try:
                        self.device.close_memory(address)
                    except Exception as error:
                        problem = f"{type(error).__name__}: {error}"
        return problem

    def _free(self, buffers: Sequence[Symmetric]) -> None:
        for made in buffers:
            made.peers.table.free()
            if made.allocation is None:
                self.device.withdraw_foreign(made.local.address)
            else:
                made.allocation.release()

    @contextmanager
    def all_or_none(self) -> Iterator[None]:
        """Collective: releases the symmetric buffers made inside when making one of them fails, which it does on every rank alike."""
        before = len(self._symmetric)
        try:
            yield
        except CollectiveError:
            if made := self._symmetric[before:]:
                self.release(*made)
            raise

    def allgather(self, value: Any) -> list[Any]:
        """Collective: every rank's value (picklable), by rank."""
        return self._collect(_Call("allgather", value=value))

    def agree(self, what: str, values: Mapping[str, Any]) -> None:
        """Collective: nothing when every rank gives the same values, compared by `==` and named in the error.

        what  whose values they are, equal on every rank

        Raises Disagreement on every rank, with both values.
        """
        for peer, theirs in enumerate(self._collect(_Call(f"agreement on {what}", value=dict(values)))):
            for name in (*values, *(n for n in theirs if n not in values)):
                mine, other = values.get(name, "nothing"), theirs.get(name, "nothing")
                if mine != other:
                    raise Disagreement(
                        "EP312", f"{what}: {name} differs by rank: rank {self.index} has {mine!r}, rank {peer} has {other!r}"
                    )

    def health(self) -> list[Health]:
        """What every rank does now and, where that is known, what its kernels wait for; from any thread, for a job that seems stuck.

        A wait of a kernel on a GPU is told of once it has lasted 0.13 s; this call then takes 0.35 s. Raises RankFailed when the job's
        rendezvous is gone.
        """
        return self.bootstrap.health()

    @contextmanager
    def _in(self, what: str) -> Iterator[None]:
        """Has `health` say that this rank is in `what`."""
        before, self._doing = self._doing, (what, time.monotonic())
        try:
            yield
        finally:
            self._doing = (before[0], time.monotonic())

    def capture(self) -> AbstractContextManager[Graph]:
        """Captures what is launched on this rank's device until the block ends: `with rank.capture() as graph: ...; graph.replay()`.

        Nothing of it runs before `graph.replay()`. Every rank captures and replays the same calls. See `graph`.
        """
        return capture(self.device)

    def _refuse_when_left(self) -> None:
        if self._successor is not None:
            raise RuntimeError(f"{self!r} goes on as {self._successor!r}: use what shrink returned")

    def _collect(self, call: _Call) -> list[Any]:
        refuse_in_capture(self.device, f"a meeting of the ranks ({call.operation})")
        with self._in(f"a meeting of the ranks ({call.operation})"):
            calls: list[_Call] = self.bootstrap.allgather(call)
        for peer, other in enumerate(calls):
            if other.version != call.version:
                raise Disagreement(
                    "EP312", f"rank {self.index} runs epdsl {call.version}, rank {peer} runs {other.version}; install the same"
                )
        for peer, other in enumerate(calls):
            if other.operation != call.operation:
                raise OutOfStep(
                    "EP319",
                    f"rank {self.index} is in {call.operation}, rank {peer} in {other.operation}: all ranks must make the same calls",
                )
        for peer, other in enumerate(calls):
            if other.agreed != call.agreed:
                raise CollectiveError(
                    "EP313", f"{call.operation} differs by rank: rank {self.index} has {call.agreed}, rank {peer} has {other.agreed}"
                )
        failed = [(peer, other.error) for peer, other in enumerate(calls) if other.error is not None]
        if failed:
            raise CollectiveError(
                "EP313", f"{call.operation} failed on rank {failed[0][0]} ({len(failed)} of {self.size} ranks): {failed[0][1]}"
            )
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
        with self._in("a wait for its device"):
            try:
                self.device.synchronize()
            except KernelFault as fault:
                if isinstance(fault, PeerTimeout):
                    fault.detail = "\n  ".join(part for part in (fault.detail, *self._absent(fault.peers)) if part)
                raise shown(fault) from fault.__cause__
        for callback in list(self._callbacks):
            callback()
        self.bootstrap.check()

    def _absent(self, peers: Sequence[int]) -> list[str]:
        """What is known of ranks that did not arrive."""
        if not peers:
            return []
        try:
            return [str(found).replace("\n", "\n  ") for found in self.health() if found.rank in peers]
        except RankFailed as error:
            return [f"{error.text}"]

    def barrier(self) -> None:
        """Collective: synchronises, then waits for all ranks to have done so."""
        self._refuse_when_left()
        self.synchronize()
        self._collect(_Call("barrier"))

    def shrink(self, dead: Iterable[int], timeout: float | None = None) -> Rank:
        """Collective over the ranks that live, after a PeerTimeout or RankFailed: this rank in a job of them alone.

        The living keep their order and are numbered anew: index and size of the new rank count them, `originals` tells their first
        numbers. It has this rank's device. The symmetric buffers of this rank are unmapped and freed, whatever the dead do; nothing but
        `close` is to be called on it any more. Make layers anew with as many experts a rank (see `epdsl.survivors`).

        dead     numbers of ranks, in this rank's numbering, equal on all that live; a rank among them is no longer heard
        timeout  seconds for the kernels under way to end, and again for the others to come; by default as for any meeting

        Raises ValueError when the dead are none, this rank, or no ranks of the job; RuntimeError when this rank has shrunk before;
        Disagreement on every rank with both values when they differ, and on a rank that the others hold to be dead; RankFailed when another
        rank ends meanwhile, BootstrapTimeout when one does not come. These three leave this rank as it was: with another `dead` it can be
        called again. Raises what the kernels reported when one of them does not end.
        """
        self._refuse_when_left()
        gone = tuple(sorted(set(dead)))
        if not gone or self.index in gone or not all(0 <= rank < self.size for rank in gone):
            raise ValueError(f"shrink: rank {self.index} of {self.size} cannot go on without {gone}; name other ranks of the job")
        refuse_in_capture(self.device, "shrinking the job")
        self._let_kernels_end(DEFAULT_TIMEOUT if timeout is None else timeout)
        with self._in("a meeting of the ranks (shrink)"):
            bootstrap = self.bootstrap.without(gone, timeout)
        left = [number for rank, number in enumerate(self.originals) if rank not in gone]
        self._closed = True
        self._successor = made = Rank(bootstrap.index, bootstrap.size, self.device, bootstrap, self._wanted_sharing, left)
        made._sharing = self._sharing
        buffers, self._symmetric = tuple(self._symmetric), []
        problem = self._unmap(buffers)
        # A peer that lives has this rank's memory mapped until here.
        made._collect(_Call("shrink", error=problem))
        self._free(buffers)
        return made

    def _let_kernels_end(self, timeout: float) -> None:
        """Waits for the kernels under way, whatever they report: that is known, or follows from what is."""
        deadline = time.monotonic() + timeout
        reports = 0
        while True:
            try:
                return self.device.synchronize()
            except RuntimeError:
                if self.device.given_up is None:
                    # A device that reports again and again is broken.
                    reports += 1
                    if reports > _REPORTS:
                        raise
                elif time.monotonic() > deadline:
                    raise
                else:
                    time.sleep(_KERNEL_PAUSE_SECONDS)

    def close(self) -> None:
        """Collective: synchronises, frees the symmetric buffers and leaves the job. The device is closed too.

        A rank that has shrunk closes the one it has become.
        """
        if self._successor is not None:
            self._successor.close()
        if self._closed:
            return
        self._closed = True
        self.synchronize()
        self._release("close", tuple(self._symmetric))
        self.device.close()
        self.bootstrap.close()


_OWN_WORK = "its own work"
_KERNEL_PAUSE_SECONDS = 0.05
_REPORTS = 3


def _activity(rank: Rank | None) -> Activity:
    if rank is None:
        return Activity(_OWN_WORK, 0.0)
    doing, since = rank._doing
    known: dict[int, Any] = getattr(rank.device, "_launchers", {})
    launches: dict[str, int] = {}
    for launcher in list(known.values()):
        launches[launcher.artifact.name] = launches.get(launcher.artifact.name, 0) + launcher.launches
    waits = () if rank._closed else tuple(rank.device.waiting())
    return Activity(doing, time.monotonic() - since, tuple(item for item in launches.items() if item[1]), waits)


def _of_bytes(writer: Callable[[int], int | None], nbytes: int) -> Callable[[int], int | None]:
    return lambda offset: writer(offset // nbytes)
