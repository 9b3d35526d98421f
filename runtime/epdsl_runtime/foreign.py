"""Arrays of other libraries as kernel arguments: torch tensors, `__cuda_array_interface__`, `__dlpack__`. None of them is imported."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .dtypes import NBYTES, TEXTS, dtype_name
from .errors import ArgumentTypeError, ArgumentValueError

if TYPE_CHECKING:
    from .protocol import Device


@dataclass(frozen=True)
class Foreign:
    """Where an array lies, its shape, its element type's name, and how to call it in a message."""

    address: int
    shape: tuple[int, ...]
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


def tensor_in(capsule: Any) -> DLTensor:
    """What a "dltensor" capsule leads to, in its memory. Raises ValueError for another one or what is none."""
    return DLTensor.from_address(_capsule_pointer(capsule, b"dltensor"))


def foreign_array(name: str, arg: Any, device: Device | None) -> Foreign | None:
    """Reads an array of another library; None when `arg` is none.

    Raises TypeError or ValueError, naming parameter `name`, for an array the kernel cannot use: wrong device, strided, read-only, unknown
    type, no memory.
    """
    if isinstance(arg, (np.ndarray, np.generic, type)):
        return None
    tensor: Any = getattr(sys.modules.get("torch"), "Tensor", None)
    if tensor is not None and isinstance(arg, tensor):
        found = _torch(name, arg, device)
    elif hasattr(arg, "__dlpack__"):
        # Asked first: unlike the other interface it tells the device, every element type and the stream.
        found = _dlpack(name, arg, device)
    elif (interface := getattr(arg, "__cuda_array_interface__", None)) is not None:
        found = _cuda_interface(name, arg, interface, device)
    else:
        return None
    if not found.address and 0 not in found.shape:
        raise ArgumentValueError(
            "EP212",
            f"parameter {name!r} got {found.source}, which has no memory: its address is 0. Its storage was freed or resized, or it is "
            "traced and holds no values; pass one that does",
        )
    return found


def _asked(name: str, arg: Any, what: str, ask: Callable[[], Any]) -> Any:
    """What an array answers. What it raises instead is told with the parameter's name."""
    try:
        return ask()
    except Exception as error:
        kind, why = type(arg).__name__, f"{type(error).__name__}: {error}"
        raise ArgumentValueError(
            "EP212", f"parameter {name!r} got a {kind} whose {what} raised {why}; a kernel needs memory of its device that it may write"
        ) from error


def _torch(name: str, arg: Any, device: Device | None) -> Foreign:
    kind = type(arg).__name__
    if arg.is_nested or str(arg.layout) != "torch.strided":
        layout = "nested" if arg.is_nested else arg.layout
        raise ArgumentValueError("EP213", f"parameter {name!r} got a {layout} torch tensor; a kernel needs it dense: pass its .values()")
    source = f"a torch {'tensor' if kind in ('Tensor', 'Parameter') else kind} of shape {tuple(arg.shape)}"
    dtype = TEXTS.get(str(arg.dtype).removeprefix("torch."))
    if dtype is None:
        raise ArgumentTypeError("EP208", f"parameter {name!r} got {source} of {arg.dtype}, which kernels do not have")
    if not arg.is_contiguous():
        raise ArgumentValueError(
            "EP213", f"parameter {name!r} got {source} with strides {tuple(arg.stride())}; a kernel needs it contiguous: call .contiguous()"
        )
    if arg.is_neg():
        raise ArgumentValueError("EP213", f"parameter {name!r} got {source} that is negated when it is read; call .resolve_neg()")
    if device is not None:
        # PyTorch calls an AMD device "cuda" too.
        wanted = "cpu" if device.info.kind == "sim" else "cuda"
        if arg.device.type != wanted:
            raise ArgumentValueError("EP212", f"parameter {name!r} must be memory of {_place(device)}, got {source} on {arg.device}")
        if wanted == "cuda" and arg.device.index is not None and arg.device.index != device.info.index:
            raise ArgumentValueError(
                "EP212", f"parameter {name!r} must be on device {device.info.index}, got {source} on device {arg.device.index}"
            )
    return Foreign(_asked(name, arg, "data_ptr()", arg.data_ptr), tuple(arg.shape), dtype, source)


