"""HIP's virtual memory management (see virtual_memory).

Memory is made uncached: of other device memory (coarse-grained) a GPU's caches follow what peers write at the ends of kernels alone, and no
fence or scope changes that (ROCm: HIP, coherence control). A runtime that has no such memory by descriptors refuses it, and `sharing` goes
on to "ipc", whose memory is uncached too.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from .virtual_memory import Payload

# HIP_VERSION from which a descriptor is passed as a pointer's value; before, as a pointer to it.
_DESCRIPTOR_BY_VALUE = 70100000
# hip_runtime_api.h: hipMemAllocationTypeUncached.
_UNCACHED = 0x40000000
_DEVICE = 1
_READ_WRITE = 3


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _Properties(ctypes.Structure):
    """hip_runtime_api.h: hipMemAllocationProp."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("requested", ctypes.c_int),
        ("location", _Location),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
    ]


class _Access(ctypes.Structure):
    """hip_runtime_api.h: hipMemAccessDesc."""

    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


class HipMemory:
    """See `virtual_memory.Calls`; only descriptors. `call` makes a HIP call with the device current."""

    def __init__(self, hip: Any, call: Callable[..., Any], ordinal: int) -> None:
        self._hip = hip
        self._call = call
        self._location = _Location(_DEVICE, ordinal)
        self._fd = hip.hipMemAllocationHandleType.hipMemHandleTypePosixFileDescriptor

    def _properties(self) -> Any:
        return _Properties(_UNCACHED, int(self._fd), self._location, None, 0)

    def granularity(self, kind: str) -> int:
        recommended = self._hip.hipMemAllocationGranularity_flags.hipMemAllocationGranularityRecommended
        made = self._properties()
        return int(self._call("hipMemGetAllocationGranularity", ctypes.addressof(made), recommended))

    def create(self, nbytes: int, kind: str) -> Any:
        made = self._properties()
        return self._call("hipMemCreate", nbytes, ctypes.addressof(made), 0)

    def export(self, handle: Any, kind: str) -> Payload:
        made = ctypes.c_int(-1)
        self._call("hipMemExportToShareableHandle", ctypes.addressof(made), handle, self._fd, 0)
        return made.value

    def import_(self, payload: Payload, kind: str) -> Any:
        assert isinstance(payload, int)
        held = ctypes.c_int(payload)
        by_value = int(self._call("hipRuntimeGetVersion")) >= _DESCRIPTOR_BY_VALUE
        return self._call("hipMemImportFromShareableHandle", payload if by_value else ctypes.addressof(held), self._fd)

    def release(self, handle: Any) -> None:
        self._call("hipMemRelease", handle)

    def reserve(self, nbytes: int, alignment: int) -> int:
        return int(self._call("hipMemAddressReserve", nbytes, alignment, None, 0))

    def unreserve(self, address: int, nbytes: int) -> None:
        self._call("hipMemAddressFree", address, nbytes)

    def map(self, address: int, nbytes: int, handle: Any) -> None:
        self._call("hipMemMap", address, nbytes, 0, handle, 0)

    def unmap(self, address: int, nbytes: int) -> None:
        self._call("hipMemUnmap", address, nbytes)

    def allow(self, address: int, nbytes: int) -> None:
        access = _Access(self._location, _READ_WRITE)
        self._call("hipMemSetAccess", address, nbytes, ctypes.addressof(access), 1)
