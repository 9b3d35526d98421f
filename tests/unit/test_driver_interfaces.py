"""The numbers, layouts and signatures by which the CUDA and the HIP driver are called, against the published interfaces.

The tables are from cuda.h (CUDA 13) and hip_runtime_api.h (HIP 6.3 to 7.15); signatures are compared with the declarations that come with
the bindings, which are made from those headers.
"""

import ctypes
import importlib.util
import re
from pathlib import Path

import pytest
from epdsl_runtime import cuda, cuda_memory, hip, hip_memory

DRIVER_C = Path(__file__).parent / "standin" / "driver.c"

HIP = {
    "hipError_t": {
        "hipSuccess": 0,
        "hipErrorInvalidValue": 1,
        "hipErrorOutOfMemory": 2,
        "hipErrorInvalidConfiguration": 9,
        "hipErrorInvalidDevice": 101,
        "hipErrorInvalidImage": 200,
        "hipErrorInvalidContext": 201,
        "hipErrorInvalidKernelFile": 218,
        "hipErrorInvalidHandle": 400,
        "hipErrorNotFound": 500,
        "hipErrorNotReady": 600,
        "hipErrorIllegalAddress": 700,
        "hipErrorPeerAccessAlreadyEnabled": 704,
        "hipErrorNotSupported": 801,
        "hipErrorStreamCaptureUnsupported": 900,
        "hipErrorStreamCaptureInvalidated": 901,
    },
    "hipMemAllocationType": {"hipMemAllocationTypePinned": 1, "hipMemAllocationTypeUncached": 0x40000000},
    "hipMemAllocationHandleType": {"hipMemHandleTypePosixFileDescriptor": 1},
    "hipMemLocationType": {"hipMemLocationTypeDevice": 1},
    "hipMemAccessFlags": {"hipMemAccessFlagsProtReadWrite": 3},
    "hipMemAllocationGranularity_flags": {"hipMemAllocationGranularityMinimum": 0, "hipMemAllocationGranularityRecommended": 1},
    "hipMemcpyKind": {"hipMemcpyHostToDevice": 1, "hipMemcpyDeviceToHost": 2, "hipMemcpyDeviceToDevice": 3, "hipMemcpyDefault": 4},
    "hipStreamCaptureMode": {"hipStreamCaptureModeGlobal": 0, "hipStreamCaptureModeThreadLocal": 1, "hipStreamCaptureModeRelaxed": 2},
    None: {
        "HIP_IPC_HANDLE_SIZE": 64,
        "hipDeviceMallocFinegrained": 1,
        "hipMallocSignalMemory": 2,
        "hipHostMallocPortable": 1,
        "hipHostMallocMapped": 2,
        "hipHostMallocCoherent": 0x40000000,
        "hipIpcMemLazyEnablePeerAccess": 1,
        "hipStreamNonBlocking": 1,
    },
}
CUDA = {
    "CUresult": {
        "CUDA_SUCCESS": 0,
        "CUDA_ERROR_INVALID_VALUE": 1,
        "CUDA_ERROR_OUT_OF_MEMORY": 2,
        "CUDA_ERROR_INVALID_DEVICE": 101,
        "CUDA_ERROR_INVALID_IMAGE": 200,
        "CUDA_ERROR_INVALID_CONTEXT": 201,
        "CUDA_ERROR_INVALID_PTX": 218,
        "CUDA_ERROR_INVALID_HANDLE": 400,
        "CUDA_ERROR_NOT_FOUND": 500,
        "CUDA_ERROR_NOT_READY": 600,
        "CUDA_ERROR_ILLEGAL_ADDRESS": 700,
        "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED": 704,
        "CUDA_ERROR_NOT_PERMITTED": 800,
        "CUDA_ERROR_NOT_SUPPORTED": 801,
        "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED": 900,
        "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED": 901,
    },
    "CUdevice_attribute": {
        "CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK": 1,
        "CU_DEVICE_ATTRIBUTE_WARP_SIZE": 10,
        "CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT": 16,
        "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR": 75,
        "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR": 76,
        "CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 97,
    },
    "CUfunction_attribute": {"CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES": 8},
    "CUjit_option": {"CU_JIT_ERROR_LOG_BUFFER": 5, "CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES": 6, "CU_JIT_GENERATE_LINE_INFO": 13},
    "CUmemAllocationType": {"CU_MEM_ALLOCATION_TYPE_PINNED": 1},
    "CUmemAllocationHandleType": {"CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR": 1, "CU_MEM_HANDLE_TYPE_FABRIC": 8},
    "CUmemLocationType": {"CU_MEM_LOCATION_TYPE_DEVICE": 1},
    "CUmemAccess_flags": {"CU_MEM_ACCESS_FLAGS_PROT_READWRITE": 3},
    "CUmemAllocationGranularity_flags": {"CU_MEM_ALLOC_GRANULARITY_MINIMUM": 0, "CU_MEM_ALLOC_GRANULARITY_RECOMMENDED": 1},
    "CUstreamCaptureMode": {
        "CU_STREAM_CAPTURE_MODE_GLOBAL": 0,
        "CU_STREAM_CAPTURE_MODE_THREAD_LOCAL": 1,
        "CU_STREAM_CAPTURE_MODE_RELAXED": 2,
    },
    "CUstream_flags": {"CU_STREAM_NON_BLOCKING": 1},
    "CUipcMem_flags": {"CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS": 1},
    None: {"CU_IPC_HANDLE_SIZE": 64, "CU_MEMHOSTALLOC_PORTABLE": 1, "CU_MEMHOSTALLOC_DEVICEMAP": 2},
}


