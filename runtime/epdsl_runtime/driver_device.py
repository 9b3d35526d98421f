"""What the CUDA and the HIP device have in common: everything but the driver's calls, which a `Driver` makes."""

from __future__ import annotations

import ctypes
import os
import socket
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from . import context_layout as layout
from .array import free_dropped
from .artifact import Artifact, Slot
from .binding import Number
from .faults import Diagnostics, KernelFault
from .launch import PreparedFunction
from .parameters import ParameterBlock
from .protocol import DeviceInfo, Dim3, Event, Stream

DEFAULT_SHARED_LIMIT = 48 * 1024

# One per process: an address is only meaningful in the process whose token the handle carries.
PROCESS = uuid.uuid4().hex
HOST = socket.gethostname()


class DeviceUnavailable(RuntimeError):
    """A kind of device cannot be used on this machine; the text says why and what would help."""


class DriverError(RuntimeError):
    """A driver call failed.

    call  the driver's function, as text
    code  the driver's number
    name  the driver's name for the number
    text  the driver's description
    """

    def __init__(self, call: str, where: str, code: int, name: str, text: str, detail: str = "") -> None:
        super().__init__(call, where, code, name, text, detail)
        self.call, self.where, self.code, self.name, self.text, self.detail = call, where, code, name, text, detail

    def __str__(self) -> str:
        return f"{self.call} on {self.where}: {self.name} ({self.code}): {self.text}" + (f"\n{self.detail}" if self.detail else "")


@dataclass(frozen=True)
class MemoryHandle:
    """By which another rank opens an allocation.

    ipc  the driver's handle for other processes; empty when it gave none, `ipc_error` then says why
    """

    kind: str
    host: str
    process: str
    index: int
    address: int
    nbytes: int
    ipc: bytes
    ipc_error: str = ""


class Driver(Protocol):
    """The driver calls of one device. Streams, events, modules and functions are the driver's handles as integers.

    Every call may come from any thread, raises DriverError when it fails, and waits only where its name says so.
    """

    kind: str

    def info(self) -> DeviceInfo: ...
    def close(self) -> None: ...
    def allocate(self, nbytes: int) -> int: ...
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
    def stream_synchronize(self, stream: int) -> None: ...
    def synchronize(self) -> None: ...
    def event_create(self) -> int: ...
    def event_destroy(self, event: int) -> None: ...
    def event_record(self, event: int, stream: int) -> None: ...
    def event_synchronize(self, event: int) -> None: ...
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

    def ipc_handle(self, address: int) -> bytes: ...
    def ipc_open(self, handle: bytes) -> int: ...
    def ipc_close(self, address: int) -> None: ...
    def enable_peer(self, index: int) -> None:
        """Lets this device use the memory of device `index` of the same process; not an error when it can already."""
        ...


class DriverStream:
    """A stream that does not wait for the default stream."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._handle = driver.stream_create()

    @property
    def handle(self) -> int:
        return self._handle

    def synchronize(self) -> None:
        self._driver.stream_synchronize(self._handle)

    def close(self) -> None:
        if self._handle:
            self._driver.stream_destroy(self._handle)
            self._handle = 0


class DriverEvent:
    """A point in a stream, with a time."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._handle = driver.event_create()

    def record(self, stream: Stream | None = None) -> None:
        self._driver.event_record(self._handle, stream.handle if stream else 0)

    def synchronize(self) -> None:
        self._driver.event_synchronize(self._handle)

    def elapsed_ms(self, earlier: Event) -> float:
        """Milliseconds from `earlier` to this event; both must have happened."""
        if not isinstance(earlier, DriverEvent):
            raise TypeError(f"{earlier!r} is no event of a {self._driver.kind} device")
        return self._driver.event_elapsed_ms(earlier._handle, self._handle)

    def close(self) -> None:
        if self._handle:
            self._driver.event_destroy(self._handle)
            self._handle = 0


