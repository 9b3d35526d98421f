"""NVIDIA devices through the CUDA driver API (`cuda.bindings.driver`), in the device's primary context."""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable
from typing import Any
from uuid import UUID

from .cuda_memory import CudaMemory
from .driver_device import DEFAULT_SHARED_LIMIT, DeviceUnavailable, DriverDevice, DriverError, call_text, driver_missing
from .protocol import DeviceInfo, Dim3

_IPC_HANDLE_BYTES = 64
_IPC_LAZY_ENABLE_PEER_ACCESS = 1
_HOST_PORTABLE = 1
_HOST_DEVICEMAP = 2
_STREAM_NON_BLOCKING = 1
_NOT_READY = 600
_LOG_BYTES = 16384


def load_driver() -> Any:
    """The bindings, with the driver initialised.

    Raises DeviceUnavailable when the package or the driver is missing.
    """
    try:
        driver = importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise driver_missing("CUDA", "libcuda.so.1", "cuda", error, "install the NVIDIA driver") from error
    try:
        status = driver.cuInit(0)[0]
    except Exception as error:
        raise driver_missing("CUDA", "libcuda.so.1", "cuda", error, "install the NVIDIA driver") from error
    if int(status):
        raise DeviceUnavailable(
            "EP220", f"no CUDA device: cuInit: {_error_texts(driver, status)[0]} ({int(status)}): {_error_texts(driver, status)[1]}"
        )
    return driver


def device_count() -> int:
    """How many CUDA devices this process sees. Raises DeviceUnavailable when there is no driver."""
    driver = load_driver()
    status, count = driver.cuDeviceGetCount()
    if int(status):
        raise DeviceUnavailable("EP220", f"no CUDA device: cuDeviceGetCount: {_error_texts(driver, status)[0]}")
    return count


def _error_texts(driver: Any, status: Any) -> tuple[str, str]:
    """The driver's name and description of a status."""
    texts: list[str] = []
    for read in (driver.cuGetErrorName, driver.cuGetErrorString):
        found, text = read(status)
        texts.append(text.decode() if not int(found) and text else str(status))
    return texts[0], texts[1]


