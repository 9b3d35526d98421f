"""CUDA's virtual memory management (see virtual_memory)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from .virtual_memory import Payload

FABRIC_HANDLE_BYTES = 64


class CudaMemory:
    """See `virtual_memory.Calls`. `call` makes a driver call with the device's context current."""

    def __init__(self, cu: Any, call: Callable[..., Any], ordinal: int) -> None:
        self._cu = cu
        self._call = call
        self._ordinal = ordinal
        kinds = cu.CUmemAllocationHandleType
        self._kinds = {"fd": kinds.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, "fabric": kinds.CU_MEM_HANDLE_TYPE_FABRIC}

    def _location(self, location: Any) -> None:
        location.type = self._cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        location.id = self._ordinal

    def _properties(self, kind: str) -> Any:
        made = self._cu.CUmemAllocationProp()
        made.type = self._cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        made.requestedHandleTypes = self._kinds[kind]
        self._location(made.location)
        return made

    def granularity(self, kind: str) -> int:
        recommended = self._cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        return int(self._call("cuMemGetAllocationGranularity", self._properties(kind), recommended))

    def create(self, nbytes: int, kind: str) -> Any:
        return self._call("cuMemCreate", nbytes, self._properties(kind), 0)

    def export(self, handle: Any, kind: str) -> Payload:
        made = self._call("cuMemExportToShareableHandle", handle, self._kinds[kind], 0)
        return int(made) if kind == "fd" else ctypes.string_at(int(made.getPtr()), FABRIC_HANDLE_BYTES)

    def import_(self, payload: Payload, kind: str) -> Any:
        if isinstance(payload, int):
            return self._call("cuMemImportFromShareableHandle", payload, self._kinds[kind])
        handle = self._cu.CUmemFabricHandle()
        ctypes.memmove(int(handle.getPtr()), payload, FABRIC_HANDLE_BYTES)
        return self._call("cuMemImportFromShareableHandle", int(handle.getPtr()), self._kinds[kind])

    def retain(self, address: int) -> Any:
        return self._call("cuMemRetainAllocationHandle", address)

    def release(self, handle: Any) -> None:
        self._call("cuMemRelease", handle)

    def reserve(self, nbytes: int, alignment: int) -> int:
        return int(self._call("cuMemAddressReserve", nbytes, alignment, 0, 0))

    def unreserve(self, address: int, nbytes: int) -> None:
        self._call("cuMemAddressFree", address, nbytes)

    def map(self, address: int, nbytes: int, handle: Any) -> None:
        self._call("cuMemMap", address, nbytes, 0, handle, 0)

    def unmap(self, address: int, nbytes: int) -> None:
        self._call("cuMemUnmap", address, nbytes)

    def allow(self, address: int, nbytes: int) -> None:
        access = self._cu.CUmemAccessDesc()
        self._location(access.location)
        access.flags = self._cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._call("cuMemSetAccess", address, nbytes, [access], 1)
