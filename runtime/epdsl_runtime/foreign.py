"""Arrays of other libraries as kernel arguments: torch tensors, `__cuda_array_interface__`, `__dlpack__`. None of them is imported."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .dtypes import dtype_name
from .errors import ArgumentTypeError, ArgumentValueError

if TYPE_CHECKING:
    from .protocol import Device


@dataclass(frozen=True)
class Foreign:
    """Where an array lies, its element type's name, and how to call it in a message."""

    address: int
    dtype: str
    source: str


# dlpack.h: DLDeviceType. Host and managed memory that the device can address counts as its own.
_DL_CPU = 1
DL_PLACES: dict[str, frozenset[int]] = {"cuda": frozenset((2, 3, 13)), "hip": frozenset((10, 11)), "sim": frozenset((_DL_CPU,))}
_DL_DEVICE_NAMES = {1: "CPU", 2: "CUDA", 3: "CUDA host", 10: "ROCm", 11: "ROCm host", 13: "CUDA managed"}
# dlpack.h: DLDataTypeCode and bits.
DL_TYPES: dict[tuple[int, int], str] = {
    **{(0, bits): f"i{bits}" for bits in (8, 16, 32, 64)},
    **{(1, bits): f"u{bits}" for bits in (8, 16, 32, 64)},
    **{(2, bits): f"f{bits}" for bits in (16, 32, 64)},
    (4, 16): "bf16",
    (6, 8): "i1",
    (10, 8): "f8e4m3",
    (12, 8): "f8e5m2",
}

_TORCH_TYPES: dict[str, str] = {
    "torch.bool": "i1",
    "torch.int8": "i8",
    "torch.int16": "i16",
    "torch.int32": "i32",
    "torch.int64": "i64",
    "torch.uint8": "u8",
    "torch.uint16": "u16",
    "torch.uint32": "u32",
    "torch.uint64": "u64",
    "torch.float16": "f16",
    "torch.bfloat16": "bf16",
    "torch.float32": "f32",
    "torch.float64": "f64",
    "torch.float8_e4m3fn": "f8e4m3",
    "torch.float8_e5m2": "f8e5m2",
}


class DLTensor(ctypes.Structure):
    """dlpack.h."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]


def foreign_array(name: str, arg: Any, device: Device | None) -> Foreign | None:
    """Reads an array of another library; None when `arg` is none.

    Raises TypeError or ValueError, naming parameter `name`, for an array the kernel cannot use: wrong device, strided, unknown type.
    """
    if isinstance(arg, (np.ndarray, np.generic)):
        return None
    if _is_torch(arg):
        return _torch(name, arg, device)
    interface = getattr(arg, "__cuda_array_interface__", None)
    if interface is not None:
        return _cuda_interface(name, arg, interface, device)
    if hasattr(arg, "__dlpack__"):
        return _dlpack(name, arg, device)
    return None


def _is_torch(arg: Any) -> bool:
    return type(arg).__module__.partition(".")[0] == "torch" and hasattr(arg, "data_ptr")


def _torch(name: str, arg: Any, device: Device | None) -> Foreign:
    source = f"a torch tensor of shape {tuple(arg.shape)}"
    dtype = _TORCH_TYPES.get(str(arg.dtype))
    if dtype is None:
        raise ArgumentTypeError("EP208", f"parameter {name!r} got {source} of {arg.dtype}, which kernels do not have")
    if not arg.is_contiguous():
        raise ArgumentValueError(
            "EP213", f"parameter {name!r} got {source} with strides {tuple(arg.stride())}; a kernel needs it contiguous: call .contiguous()"
        )
    if device is not None:
        # PyTorch calls an AMD device "cuda" too.
        wanted = "cpu" if device.info.kind == "sim" else "cuda"
        if arg.device.type != wanted:
            raise ArgumentValueError("EP212", f"parameter {name!r} must be memory of {_place(device)}, got {source} on {arg.device}")
        if wanted == "cuda" and arg.device.index is not None and arg.device.index != device.info.index:
            raise ArgumentValueError(
                "EP212", f"parameter {name!r} must be on device {device.info.index}, got {source} on device {arg.device.index}"
            )
    return Foreign(arg.data_ptr(), dtype, source)


def _cuda_interface(name: str, arg: Any, interface: dict[str, Any], device: Device | None) -> Foreign:
    shape = tuple(interface["shape"])
    source = f"a {type(arg).__name__} of shape {shape}"
    if device is not None and device.info.kind == "sim":
        raise ArgumentValueError(
            "EP212", f"parameter {name!r} must be memory of {_place(device)}, got {source} in CUDA memory; copy it with rank.array(...)"
        )
    dtype = np.dtype(interface["typestr"])
    strides = interface.get("strides")
    if strides is not None and not _contiguous(shape, [s / dtype.itemsize for s in strides]):
        raise ArgumentValueError(
            "EP213", f"parameter {name!r} got {source} with strides {tuple(strides)} bytes; a kernel needs it contiguous"
        )
    return Foreign(int(interface["data"][0] or 0), dtype_name(dtype), source)


def _dlpack(name: str, arg: Any, device: Device | None) -> Foreign:
    # The capsule is left unconsumed: its destructor gives the reference back, and the caller keeps the array alive.
    capsule = arg.__dlpack__()
    address = _capsule_pointer(capsule, b"dltensor")
    tensor = DLTensor.from_address(address)
    shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
    source = f"a {type(arg).__name__} of shape {shape}"
    if device is not None:
        if tensor.device_type not in DL_PLACES[device.info.kind]:
            where = _DL_DEVICE_NAMES.get(tensor.device_type, f"DLPack device {tensor.device_type}")
            raise ArgumentValueError("EP212", f"parameter {name!r} must be memory of {_place(device)}, got {source} in {where} memory")
        if tensor.device_type in (2, 10) and tensor.device_id != device.info.index:
            raise ArgumentValueError(
                "EP212", f"parameter {name!r} must be on device {device.info.index}, got {source} on device {tensor.device_id}"
            )
    dtype = DL_TYPES.get((tensor.code, tensor.bits)) if tensor.lanes == 1 else None
    if dtype is None:
        kind = f"code {tensor.code}, {tensor.bits} bits, {tensor.lanes} lanes"
        raise ArgumentTypeError("EP208", f"parameter {name!r} got {source} of DLPack type ({kind}), which kernels do not have")
    if tensor.strides and not _contiguous(shape, [tensor.strides[i] for i in range(tensor.ndim)]):
        strides = tuple(tensor.strides[i] for i in range(tensor.ndim))
        raise ArgumentValueError("EP213", f"parameter {name!r} got {source} with strides {strides}; a kernel needs it contiguous")
    return Foreign((tensor.data or 0) + tensor.byte_offset, dtype, source)


def _contiguous(shape: tuple[int, ...], strides: list[Any]) -> bool:
    expected = 1
    for n, stride in zip(reversed(shape), reversed(strides), strict=True):
        if n != 1 and stride != expected and 0 not in shape:
            return False
        expected *= n
    return True


def _place(device: Device) -> str:
    return f"{device.info.kind}:{device.info.index}"