class CudaDriver:
    """The driver calls of one device. See `driver_device.Driver`."""

    kind = "cuda"
    share_kinds = ("fabric", "fd", "ipc")

    def __init__(self, index: int = 0) -> None:
        self._cu = load_driver()
        self._index = index
        self._place = f"cuda:{index}"
        count = device_count()
        if not 0 <= index < count:
            raise DeviceUnavailable(
                "EP221", f"cuda:{index} does not exist: this process sees {count} CUDA devices (CUDA_VISIBLE_DEVICES chooses them)"
            )
        self._device = self._check(self._cu.cuDeviceGet(index), "cuDeviceGet", index)
        self._context = self._check(self._cu.cuDevicePrimaryCtxRetain(self._device), "cuDevicePrimaryCtxRetain")
        # The launch path goes to the library itself: a prepared call costs less than through the bindings.
        self._library = ctypes.CDLL("libcuda.so.1")
        # These calls never wait, so they may keep the interpreter's lock.
        quick = ctypes.PyDLL("libcuda.so.1")
        self._set_current, self._query_stream, self._query_event = quick.cuCtxSetCurrent, quick.cuStreamQuery, quick.cuEventQuery
        self._query_stream.argtypes = self._query_event.argtypes = (ctypes.c_void_p,)
        self._context_pointer = ctypes.c_void_p(int(self._context))
        self._peers: dict[int, Any] = {}
        self._enter()
        self.virtual = self.foreign = CudaMemory(self._cu, self._call, int(self._device))

    def _enter(self) -> None:
        self._check(self._cu.cuCtxSetCurrent(self._context), "cuCtxSetCurrent")

    def _check(self, result: Any, call: str, *args: Any, detail: str = "") -> Any:
        status = result[0]
        if int(status):
            name, text = _error_texts(self._cu, status)
            raise DriverError(call_text(call, args), self._place, int(status), name, text, detail)
        return result[1] if len(result) == 2 else result[1:]

    def _call(self, call: str, *args: Any) -> Any:
        """Makes the context current on this thread, then the call."""
        self._enter()
        return self._check(getattr(self._cu, call)(*args), call, *args)

    def _attribute(self, name: str) -> int:
        attribute = getattr(self._cu.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(self._check(self._cu.cuDeviceGetAttribute(attribute, self._device), "cuDeviceGetAttribute", name))

    def info(self) -> DeviceInfo:
        name = self._check(self._cu.cuDeviceGetName(256, self._device), "cuDeviceGetName")
        return DeviceInfo(
            kind="cuda",
            index=self._index,
            name=name.split(b"\0")[0].decode(),
            target=f"sm_{self._attribute('COMPUTE_CAPABILITY_MAJOR')}{self._attribute('COMPUTE_CAPABILITY_MINOR')}",
            vendor="nvidia",
            warp_size=self._attribute("WARP_SIZE"),
            num_sms=self._attribute("MULTIPROCESSOR_COUNT"),
            max_threads_per_block=self._attribute("MAX_THREADS_PER_BLOCK"),
            max_shared_bytes=max(self._attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"), DEFAULT_SHARED_LIMIT),
            total_memory=int(self._check(self._cu.cuDeviceTotalMem(self._device), "cuDeviceTotalMem")),
            uuid=f"GPU-{UUID(bytes=bytes(self._check(self._cu.cuDeviceGetUuid(self._device), 'cuDeviceGetUuid').bytes))}",
        )

    def close(self) -> None:
        for device in (*self._peers.values(), self._device):
            self._check(self._cu.cuDevicePrimaryCtxRelease(device), "cuDevicePrimaryCtxRelease")
        self._peers.clear()

    def allocate(self, nbytes: int) -> int:
        return int(self._call("cuMemAlloc", nbytes))

    def allocate_for_peers(self, nbytes: int) -> int:
        return self.allocate(nbytes)

    def free(self, address: int) -> None:
        self._call("cuMemFree", address)

    def set_bytes(self, address: int, byte: int, nbytes: int, stream: int) -> None:
        self._call("cuMemsetD8Async", address, byte, nbytes, stream)

    def copy_in(self, address: int, source: int, nbytes: int, stream: int) -> None:
        self._call("cuMemcpyHtoDAsync", address, source, nbytes, stream)

    def copy_out(self, target: int, address: int, nbytes: int, stream: int) -> None:
        self._call("cuMemcpyDtoHAsync", target, address, nbytes, stream)

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self._call("cuMemcpyAsync", target, source, nbytes, stream)

    def host_allocate(self, nbytes: int) -> tuple[int, int]:
        host = int(self._call("cuMemHostAlloc", nbytes, _HOST_PORTABLE | _HOST_DEVICEMAP))
        return host, int(self._call("cuMemHostGetDevicePointer", host, 0))

    def host_free(self, address: int) -> None:
        self._call("cuMemFreeHost", address)

    def stream_create(self) -> int:
        return int(self._call("cuStreamCreate", _STREAM_NON_BLOCKING))

    def stream_destroy(self, stream: int) -> None:
        self._call("cuStreamDestroy", stream)

    def stream_done(self, stream: int) -> bool:
        # Asked often: past the bindings, as a launch.
        return self._answer(self._set_current(self._context_pointer) or self._query_stream(stream), "cuStreamQuery", stream)

    def _answer(self, status: int, call: str, handle: int) -> bool:
        if status in (0, _NOT_READY):
            return not status
        return self._check((self._cu.CUresult(status),), call, handle)

    def synchronize(self) -> None:
        self._call("cuCtxSynchronize")

    def event_create(self) -> int:
        return int(self._call("cuEventCreate", 0))

    def event_destroy(self, event: int) -> None:
        self._call("cuEventDestroy", event)

    def event_record(self, event: int, stream: int) -> None:
        self._call("cuEventRecord", event, stream)

    def event_done(self, event: int) -> bool:
        return self._answer(self._set_current(self._context_pointer) or self._query_event(event), "cuEventQuery", event)

    def event_elapsed_ms(self, start: int, end: int) -> float:
        return float(self._call("cuEventElapsedTime", start, end))

    def module_load(self, image: bytes, name: str) -> tuple[int, int]:
        self._enter()
        log = bytearray(_LOG_BYTES)
        options = self._cu.CUjit_option
        chosen = {
            options.CU_JIT_ERROR_LOG_BUFFER: log,
            options.CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES: len(log),
            options.CU_JIT_GENERATE_LINE_INFO: 1,
        }
        result = self._cu.cuModuleLoadDataEx(image + b"\0", len(chosen), list(chosen), list(chosen.values()))
        text = log.split(b"\0")[0].decode(errors="replace").strip()
        module = int(self._check(result, "cuModuleLoadDataEx", name, detail=text))
        try:
            function = self._call("cuModuleGetFunction", module, name.encode())
            # Drivers before 12.4 have no such call, whatever the bindings have; they load the code with the function.
            if hasattr(self._library, "cuFuncLoad"):
                # Lazy loading would load the code at the first launch, which can wait for kernels that wait for it.
                self._call("cuFuncLoad", function)
        except DriverError:
            self.module_unload(module)
            raise
        return module, int(function)

    def module_unload(self, module: int) -> None:
        self._call("cuModuleUnload", module)

    def allow_shared(self, function: int, nbytes: int) -> None:
        attribute = self._cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self._call("cuFuncSetAttribute", function, attribute, nbytes)

    def resident_blocks(self, function: int, block_threads: int, shared_bytes: int) -> int:
        return int(self._call("cuOccupancyMaxActiveBlocksPerMultiprocessor", function, block_threads, shared_bytes))

    def launcher(self, function: int, grid: Dim3, block: Dim3, shared_bytes: int, stream: int, parameters: int) -> Callable[[], None]:
        # Numbers without a ctypes type go as C ints, the fastest way there is; the limits of a launch fit.
        enter, launch = self._set_current, self._library.cuLaunchKernel
        context = self._context_pointer
        args = (ctypes.c_void_p(function), *grid, *block, shared_bytes, ctypes.c_void_p(stream), ctypes.c_void_p(parameters), None)

        def start() -> None:
            status = enter(context) or launch(*args)
            if status:
                call = f"cuLaunchKernel(grid={grid}, block={block}, shared_bytes={shared_bytes})"
                self._check((self._cu.CUresult(status),), call)

        return start

    def capture_begin(self, stream: int) -> None:
        # Other threads (a data loader, a collective's watchdog) may go on with what no capture allows.
        self._call("cuStreamBeginCapture", stream, self._cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)

    def capture_end(self, stream: int) -> int:
        graph = self._call("cuStreamEndCapture", stream)
        try:
            return int(self._call("cuGraphInstantiate", graph, 0))
        finally:
            self._call("cuGraphDestroy", graph)

    def graph_launch(self, graph: int, stream: int) -> None:
        self._call("cuGraphLaunch", graph, stream)

    def graph_destroy(self, graph: int) -> None:
        self._call("cuGraphExecDestroy", graph)

    def allocation_of(self, address: int) -> tuple[int, int]:
        base, nbytes = self._call("cuMemGetAddressRange", address)
        return int(base), int(nbytes)

    def ipc_handle(self, address: int) -> bytes:
        handle = self._call("cuIpcGetMemHandle", address)
        return ctypes.string_at(int(handle.getPtr()), _IPC_HANDLE_BYTES)

    def ipc_open(self, handle: bytes) -> int:
        opaque = self._cu.CUipcMemHandle()
        ctypes.memmove(int(opaque.getPtr()), handle, _IPC_HANDLE_BYTES)
        return int(self._call("cuIpcOpenMemHandle", opaque, _IPC_LAZY_ENABLE_PEER_ACCESS))

    def ipc_close(self, address: int) -> None:
        self._call("cuIpcCloseMemHandle", address)

    def enable_peer(self, index: int) -> None:
        if index in self._peers:
            return
        peer = self._check(self._cu.cuDeviceGet(index), "cuDeviceGet", index)
        if not self._check(self._cu.cuDeviceCanAccessPeer(self._device, peer), "cuDeviceCanAccessPeer", self._index, index):
            raise DeviceUnavailable("EP222", f"cuda:{self._index} cannot reach the memory of cuda:{index}: the devices have no peer access")
        # Retained for as long as this device uses the peer's memory.
        context = self._check(self._cu.cuDevicePrimaryCtxRetain(peer), "cuDevicePrimaryCtxRetain", index)
        self._peers[index] = peer
        self._enter()
        result = self._cu.cuCtxEnablePeerAccess(context, 0)
        if result[0] != self._cu.CUresult.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED:
            self._check(result, "cuCtxEnablePeerAccess", index)


class CudaDevice(DriverDevice):
    """An NVIDIA GPU.

    Raises DeviceUnavailable when there is no driver or no device `index`.
    """

    def __init__(self, index: int = 0) -> None:
        super().__init__(CudaDriver(index))
