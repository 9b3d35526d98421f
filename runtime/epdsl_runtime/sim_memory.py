"""The simulated devices' memory: host memory, whose addresses the kernels use as they are."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

_ALIGN = 256
# Fresh memory holds a pattern, so that code which relies on zeros is seen.
FRESH = 0xA5
# What lies before and after an allocation: an index that is a little wrong lands there, and not in Python's own memory.
_BEFORE, _AFTER = 256, 16384


class Memory:
    """One device's allocations, by address, each with margins around it."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[NDArray[np.uint8], int]] = {}
        # The byte that an allocation's margins hold. It differs, so that a copy from one margin to another is seen.
        self._margins: dict[int, int] = {}
        self._count = 0

    def allocate(self, nbytes: int) -> int:
        raw = np.empty(_BEFORE + nbytes + _AFTER + _ALIGN, np.uint8)
        self._count += 1
        byte = 1 + self._count % 127
        raw.fill(byte)
        address = -(-(raw.ctypes.data + _BEFORE) // _ALIGN) * _ALIGN
        first = address - raw.ctypes.data
        raw[first : first + nbytes] = FRESH
        self._held[address] = (raw, nbytes)
        self._margins[address] = byte
        return address

    def adopt(self, memory: NDArray[np.uint8]) -> int:
        """Counts memory that was made elsewhere as an allocation; `free` drops it. Returns its address."""
        self._held[memory.ctypes.data] = (memory, memory.nbytes)
        return memory.ctypes.data

    def owns(self, address: int) -> bool:
        return address in self._held

    def free(self, address: int) -> None:
        if address not in self._held:
            raise ValueError(f"0x{address:x} is no address that allocate returned, or it was freed already")
        del self._held[address]
        self._margins.pop(address, None)

    def written_outside(self) -> tuple[int, int, int] | None:
        """Where the margins of an allocation were written since the last look: its address, its size, and the first such byte from there.

        The margins are then as before. Writes of the byte that is there, and those beyond the margins, are not seen.
        """
        for start, byte in list(self._margins.items()):
            raw, nbytes = self._held[start]
            first = start - raw.ctypes.data
            for margin, at in ((raw[:first], -first), (raw[first + nbytes :], nbytes)):
                changed = margin != byte
                if changed.any():
                    margin[:] = byte
                    return start, nbytes, at + int(changed.argmax())
        return None

    def clear(self) -> None:
        self._held.clear()
        self._margins.clear()

    def find(self, address: int) -> tuple[int, int] | None:
        """The allocation an address lies in: where it starts and its size."""
        for start, (_, nbytes) in self._held.items():
            if start <= address < start + nbytes:
                return start, nbytes
        return None

    @staticmethod
    def view(address: int, nbytes: int) -> NDArray[np.uint8]:
        return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))

    @classmethod
    def fill(cls, address: int, byte: int, nbytes: int) -> None:
        if nbytes:
            cls.view(address, nbytes).fill(byte)

    @classmethod
    def write(cls, address: int, source: NDArray[Any]) -> None:
        if source.nbytes:
            ctypes.memmove(address, source.ctypes.data, source.nbytes)

    @classmethod
    def read(cls, target: NDArray[Any], address: int) -> None:
        if target.nbytes:
            ctypes.memmove(target.ctypes.data, address, target.nbytes)

    @classmethod
    def move(cls, target: int, source: int, nbytes: int) -> None:
        if nbytes:
            ctypes.memmove(target, source, nbytes)
