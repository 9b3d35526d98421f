"""What the CUDA and the HIP device have in common: everything but the driver's calls, which a `Driver` makes."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from . import context_layout as layout
from .array import free_dropped
from .artifact import Artifact, Slot
from .binding import Number
from .driver_wait import DeviceWaits, DriverEvent, DriverStream
from .errors import CodedError
from .faults import Diagnostics, KernelFault
from .graph import CaptureError, Graph, Player, refuse_in_capture, torch_stream
from .launch import PreparedFunction
from .parameters import ParameterBlock
from .peer_memory import IPC_GRANULE, MemoryHandle, PeerMemory
from .protocol import DeviceInfo, Dim3, Stream
from .virtual_memory import Calls, ForeignCalls

DEFAULT_SHARED_LIMIT = 48 * 1024
_READY_SHAPES = 64
_BEFORE_THE_CAPTURE = "make the buffer before the capture"


class DeviceUnavailable(CodedError, RuntimeError):
    """A kind of device cannot be used on this machine; the text says why and what would help."""


class DriverError(CodedError, RuntimeError):
    """A driver call failed.

    call    the driver's function, as text
    status  the driver's number
    name    the driver's name for the number
    text    the driver's description
    """

    code = "EP223"

    def __init__(self, call: str, where: str, status: int, name: str, text: str, detail: str = "") -> None:
        Exception.__init__(self, call, where, status, name, text, detail)
        self.call, self.where, self.status, self.name, self.text, self.detail = call, where, status, name, text, detail

    @property
    def message(self) -> str:
        return f"{self.call} on {self.where}: {self.name} ({self.status}): {self.text}" + (f"\n{self.detail}" if self.detail else "")


def call_text(call: str, args: Sequence[Any]) -> str:
    """A driver call for an error: numbers and names as they are, the driver's own objects as "..."."""
    shown = [getattr(arg, "name", None) or (str(arg) if isinstance(arg, (int, float, str)) else "...") for arg in args]
    return f"{call}({', '.join(shown)})"


class Driver(Protocol):
    """The driver calls of one device. Streams, events, modules and functions are the driver's handles as integers.

    Every call may come from any thread, raises DriverError when it fails, and waits only where its name says so.
    """

    kind: str

    @property
    def share_kinds(self) -> tuple[str, ...]: ...
    @property
    def virtual(self) -> Calls: ...
    @property
    def foreign(self) -> ForeignCalls | str:
        """What shares memory of another library with other ranks, or why it cannot be shared."""
        ...

    def info(self) -> DeviceInfo: ...
    def close(self) -> None: ...
    def allocate(self, nbytes: int) -> int: ...
    def allocate_for_peers(self, nbytes: int) -> int:
        """Memory for `ipc_handle`: what a peer's kernel writes there is seen by a kernel that runs. Given back with `free`."""
        ...

    def free(self, address: int) -> None: ...
    def set_bytes(self, address: int, byte: int, nbytes: int, stream: int) -> None: ...
    def copy_in(self, address: int, source: int, nbytes: int, stream: int) -> None: ...
    def copy_out(self, target: int, address: int, nbytes: int, stream: int) -> None: ...
    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None: ...
    def host_allocate(self, nbytes: int) -> tuple[int, int]:
        """Page-locked host memory that the device can use: its host and its device address."""
        ...

    def host_free(self, address: int) -> None: ...
    def stream_create(self) -> int: ...
    def stream_destroy(self, stream: int) -> None: ...
    def stream_done(self, stream: int) -> bool:
        """Whether everything the stream was given is done."""
        ...

    def synchronize(self) -> None:
        """Waits for everything the device was given."""
        ...

    def event_create(self) -> int: ...
    def event_destroy(self, event: int) -> None: ...
    def event_record(self, event: int, stream: int) -> None: ...
    def event_done(self, event: int) -> bool: ...
    def event_elapsed_ms(self, start: int, end: int) -> float: ...
    def module_load(self, image: bytes, name: str) -> tuple[int, int]:
        """Loads a module and returns it and its kernel `name`, ready to start without further loading."""
        ...

    def module_unload(self, module: int) -> None: ...
    def allow_shared(self, function: int, nbytes: int) -> None: ...
    def resident_blocks(self, function: int, block_threads: int, shared_bytes: int) -> int:
        """Blocks that one multiprocessor holds."""
        ...

    def launcher(self, function: int, grid: Dim3, block: Dim3, shared_bytes: int, stream: int, parameters: int) -> Callable[[], None]:
        """What starts the kernel when called. `parameters` is the address of an array of pointers to the parameters."""
        ...

    def capture_begin(self, stream: int) -> None:
        """Has what this thread gives the stream recorded instead of run."""
        ...

    def capture_end(self, stream: int) -> int:
        """Ends the recording and returns a graph that can be launched."""
        ...

    def graph_launch(self, graph: int, stream: int) -> None: ...
    def graph_destroy(self, graph: int) -> None: ...
    def allocation_of(self, address: int) -> tuple[int, int]:
        """Where the allocation that an address lies in begins, and its bytes."""
        ...

    def ipc_handle(self, address: int) -> bytes: ...
    def ipc_open(self, handle: bytes) -> int: ...
    def ipc_close(self, address: int) -> None: ...
    def enable_peer(self, index: int) -> None:
        """Lets this device use the memory of device `index` of the same process; not an error when it can already."""
        ...


