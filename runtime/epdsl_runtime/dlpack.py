"""Arrays of ours for other libraries by the DLPack protocol: a capsule that leads to the memory and keeps the array alive."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from .foreign import DL_PLACES, DL_TYPES, DLTensor

if TYPE_CHECKING:
    from .array import DeviceArray
    from .protocol import Device

# dlpack.h: what a device of ours is called.
_DEVICE_TYPES = {"cuda": 2, "hip": 10, "sim": 1}
_CODES = {name: code for code, name in DL_TYPES.items()}
_NAME = b"dltensor"
# The legacy default stream as DLPack names it on CUDA.
_DEFAULT_STREAMS = (0, 1)


class _Managed(ctypes.Structure):
    """dlpack.h: DLManagedTensor."""


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_Managed._fields_ = [("tensor", DLTensor), ("context", ctypes.c_void_p), ("deleter", _Deleter)]

# What consumers hold: by the structure's address, the structure, its extents and the array.
_held: dict[int, tuple[Any, ...]] = {}

_new = ctypes.pythonapi.PyCapsule_New
_new.restype, _new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.restype, _is_valid.argtypes = ctypes.c_int, [ctypes.c_void_p, ctypes.c_char_p]
# A capsule that is being destroyed is no Python object any more, so it is passed by its address.
_pointer_of_address = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_GetPointer", ctypes.pythonapi))


@_Deleter
def _delete(address: int) -> None:
    _held.pop(address, None)


@ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
def _destroy(capsule: int) -> None:
    # A consumer has renamed the capsule and calls the deleter itself.
    if _is_valid(capsule, _NAME):
        _held.pop(_pointer_of_address(capsule, _NAME), None)


def device_of(device: Device) -> tuple[int, int]:
    """DLPack's (type, number) of a device; the simulator's memory is the CPU's."""
    kind = device.info.kind
    return _DEVICE_TYPES[kind], 0 if kind == "sim" else device.info.index


def capsule_of(array: DeviceArray, stream: Any = None, dl_device: Any = None, copy: bool | None = None) -> Any:
    """A "dltensor" capsule of the array's own memory.

    stream  the consumer's, as DLPack numbers it: what was launched before is done in it, or before it, when this returns. -1: as it is

    Raises BufferError for what cannot be handed out without a copy.
    """
    if copy:
        raise BufferError(f"{array!r} is handed out as it is; copy it with numpy() or in the other library")
    place = device_of(array.device)
    if dl_device is not None and tuple(dl_device) != place and dl_device[0] not in DL_PLACES[array.device.info.kind]:
        raise BufferError(f"{array!r} is on DLPack device {place}, asked for on {tuple(dl_device)}")
    code = _CODES.get(array.dtype_name)
    if code is None:
        raise BufferError(f"{array!r} holds {array.dtype_name}, which DLPack does not name; view it as a scalar type")
    _order(array.device, stream)
    extents = (ctypes.c_int64 * max(len(array.shape), 1))(*array.shape)
    tensor = DLTensor(array.address, *place, len(array.shape), *code, 1, extents, None, 0)
    managed = _Managed(tensor, None, _delete)
    address = ctypes.addressof(managed)
    _held[address] = (managed, extents, array)
    return _new(address, _NAME, ctypes.cast(_destroy, ctypes.c_void_p))


def _order(device: Device, stream: Any) -> None:
    """Has the consumer's stream come after ours."""
    if device.info.kind == "sim":
        device.synchronize()
    elif stream != -1:
        ours: int = device.stream_handle(None)  # pyright: ignore[reportAttributeAccessIssue]
        theirs = 0 if stream is None else int(stream)
        if ours != theirs and not (ours in _DEFAULT_STREAMS and theirs in _DEFAULT_STREAMS):
            device.waits.for_stream(ours)  # pyright: ignore[reportAttributeAccessIssue]
