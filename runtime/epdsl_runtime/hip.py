"""AMD devices through HIP (`hip-python`)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from .driver_device import DEFAULT_SHARED_LIMIT, DeviceUnavailable, DriverDevice, DriverError, call_text, driver_missing
from .hip_memory import HipMemory
from .protocol import DeviceInfo, Dim3

_LIBRARY = "libamdhip64.so"
_IPC_HANDLE_BYTES = 64
_NOT_READY = 600
# hip_runtime_api.h: hipDeviceMallocUncached, which the bindings leave out.
_UNCACHED = 3
# What ROCr calls a GPU that has no number of its own, without its prefix "GPU-" (hsa_ext_amd.h: HSA_AMD_AGENT_INFO_UUID).
_NO_UUID = ("", "XX")


def load_driver() -> Any:
    """The bindings, with the runtime initialised.

    Raises DeviceUnavailable when the package or ROCm is missing.
    """
    try:
        from hip import hip
    except ImportError as error:
        raise driver_missing("HIP", _LIBRARY, "rocm", error, "install ROCm, or set ROCM_PATH to where it is") from error
    try:
        status = hip.hipInit(0)[0]
    except Exception as error:
        raise driver_missing("HIP", _LIBRARY, "rocm", error, "install ROCm, or set ROCM_PATH to where it is") from error
    if int(status):
        name, text = _error_texts(hip, status)
        raise DeviceUnavailable("EP220", f"no HIP device: hipInit: {name} ({int(status)}): {text}")
    return hip


def device_count() -> int:
    """How many HIP devices this process sees. Raises DeviceUnavailable when there is no ROCm."""
    hip = load_driver()
    status, count = hip.hipGetDeviceCount()
    if int(status):
        name, text = _error_texts(hip, status)
        raise DeviceUnavailable("EP220", f"no HIP device: hipGetDeviceCount: {name} ({int(status)}): {text}")
    return count


def _error_texts(hip: Any, status: Any) -> tuple[str, str]:
    """HIP's name and description of a status."""
    texts: list[str] = []
    for read in (hip.hipGetErrorName, hip.hipGetErrorString):
        _, text = read(status)
        texts.append(str(status) if text is None else text.decode())
    return texts[0], texts[1]