class DriverFunction:
    """A kernel loaded on a device."""

    def __init__(self, device: DriverDevice, artifact: Artifact, module: int, function: int) -> None:
        self._device = device
        self._artifact = artifact
        self._module = module
        self._function = function
        self._slots = (*artifact.slots, Slot("context", "u64", 8))
        self._allowed_shared = DEFAULT_SHARED_LIMIT
        # Parameter blocks of launches of a shape and stream, each used by one thread at a time.
        self._ready: dict[tuple[Any, ...], tuple[ParameterBlock, Callable[[], None]]] = {}
        self._lock = threading.Lock()

    @property
    def artifact(self) -> Artifact:
        return self._artifact

    def _dynamic(self, shared_bytes: int) -> int:
        total = self._artifact.shared_bytes + shared_bytes
        if total > self._allowed_shared:
            self._device.driver.allow_shared(self._function, total)
            self._allowed_shared = total
        return total

    def resident_blocks(self, block_threads: int, shared_bytes: int) -> int:
        total = self._dynamic(shared_bytes)
        return self._device.driver.resident_blocks(self._function, block_threads, total) * self._device.info.num_sms

    def prepare(self, grid: Dim3, block: Dim3, shared_bytes: int, stream: Stream | None, values: Sequence[Number]) -> PreparedFunction:
        """A launch whose parameter block lies ready."""
        parameters = ParameterBlock(self._slots)
        parameters.fill([*values, self._device.context_address])
        dynamic, handle = self._dynamic(shared_bytes), self._device.stream_handle(stream)
        self._device.waits.prepared(handle)
        start = self._device.driver.launcher(self._function, grid, block, dynamic, handle, parameters.address)
        return DriverLaunch(parameters, start)

    def launch(self, grid: Dim3, block: Dim3, shared_bytes: int, stream: Stream | None, values: Sequence[Number]) -> None:
        dynamic, handle = self._dynamic(shared_bytes), self._device.stream_handle(stream)
        key = (grid, block, dynamic, handle)
        with self._lock:
            found = self._ready.get(key)
            if found is None:
                if len(self._ready) >= _READY_SHAPES:
                    self._ready.clear()
                parameters = ParameterBlock(self._slots)
                start = self._device.driver.launcher(self._function, grid, block, dynamic, handle, parameters.address)
                found = self._ready[key] = (parameters, start)
            parameters, start = found
            # The driver copies the parameters during the call.
            parameters.fill([*values, self._device.context_address])
            start()


class DriverLaunch:
    """See PreparedFunction. The driver copies the parameters during the call, so they may be patched right after it."""

    def __init__(self, parameters: ParameterBlock, start: Callable[[], None]) -> None:
        self._parameters = parameters
        self.patch = parameters.patch
        self.start = start

    def __call__(self) -> None:
        self.start()