@pytest.mark.parametrize(("package", "module", "table"), [("cuda.bindings", "driver", CUDA), ("hip", "hip", HIP)])
def test_the_bindings_have_the_published_numbers(package, module, table):
    bindings = _bindings(package, module)
    for enum, values in table.items():
        names = bindings if enum is None else getattr(bindings, enum)
        assert {name: int(getattr(names, name)) for name in values} == values, enum


def test_the_numbers_that_are_written_down_here_are_the_published_ones():
    assert {name: value for name, value in vars(hip).items() if name.startswith("_") and type(value) is int} == {
        "_IPC_HANDLE_BYTES": 64,
        "_NOT_READY": 600,
        # hipDeviceMallocUncached, which the bindings leave out.
        "_UNCACHED": 3,
    }
    assert {name: value for name, value in vars(hip_memory).items() if name.startswith("_") and type(value) is int} == {
        # 10,000,000 times the major version and 100,000 times the minor one (hip_version.h).
        "_DESCRIPTOR_BY_VALUE": 70100000,
        "_UNCACHED": 0x40000000,
        "_DEVICE": 1,
        "_READ_WRITE": 3,
    }
    assert {name: value for name, value in vars(cuda).items() if name.startswith("_") and type(value) is int} == {
        "_IPC_HANDLE_BYTES": 64,
        "_IPC_LAZY_ENABLE_PEER_ACCESS": 1,
        "_HOST_PORTABLE": 1,
        "_HOST_DEVICEMAP": 2,
        "_STREAM_NON_BLOCKING": 1,
        "_NOT_READY": 600,
        "_LOG_BYTES": 16384,
    }
    assert cuda_memory.FABRIC_HANDLE_BYTES == 64


def test_structures_have_the_published_layout():
    def layout(kind):
        return ctypes.sizeof(kind), [(name, getattr(kind, name).offset) for name, _ in kind._fields_]

    fields = [("type", 0), ("requested", 4), ("location", 8), ("win32", 16), ("flags", 24)]
    assert layout(hip_memory._Properties) == (32, fields)
    assert layout(hip_memory._Location) == (8, [("type", 0), ("id", 4)])
    assert layout(hip_memory._Access) == (12, [("location", 0), ("flags", 8)])


