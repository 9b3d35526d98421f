"""Arrays of ours for other libraries by the DLPack protocol: a capsule that leads to the memory and keeps the array alive.

NumPy makes the capsule and gives it back: a destructor in Python would lose the error with which a consumer refuses a capsule.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .array import allocate_array
from .foreign import DL_TYPES, tensor_in
from .graph import refuse_in_capture

if TYPE_CHECKING:
    from .array import DeviceArray
    from .protocol import Device

# dlpack.h: what a device of ours is called.
_DEVICE_TYPES = {"cuda": 2, "hip": 10, "sim": 1}
_CODES = {name: code for code, name in DL_TYPES.items()}
# The legacy default stream as DLPack names it on CUDA.
_DEFAULT_STREAMS = (0, 1)


class _Words:
    """Memory of an array for NumPy, which never looks at it: words of the elements' size. Keeps the array alive."""

    def __init__(self, array: DeviceArray) -> None:
        self.array = array
        typestr = f"<u{array.element.nbytes}"
        self.__array_interface__ = {"shape": array.shape, "typestr": typestr, "data": (array.address, False), "version": 3}


def device_of(device: Device) -> tuple[int, int]:
    """DLPack's (type, number) of a device; the simulator's memory is the CPU's."""
    kind = device.info.kind
    return _DEVICE_TYPES[kind], 0 if kind == "sim" else device.info.index


def capsule_of(array: DeviceArray, stream: Any = None, dl_device: Any = None, copy: bool | None = None) -> Any:
    """A "dltensor" capsule of the array's own memory.

    stream  the consumer's, as DLPack numbers it: what was launched before is done in it, or before it, when this returns. -1: as it is
    copy    True for a copy of the memory, on the same device

    Raises BufferError for an element type that DLPack does not name and for another device, CaptureError while a graph is captured that
    the consumer's stream is no part of.
    """
    place = device_of(array.device)
    if dl_device is not None and tuple(dl_device) != place:
        raise BufferError(f"{array!r} is on DLPack device {place}, asked for on {tuple(dl_device)}; copy it there in the other library")
    code = _CODES.get(array.dtype_name)
    if code is None:
        raise BufferError(f"{array!r} holds {array.dtype_name}, which DLPack does not name; view it as a scalar type")
    if copy:
        twin = allocate_array(array.device, array.shape, array.element)
        if array.nbytes:
            array.device.copy(twin.address, array.address, array.nbytes)
        array = twin
    _order(array.device, stream)
    capsule = np.asarray(_Words(array)).__dlpack__()
    tensor = tensor_in(capsule)
    tensor.device_type, tensor.device_id = place
    tensor.code, tensor.bits = code
    return capsule


def _order(device: Device, stream: Any) -> None:
    """Has the consumer's stream come after ours."""
    if device.info.kind == "sim":
        device.synchronize()
    elif stream != -1:
        ours: int = device.stream_handle(None)  # pyright: ignore[reportAttributeAccessIssue]
        theirs = 0 if stream is None else int(stream)
        if ours != theirs and not (ours in _DEFAULT_STREAMS and theirs in _DEFAULT_STREAMS):
            refuse_in_capture(device, "the handing out of an array", "hand it out before the capture")
            device.waits.for_stream(ours)  # pyright: ignore[reportAttributeAccessIssue]
