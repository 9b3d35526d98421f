"""The parameter block of a launch: every slot at a fixed place in one buffer, and the table of their addresses that a driver takes."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence

from .artifact import Slot
from .binding import Number, encoder

_FORMATS: dict[str, str] = {
    "i1": "B",
    "i8": "b",
    "i16": "h",
    "i32": "i",
    "i64": "q",
    "u8": "B",
    "u16": "H",
    "u32": "I",
    "u64": "Q",
    "f16": "e",
    "bf16": "H",
    "f32": "f",
    "f64": "d",
    "f8e4m3": "B",
    "f8e5m2": "B",
}


class ParameterBlock:
    """Memory holding one value per slot, naturally aligned and in order.

    address  of an array of pointers to the slots: CUDA's and HIP's `kernelParams`
    base     of the slots themselves
    """

    def __init__(self, slots: Sequence[Slot]) -> None:
        offsets: list[int] = []
        offset = 0
        for slot in slots:
            offset = -(-offset // slot.nbytes) * slot.nbytes
            offsets.append(offset)
            offset += slot.nbytes
        self.slots = tuple(slots)
        self.offsets = tuple(offsets)
        self.nbytes = offset
        self._allocate()
        self._one = tuple(struct.Struct("<" + _FORMATS[slot.dtype]).pack_into for slot in slots)
        self._encoders: tuple[Callable[[Number], Number] | None, ...] = tuple(encoder(slot.dtype) for slot in slots)
        self._plain = not any(self._encoders)
        self._all = struct.Struct("<" + _layout(slots, offsets)).pack_into

    def _allocate(self) -> None:
        # A ctypes array is aligned for its element, so the buffer is made of 64-bit words.
        self._buffer = (ctypes.c_uint64 * max(-(-self.nbytes // 8), 1))()
        base = self.base = ctypes.addressof(self._buffer)
        self._pointers = (ctypes.c_void_p * max(len(self.offsets), 1))(*[base + at for at in self.offsets])
        self.address = ctypes.addressof(self._pointers)

    def another(self) -> ParameterBlock:
        """A block of the same slots in memory of its own."""
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__)
        made._allocate()
        return made

    def fill(self, values: Sequence[Number]) -> None:
        """Writes every slot."""
        if not self._plain:
            values = [encode(v) if encode else v for encode, v in zip(self._encoders, values, strict=True)]
        self._all(self._buffer, 0, *values)

    def patch(self, index: int, value: Number) -> None:
        """Writes one slot."""
        encode = self._encoders[index]
        self._one[index](self._buffer, self.offsets[index], encode(value) if encode else value)

    def __bytes__(self) -> bytes:
        return bytes(self._buffer)[: self.nbytes]


def _layout(slots: Sequence[Slot], offsets: Sequence[int]) -> str:
    parts: list[str] = []
    end = 0
    for slot, offset in zip(slots, offsets, strict=True):
        if offset > end:
            parts.append(f"{offset - end}x")
        parts.append(_FORMATS[slot.dtype])
        end = offset + slot.nbytes
    return "".join(parts)