def test_structures_have_the_layout_of_the_bindings():
    """What HipMemory fills in itself, as the bindings' own classes would (they leave out the kind of handle, which is in a union)."""
    bindings = _bindings("hip", "hip")
    theirs = bindings.hipMemAllocationProp(type=bindings.hipMemAllocationType.hipMemAllocationTypeUncached, win32HandleMetaData=0x1234)
    theirs.location.type, theirs.location.id = bindings.hipMemLocationType.hipMemLocationTypeDevice, 5
    ours = hip_memory._Properties(hip_memory._UNCACHED, 1, hip_memory._Location(hip_memory._DEVICE, 5), 0x1234, 0)
    found = bytearray(ctypes.string_at(int(theirs), 28))
    found[4:8] = (1).to_bytes(4, "little")
    assert bytes(found) == bytes(ours)[:28]
    access = bindings.hipMemAccessDesc(flags=bindings.hipMemAccessFlags.hipMemAccessFlagsProtReadWrite)
    access.location.type, access.location.id = bindings.hipMemLocationType.hipMemLocationTypeDevice, 5
    made = hip_memory._Access(hip_memory._Location(hip_memory._DEVICE, 5), hip_memory._READ_WRITE)
    assert ctypes.string_at(int(access), 12) == bytes(made)


# Names of 8-byte types; what is neither here nor a pointer nor a structure is an enumeration or an int.
_EIGHT = re.compile(
    r"(size_t|uint64_t|unsigned long long|cuuint64_t|P|CUdeviceptr|CUmemGenericAllocationHandle"
    r"|CU(context|stream|event|module|function|graph|graphExec)|hip(Stream|Event|Module|Function|Graph|GraphExec|MemGenericAllocationHandle)_t)"
)
_STRUCTURES = ("Ipc", "CUipcMemHandle", "hipIpcMemHandle_st", "hipIpcMemHandle_t")


def shape(parameter: str) -> str:
    """How a parameter is passed: "8" or "4" bytes, "1" byte, "s" the 64 bytes of an IPC handle."""
    kind = re.sub(r"\bconst\b", "", parameter)
    if "*" in kind or "[" in kind:
        return "8"
    words = kind.split()
    base = " ".join(words[:-1]) if len(words) > 1 and words[-1] not in ("int", "char", "long") else " ".join(words)
    if base in _STRUCTURES:
        return "s"
    return "8" if _EIGHT.fullmatch(base) else "1" if base == "unsigned char" else "4"


def shapes(parameters: str) -> str:
    return "".join(shape(one) for one in parameters.split(",") if one.strip() not in ("", "void"))


# Exported under other names than they are declared: by version, or by what looks symbols up.
_UNDECLARED = {
    "cuGetProcAddress",
    "cuGetProcAddress_v2",
    "cuDeviceGetUuid_v2",
    "cuGraphInstantiateWithFlags",
    "hipGetDevicePropertiesR0600",
}


@pytest.mark.parametrize(
    ("package", "file", "prefix", "least"), [("cuda.bindings", "cydriver.pxd", "cu", 50), ("rocm.bindings", "cyhip.pxd", "hip", 45)]
)
def test_the_stand_in_takes_what_the_published_functions_take(package, file, prefix, least):
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:
        spec = None
    if spec is None or spec.submodule_search_locations is None:
        pytest.skip(f"{package} is not installed")
    declarations = (Path(next(iter(spec.submodule_search_locations))) / file).read_text()
    published = {
        name: shapes(parameters)
        for name, parameters in re.findall(rf"^cdef .*?\b({prefix}[A-Z]\w*)\((.*?)\) (?:except|noexcept)", declarations, re.M)
    }
    ours = dict(re.findall(rf"^(?:int |const char \*)({prefix}[A-Z]\w*)\((.*?)\) \{{", DRIVER_C.read_text(), re.M))
    compared = sorted(set(ours) - _UNDECLARED)
    assert len(compared) >= least
    assert {name: shapes(ours[name]) for name in compared} == {name: published.get(name) for name in compared}


def test_the_shapes_of_parameters():
    text = "CUdeviceptr* pdptr, CUipcMemHandle handle, unsigned int Flags, hipStream_t s, unsigned char uc, size_t n, hipMemcpyKind kind"
    assert shapes(text) == "8s48184"
    assert shapes("void *out, Ipc h, unsigned flags, P p, int") == "8s484" and shapes("void") == ""


def _bindings(package: str, module: str):
    try:
        found = __import__(package, fromlist=[module])
    except ImportError:
        pytest.skip(f"{package} is not installed")
    return getattr(found, module)