class HipDriver:
    """The HIP calls of one device. See `driver_device.Driver`."""

    kind = "hip"
    share_kinds = ("fd", "ipc")
    # Coarse-grained memory (ROCm: HIP, coherence control): an agent's caches follow what others write there at the ends of kernels alone.
    foreign = (
        "memory of other allocators is cached by an AMD GPU, and a kernel that runs need not see what a peer writes there. "
        "Use rank.symmetric(...): its array can be viewed as a tensor without a copy (torch.from_dlpack)"
    )

    def __init__(self, index: int = 0) -> None:
        self._hip = load_driver()
        self._index = index
        self._place = f"hip:{index}"
        count = device_count()
        if not 0 <= index < count:
            raise DeviceUnavailable(
                "EP221", f"hip:{index} does not exist: this process sees {count} HIP devices (HIP_VISIBLE_DEVICES chooses them)"
            )
        self.virtual = HipMemory(self._hip, self._call, index)

    def _enter(self) -> None:
        self._check(self._hip.hipSetDevice(self._index), "hipSetDevice", self._index)

    def _check(self, result: Any, call: str, *args: Any) -> Any:
        status = result[0]
        if int(status):
            name, text = _error_texts(self._hip, status)
            raise DriverError(call_text(call, args), self._place, int(status), name, text)
        return result[1] if len(result) == 2 else result[1:]

    def _call(self, call: str, *args: Any) -> Any:
        """Makes the device current on this thread, then the call."""
        self._enter()
        try:
            result = getattr(self._hip, call)(*args)
        except RuntimeError as error:
            text = f"{self._place} cannot be used: {_LIBRARY} is older than the bindings and has no {call}; install a newer ROCm ({error})"
            raise DeviceUnavailable("EP220", text) from error
        return self._check(result, call, *args)

    def info(self) -> DeviceInfo:
        props = self._call("hipGetDeviceProperties", self._index)
        return DeviceInfo(
            kind="hip",
            index=self._index,
            name=_text(props.name),
            target=_text(props.gcnArchName).partition(":")[0],
            vendor="amd",
            warp_size=int(props.warpSize),
            num_sms=int(props.multiProcessorCount),
            max_threads_per_block=int(props.maxThreadsPerBlock),
            max_shared_bytes=max(int(props.sharedMemPerBlock), DEFAULT_SHARED_LIMIT),
            total_memory=int(props.totalGlobalMem),
            uuid=self._uuid(props),
        )

    def _uuid(self, props: Any) -> str:
        found = _text(self._call("hipDeviceGetUuid", self._index).bytes)
        place = f"PCI-{props.pciDomainID:04x}:{props.pciBusID:02x}:{props.pciDeviceID:02x}"
        return place if found in _NO_UUID else f"GPU-{found}"

    def close(self) -> None:
        """Nothing: HIP's primary contexts are the runtime's own."""

    def allocate(self, nbytes: int) -> int:
        return int(self._call("hipMalloc", nbytes))

    def allocate_for_peers(self, nbytes: int) -> int:
        return int(self._call("hipExtMallocWithFlags", nbytes, _UNCACHED))

    def free(self, address: int) -> None:
        self._call("hipFree", address)

    def set_bytes(self, address: int, byte: int, nbytes: int, stream: int) -> None:
        self._call("hipMemsetAsync", address, byte, nbytes, stream)

    def _copy(self, target: int, source: int, nbytes: int, kind: str, stream: int) -> None:
        self._call("hipMemcpyAsync", target, source, nbytes, getattr(self._hip.hipMemcpyKind, kind), stream)

    def copy_in(self, address: int, source: int, nbytes: int, stream: int) -> None:
        self._copy(address, source, nbytes, "hipMemcpyHostToDevice", stream)

    def copy_out(self, target: int, address: int, nbytes: int, stream: int) -> None:
        self._copy(target, address, nbytes, "hipMemcpyDeviceToHost", stream)

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self._copy(target, source, nbytes, "hipMemcpyDefault", stream)

    def host_allocate(self, nbytes: int) -> tuple[int, int]:
        # Coherent: what a kernel stores there with system scope reaches the host before the kernel ends.
        flags = self._hip.hipHostMallocPortable | self._hip.hipHostMallocMapped | self._hip.hipHostMallocCoherent
        host = int(self._call("hipHostMalloc", nbytes, flags))
        return host, int(self._call("hipHostGetDevicePointer", host, 0))

    def host_free(self, address: int) -> None:
        self._call("hipHostFree", address)

    def stream_create(self) -> int:
        return int(self._call("hipStreamCreateWithFlags", self._hip.hipStreamNonBlocking))

    def stream_destroy(self, stream: int) -> None:
        self._call("hipStreamDestroy", stream)

    def _done(self, call: str, handle: int) -> bool:
        self._enter()
        result = getattr(self._hip, call)(handle)
        if int(result[0]) == _NOT_READY:
            return False
        self._check(result, call, handle)
        return True

    def stream_done(self, stream: int) -> bool:
        return self._done("hipStreamQuery", stream)

    def synchronize(self) -> None:
        self._call("hipDeviceSynchronize")

    def event_create(self) -> int:
        return int(self._call("hipEventCreate"))

    def event_destroy(self, event: int) -> None:
        self._call("hipEventDestroy", event)

    def event_record(self, event: int, stream: int) -> None:
        self._call("hipEventRecord", event, stream)

    def event_done(self, event: int) -> bool:
        return self._done("hipEventQuery", event)

    def event_elapsed_ms(self, start: int, end: int) -> float:
        return float(self._call("hipEventElapsedTime", start, end))

    def module_load(self, image: bytes, name: str) -> tuple[int, int]:
        self._enter()
        module = int(self._check(self._hip.hipModuleLoadData(image), "hipModuleLoadData", f"{len(image)} bytes of {name}"))
        try:
            return module, int(self._call("hipModuleGetFunction", module, name.encode()))
        except DriverError:
            self.module_unload(module)
            raise

    def module_unload(self, module: int) -> None:
        self._call("hipModuleUnload", module)

    def allow_shared(self, function: int, nbytes: int) -> None:
        """Nothing: a kernel of a code object may use all of the LDS without being allowed to."""

    def resident_blocks(self, function: int, block_threads: int, shared_bytes: int) -> int:
        return int(self._call("hipModuleOccupancyMaxActiveBlocksPerMultiprocessor", function, block_threads, shared_bytes))

    def launcher(self, function: int, grid: Dim3, block: Dim3, shared_bytes: int, stream: int, parameters: int) -> Callable[[], None]:
        args = (function, *grid, *block, shared_bytes, stream or None, parameters, None)
        launch = self._hip.hipModuleLaunchKernel

        def start() -> None:
            self._enter()
            result = launch(*args)
            if int(result[0]):
                self._check(result, f"hipModuleLaunchKernel(grid={grid}, block={block}, shared_bytes={shared_bytes})")

        return start

    def capture_begin(self, stream: int) -> None:
        # Other threads (a data loader, a collective's watchdog) may go on with what no capture allows.
        self._call("hipStreamBeginCapture", stream, self._hip.hipStreamCaptureMode.hipStreamCaptureModeThreadLocal)

    def capture_end(self, stream: int) -> int:
        graph = self._call("hipStreamEndCapture", stream)
        try:
            return int(self._call("hipGraphInstantiate", graph, 0)[0])
        finally:
            self._call("hipGraphDestroy", graph)

    def graph_launch(self, graph: int, stream: int) -> None:
        self._call("hipGraphLaunch", graph, stream)

    def graph_destroy(self, graph: int) -> None:
        self._call("hipGraphExecDestroy", graph)

    def allocation_of(self, address: int) -> tuple[int, int]:
        base, nbytes = self._call("hipMemGetAddressRange", address)
        return int(base), int(nbytes)

    def ipc_handle(self, address: int) -> bytes:
        # Named, so that it outlives the reading of its bytes.
        handle = self._call("hipIpcGetMemHandle", address)
        return ctypes.string_at(int(handle), _IPC_HANDLE_BYTES)

    def ipc_open(self, handle: bytes) -> int:
        opaque = self._hip.hipIpcMemHandle_st()
        ctypes.memmove(int(opaque), handle, _IPC_HANDLE_BYTES)
        return int(self._call("hipIpcOpenMemHandle", opaque, self._hip.hipIpcMemLazyEnablePeerAccess))

    def ipc_close(self, address: int) -> None:
        self._call("hipIpcCloseMemHandle", address)

    def enable_peer(self, index: int) -> None:
        if not self._check(self._hip.hipDeviceCanAccessPeer(self._index, index), "hipDeviceCanAccessPeer", self._index, index):
            raise DeviceUnavailable("EP222", f"hip:{self._index} cannot reach the memory of hip:{index}: the devices have no peer access")
        self._enter()
        result = self._hip.hipDeviceEnablePeerAccess(index, 0)
        if result[0] != self._hip.hipError_t.hipErrorPeerAccessAlreadyEnabled:
            self._check(result, "hipDeviceEnablePeerAccess", index)


def _text(value: Any) -> str:
    return value.split(b"\0")[0].decode() if isinstance(value, bytes) else str(value)


class HipDevice(DriverDevice):
    """An AMD GPU.

    Raises DeviceUnavailable when there is no ROCm or no device `index`.
    """

    def __init__(self, index: int = 0) -> None:
        super().__init__(HipDriver(index))