class DriverDevice:
    """A device behind a driver. See `protocol.Device`."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self._info = driver.info()
        self.diagnostics = Diagnostics()
        self._allocations: dict[int, int] = {}
        self.peer_memory = PeerMemory(driver, f"{self._info.kind}:{self._info.index}", self._info.index)
        self._functions: dict[int, DriverFunction] = {}
        self.capturing: Graph | None = None
        self.graphs: set[Graph] = set()
        self._capture_stream: DriverStream | None = None
        self._closed = False
        # The report of a kernel that does not end (see DeviceWaits).
        self.given_up: KernelFault | None = None
        self.waits = DeviceWaits(self)
        host, self._context_address = driver.host_allocate(layout.CONTEXT_BYTES)
        self._context_host = host
        self._context_words = np.ctypeslib.as_array((ctypes.c_uint64 * layout.CONTEXT_WORDS).from_address(host))
        self._context_words[:] = 0
        self._context_words[layout.WAIT_TABLE] = 2 * layout.WAIT_BASE
        # Held by whoever reads the block on a thread of its own, so that it is not freed meanwhile.
        self._looked_at = threading.Lock()

    def __repr__(self) -> str:
        return f"<{self._info.kind}:{self._info.index} {self._info.name} ({self._info.target})>"

    @property
    def info(self) -> DeviceInfo:
        return self._info

    @property
    def context_address(self) -> int:
        return self._context_address

    @property
    def context_words(self) -> NDArray[np.uint64]:
        return self._context_words

    def stream_handle(self, stream: Stream | None) -> int:
        """The driver's handle of a stream. None is the stream of a capture under way, else PyTorch's current one, else the default one.

        Raises CaptureError for another stream than the captured one, and what the kernels reported while one of them does not end.
        """
        if self.given_up is not None:
            self.waits.ready()
        self._refuse_when_closed()
        if self.capturing is None:
            handle = torch_stream(self) if stream is None else stream.handle
            self.waits.used(handle)
            return handle
        assert self._capture_stream is not None
        if stream is not None and stream.handle != self._capture_stream.handle:
            raise CaptureError("EP210", f"work for another stream on {self!r} while a graph is captured there; leave the stream out")
        return self._capture_stream.handle

    def _refuse_when_closed(self) -> None:
        if self._closed:
            raise RuntimeError(f"{self!r} was closed; open another")

    def _ready(self) -> None:
        self._refuse_when_closed()
        self.waits.ready()

    def begin_capture(self, graph: Graph) -> None:
        """Captures what is launched from now on without a stream, into `graph`. See `graph.capture`."""
        stream = self._capture_stream = self._capture_stream or self.stream()
        self.driver.capture_begin(stream.handle)
        self.capturing = graph

    def end_capture(self, keep: bool) -> Player | None:
        """Ends the capture. Raises DriverError when the driver gave it up and it is to be kept."""
        assert self._capture_stream is not None
        self.capturing = None
        try:
            made = self.driver.capture_end(self._capture_stream.handle)
        except DriverError:
            if keep:
                raise
            return None
        if not keep:
            self.driver.graph_destroy(made)
            return None
        return Player(lambda stream: self.driver.graph_launch(made, self.stream_handle(stream)), lambda: self.driver.graph_destroy(made))

    def allocate(self, nbytes: int) -> int:
        """Device memory with undefined contents. Raises DriverError, saying what this device already gave out, when there is too little."""
        return self._allocated(self.driver.allocate, nbytes, "make the array before the capture and pass it")

    def _allocated(self, make: Callable[[int], int], nbytes: int, instead: str) -> int:
        refuse_in_capture(self, f"an allocation of {nbytes} bytes", instead)
        if nbytes <= 0:
            raise ValueError(f"an allocation of {nbytes} bytes; it must be at least 1")
        self._ready()
        try:
            address = make(nbytes)
        except DriverError as error:
            error.detail = self._asked_for(nbytes)
            raise
        self._allocations[address] = nbytes
        return address

    def free(self, address: int) -> None:
        if address not in self._allocations:
            raise ValueError(f"0x{address:x} is no address that allocate returned on {self!r}, or it was freed already")
        refuse_in_capture(self, "a free")
        # The driver itself would wait, and without an end.
        self.waits.for_device()
        if self.peer_memory.owns(address):
            self.peer_memory.free(address)
        else:
            self.peer_memory.withdraw(address)
            self.driver.free(address)
        del self._allocations[address]
        self.diagnostics.forget_buffer(address)

    def memset(self, address: int, byte: int, nbytes: int, stream: Stream | None = None) -> None:
        if nbytes:
            self.driver.set_bytes(address, byte, nbytes, self.stream_handle(stream))

    def upload(self, address: int, source: NDArray[Any], stream: Stream | None = None) -> None:
        if not source.flags.c_contiguous:
            raise ValueError("an upload takes a C-contiguous array; pass np.ascontiguousarray(source)")
        refuse_in_capture(self, f"an upload of {source.nbytes} bytes", "put the values into device memory before the capture or a replay")
        if source.nbytes:
            handle = self.stream_handle(stream)
            # A copy from or to pageable memory may wait for the stream inside the driver.
            self.waits.for_stream(handle)
            self.driver.copy_in(address, source.ctypes.data, source.nbytes, handle)
            # It may also return before the device has the data; other streams would not wait for it.
            self.waits.for_stream(handle)

    def download(self, target: NDArray[Any], address: int, stream: Stream | None = None) -> None:
        if not target.flags.c_contiguous or not target.flags.writeable:
            raise ValueError("a download takes a C-contiguous, writable array")
        refuse_in_capture(self, f"a download of {target.nbytes} bytes", "read the result after a replay")
        if target.nbytes:
            handle = self.stream_handle(stream)
            self.waits.for_stream(handle)
            self.driver.copy_out(target.ctypes.data, address, target.nbytes, handle)
            self.waits.for_stream(handle)

    def copy(self, target: int, source: int, nbytes: int, stream: Stream | None = None) -> None:
        if nbytes:
            self.driver.copy(target, source, nbytes, self.stream_handle(stream))

    def stream(self) -> DriverStream:
        return DriverStream(self)

    def event(self) -> DriverEvent:
        return DriverEvent(self)

    def load(self, artifact: Artifact) -> DriverFunction:
        """Loads the artifact once; later calls return the same function. Raises DriverError with the driver's log."""
        found = self._functions.get(id(artifact))
        if found is None:
            refuse_in_capture(self, f"the loading of {artifact.name}", "launch the kernel once before the capture")
            self._ready()
            module, function = self.driver.module_load(artifact.binary, artifact.name)
            found = self._functions[id(artifact)] = DriverFunction(self, artifact, module, function)
            self.diagnostics.register(artifact)
        return found

    def synchronize(self, stream: Stream | None = None) -> None:
        """Waits for the stream, or for the whole device, then raises what the kernels reported.

        A driver error (a trap, an illegal address) is the detail of the kernels' own report when there is one. A kernel that does not end
        after a report is not waited for (see DeviceWaits).
        """
        refuse_in_capture(self, "a synchronisation")
        self._refuse_when_closed()
        try:
            if stream is None:
                self.waits.for_device()
            else:
                self.waits.for_stream(stream.handle)
        except DriverError as error:
            try:
                self.diagnostics.check(self._context_words, detail=str(error))
            except KernelFault as fault:
                raise fault from error
            raise
        self.diagnostics.check(self._context_words, idle=stream is None)
        if stream is None:
            free_dropped(self)

    def waiting(self) -> list[str]:
        with self._looked_at:
            return self.diagnostics.peek(self._context_words)

    @property
    def share_kinds(self) -> tuple[str, ...]:
        return self.driver.share_kinds

    def allocate_shared(self, nbytes: int, kind: str) -> tuple[int, int]:
        """Memory that other ranks can open, and its bytes. Raises DriverError when there is too little or the driver has no such kind."""
        if kind == "ipc":
            room = -(-nbytes // IPC_GRANULE) * IPC_GRANULE
            return self._allocated(self.driver.allocate_for_peers, room, _BEFORE_THE_CAPTURE), room
        refuse_in_capture(self, f"an allocation of {nbytes} bytes", _BEFORE_THE_CAPTURE)
        self._ready()
        try:
            address, room = self.peer_memory.allocate(nbytes, kind)
        except DriverError as error:
            error.detail = self._asked_for(nbytes)
            raise
        self._allocations[address] = room
        return address, room

    def _asked_for(self, nbytes: int) -> str:
        return f"{nbytes} bytes asked for; {sum(self._allocations.values())} of {self._info.total_memory} bytes are held by epdsl here"

    def export_memory(self, address: int) -> MemoryHandle:
        if address not in self._allocations:
            raise ValueError(f"0x{address:x} is no address that allocate returned on {self!r}; only whole allocations can be exported")
        return self.peer_memory.export(address, self._allocations[address])

    def export_foreign(self, address: int, nbytes: int) -> MemoryHandle:
        return self.peer_memory.export_foreign(address, nbytes)

    def withdraw_foreign(self, address: int) -> None:
        self.peer_memory.withdraw(address)

    def open_memory(self, handle: MemoryHandle) -> int:
        """The address by which this device reaches another rank's memory. Give it back with `close_memory`."""
        self.waits.ready()
        return self.peer_memory.open(handle)

    def close_memory(self, address: int) -> None:
        """Ends the use of an address that `open_memory` returned."""
        self.waits.ready()
        self.peer_memory.close(address)

    def close(self) -> None:
        """Frees everything. Memory shared with other processes must have been closed by them before.

        Raises what the kernels reported, and frees nothing, while one of them does not end.
        """
        if self._closed:
            return
        self.waits.for_device()
        self._closed = True
        for graph in list(self.graphs):
            graph.close()
        if self._capture_stream is not None:
            self._capture_stream.close()
        plain = [address for address in self._allocations if not self.peer_memory.owns(address)]
        self.peer_memory.close_all()
        for address in plain:
            self.free(address)
        self._allocations.clear()
        for function in self._functions.values():
            self.driver.module_unload(function._module)
        self._functions.clear()
        with self._looked_at:
            self._context_words = np.zeros(layout.CONTEXT_WORDS, np.uint64)
        self.driver.host_free(self._context_host)
        self.driver.close()


def driver_missing(kind: str, library: str, extra: str, error: BaseException, advice: str) -> DeviceUnavailable:
    """The error for a driver that cannot be loaded or finds no device. `advice` is what to do when its library is missing."""
    if isinstance(error, ImportError):
        return DeviceUnavailable(
            "EP220", f"no {kind} device: the Python bindings are not installed ({error}); pip install 'epdsl[{extra}]'"
        )
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    hint = f"{library} was not usable" if os.name == "posix" else "only Linux is supported"
    return DeviceUnavailable("EP220", f"no {kind} device: {hint}: {first}; {advice}")