def _cuda_interface(name: str, arg: Any, interface: dict[str, Any], device: Device | None) -> Foreign:
    shape = tuple(interface["shape"])
    source = f"a {type(arg).__name__} of shape {shape}"
    if device is not None and device.info.kind == "sim":
        raise ArgumentValueError(
            "EP212", f"parameter {name!r} must be memory of {_place(device)}, got {source} in CUDA memory; copy it with rank.array(...)"
        )
    typestr = interface["typestr"]
    try:
        dtype = dtype_name(typestr)
    except TypeError:
        raise ArgumentTypeError("EP208", f"parameter {name!r} got {source} of type {typestr!r}, which kernels do not have") from None
    strides = interface.get("strides")
    if strides is not None and not _contiguous(shape, [s / NBYTES[dtype] for s in strides]):
        raise ArgumentValueError(
            "EP213", f"parameter {name!r} got {source} with strides {tuple(strides)} bytes; a kernel needs it contiguous"
        )
    if interface.get("mask") is not None:
        raise ArgumentValueError("EP213", f"parameter {name!r} got {source} with a mask, which kernels do not have; fill it first")
    address, read_only = interface["data"] or (0, False)
    if read_only:
        raise _read_only(name, source)
    if device is not None and interface.get("stream") is not None:
        _after(device, int(interface["stream"]))
    return Foreign(int(address or 0), shape, dtype, source)


def _dlpack(name: str, arg: Any, device: Device | None) -> Foreign:
    kind, index = _asked(name, arg, "__dlpack_device__()", lambda: map(int, arg.__dlpack_device__()))
    if device is not None:
        if kind not in DL_PLACES[device.info.kind]:
            where = _DL_DEVICE_NAMES.get(kind, f"DLPack device {kind}")
            raise ArgumentValueError(
                "EP212", f"parameter {name!r} must be memory of {_place(device)}, got a {type(arg).__name__} in {where} memory"
            )
        if kind in (2, 10) and index != device.info.index:
            raise ArgumentValueError(
                "EP212", f"parameter {name!r} must be on device {device.info.index}, got a {type(arg).__name__} on device {index}"
            )
    # Host memory has no stream.
    options = {"stream": _consumer(device, kind)} if device is not None and kind in (2, 10, 13) else {}
    # The capsule is left unconsumed: its destructor gives the reference back, and the caller keeps the array alive.
    capsule = _asked(name, arg, "__dlpack__()", lambda: arg.__dlpack__(**options))
    tensor = _asked(name, arg, "__dlpack__()", lambda: tensor_in(capsule))
    shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
    source = f"a {type(arg).__name__} of shape {shape}"
    dtype = DL_TYPES.get((tensor.code, tensor.bits)) if tensor.lanes == 1 else None
    if dtype is None:
        told = f"code {tensor.code}, {tensor.bits} bits, {tensor.lanes} lanes"
        raise ArgumentTypeError("EP208", f"parameter {name!r} got {source} of DLPack type ({told}), which kernels do not have")
    if tensor.strides and not _contiguous(shape, [tensor.strides[i] for i in range(tensor.ndim)]):
        strides = tuple(tensor.strides[i] for i in range(tensor.ndim))
        raise ArgumentValueError("EP213", f"parameter {name!r} got {source} with strides {strides}; a kernel needs it contiguous")
    return Foreign((tensor.data or 0) + tensor.byte_offset, shape, dtype, source)


def _consumer(device: Any, kind: int) -> int:
    """The stream of launches without one, as DLPack numbers it. -1, none, during a capture: nothing runs then."""
    from .graph import is_captured

    if is_captured(device):
        return -1
    # The default stream is 1 on CUDA and 0 on ROCm.
    return device.stream_handle(None) or int(kind in DL_PLACES["cuda"])


def _after(device: Any, stream: int) -> None:
    """Has launches without a stream come after what `stream` was given (1 is the default stream). Waits for it on the host."""
    from .graph import is_captured

    if not is_captured(device) and stream not in (ours := device.stream_handle(None), ours or 1):
        device.waits.for_stream(stream)


def _read_only(name: str, source: str) -> ArgumentValueError:
    return ArgumentValueError(
        "EP212", f"parameter {name!r} got {source} that is read-only, and a kernel may write to what it is given; pass a copy"
    )


def _contiguous(shape: tuple[int, ...], strides: list[Any]) -> bool:
    expected = 1
    for n, stride in zip(reversed(shape), reversed(strides), strict=True):
        if n != 1 and stride != expected and 0 not in shape:
            return False
        expected *= n
    return True


def _place(device: Device) -> str:
    return f"{device.info.kind}:{device.info.index}"