class DriverFunction:
    """A kernel loaded on a device."""

    def __init__(self, device: DriverDevice, artifact: Artifact, module: int, function: int) -> None:
        self._device = device
        self._artifact = artifact
        self._module = module
        self._function = function
        self._slots = (*artifact.slots, Slot("context", "u64", 8))
        self._allowed_shared = DEFAULT_SHARED_LIMIT

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
        dynamic = self._dynamic(shared_bytes)
        start = self._device.driver.launcher(self._function, grid, block, dynamic, stream.handle if stream else 0, parameters.address)
        return DriverLaunch(parameters, start)

    def launch(self, grid: Dim3, block: Dim3, shared_bytes: int, stream: Stream | None, values: Sequence[Number]) -> None:
        self.prepare(grid, block, shared_bytes, stream, values)()


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
        self._opened: set[int] = set()
        self._functions: dict[int, DriverFunction] = {}
        self._closed = False
        host, self._context_address = driver.host_allocate(layout.CONTEXT_BYTES)
        self._context_host = host
        self._context_words = np.ctypeslib.as_array((ctypes.c_uint64 * layout.CONTEXT_WORDS).from_address(host))
        self._context_words[:] = 0

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

    def allocate(self, nbytes: int) -> int:
        """Device memory with undefined contents. Raises DriverError, saying what this device already gave out, when there is too little."""
        if nbytes <= 0:
            raise ValueError(f"an allocation of {nbytes} bytes; it must be at least 1")
        try:
            address = self.driver.allocate(nbytes)
        except DriverError as error:
            error.detail = (
                f"{nbytes} bytes asked for; {sum(self._allocations.values())} of {self._info.total_memory} bytes are held by epdsl here"
            )
            raise
        self._allocations[address] = nbytes
        return address

    def free(self, address: int) -> None:
        if address not in self._allocations:
            raise ValueError(f"0x{address:x} is no address that allocate returned on {self!r}, or it was freed already")
        self.driver.free(address)
        del self._allocations[address]
        self.diagnostics.forget_buffer(address)

    def memset(self, address: int, byte: int, nbytes: int, stream: Stream | None = None) -> None:
        if nbytes:
            self.driver.set_bytes(address, byte, nbytes, stream.handle if stream else 0)

    def upload(self, address: int, source: NDArray[Any], stream: Stream | None = None) -> None:
        if not source.flags.c_contiguous:
            raise ValueError("an upload takes a C-contiguous array; pass np.ascontiguousarray(source)")
        if source.nbytes:
            handle = stream.handle if stream else 0
            self.driver.copy_in(address, source.ctypes.data, source.nbytes, handle)
            # A copy from pageable memory may return before the device has the data; other streams would not wait for it.
            self.driver.stream_synchronize(handle)

    def download(self, target: NDArray[Any], address: int, stream: Stream | None = None) -> None:
        if not target.flags.c_contiguous or not target.flags.writeable:
            raise ValueError("a download takes a C-contiguous, writable array")
        if target.nbytes:
            handle = stream.handle if stream else 0
            self.driver.copy_out(target.ctypes.data, address, target.nbytes, handle)
            self.driver.stream_synchronize(handle)

    def copy(self, target: int, source: int, nbytes: int, stream: Stream | None = None) -> None:
        if nbytes:
            self.driver.copy(target, source, nbytes, stream.handle if stream else 0)

    def stream(self) -> DriverStream:
        return DriverStream(self.driver)

    def event(self) -> DriverEvent:
        return DriverEvent(self.driver)

    def load(self, artifact: Artifact) -> DriverFunction:
        """Loads the artifact once; later calls return the same function. Raises DriverError with the driver's log."""
        found = self._functions.get(id(artifact))
        if found is None:
            module, function = self.driver.module_load(artifact.binary, artifact.name)
            found = self._functions[id(artifact)] = DriverFunction(self, artifact, module, function)
            self.diagnostics.register(artifact)
        return found

    def synchronize(self, stream: Stream | None = None) -> None:
        """Waits for the stream, or for the whole device, then raises what the kernels reported.

        A driver error (a trap, an illegal address) is the detail of the kernels' own report when there is one.
        """
        try:
            if stream is None:
                self.driver.synchronize()
            else:
                self.driver.stream_synchronize(stream.handle)
        except DriverError as error:
            try:
                self.diagnostics.check(self._context_words, detail=str(error))
            except KernelFault as fault:
                raise fault from error
            raise
        self.diagnostics.check(self._context_words, idle=stream is None)
        if stream is None:
            free_dropped(self)

    def export_memory(self, address: int) -> MemoryHandle:
        if address not in self._allocations:
            raise ValueError(f"0x{address:x} is no address that allocate returned on {self!r}; only whole allocations can be exported")
        try:
            ipc, problem = self.driver.ipc_handle(address), ""
        except DriverError as error:
            ipc, problem = b"", str(error)
        return MemoryHandle(self._info.kind, HOST, PROCESS, self._info.index, address, self._allocations[address], ipc, problem)

    def open_memory(self, handle: MemoryHandle) -> int:
        """The address by which this device reaches another rank's allocation. Give it back with `close_memory`."""
        if handle.kind != self._info.kind:
            raise ValueError(f"memory of a {handle.kind} device cannot be opened on {self!r}")
        if handle.process == PROCESS:
            if handle.index != self._info.index:
                self.driver.enable_peer(handle.index)
            return handle.address
        if handle.host != HOST:
            raise DeviceUnavailable(
                f"memory of host {handle.host} cannot be opened on host {HOST}: peer memory reaches the GPUs of one machine"
            )
        if not handle.ipc:
            raise DeviceUnavailable(
                f"memory of {handle.kind}:{handle.index} in another process cannot be opened, its driver gave no handle: {handle.ipc_error}"
            )
        address = self.driver.ipc_open(handle.ipc)
        self._opened.add(address)
        return address

    def close_memory(self, address: int) -> None:
        """Ends the use of an address that `open_memory` returned."""
        if address in self._opened:
            self.driver.ipc_close(address)
            self._opened.discard(address)

    def close(self) -> None:
        """Frees everything. Memory shared with other processes must have been closed by them before."""
        if self._closed:
            return
        self._closed = True
        for address in list(self._opened):
            self.close_memory(address)
        for address in list(self._allocations):
            self.free(address)
        for function in self._functions.values():
            self.driver.module_unload(function._module)
        self._functions.clear()
        self._context_words = np.zeros(layout.CONTEXT_WORDS, np.uint64)
        self.driver.host_free(self._context_host)
        self.driver.close()


def driver_missing(kind: str, library: str, extra: str, error: BaseException) -> DeviceUnavailable:
    """The error for a driver that cannot be loaded or finds no device."""
    if isinstance(error, ImportError):
        return DeviceUnavailable(f"no {kind} device: the Python bindings are not installed ({error}); pip install 'epdsl[{extra}]'")
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    hint = f"{library} was not usable" if os.name == "posix" else "only Linux is supported"
    return DeviceUnavailable(f"no {kind} device: {hint}: {first}")
