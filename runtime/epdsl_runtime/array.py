"""Arrays in device memory, and tables of peer addresses."""

from __future__ import annotations

import functools
import operator
import weakref
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .dtypes import Element, element

if TYPE_CHECKING:
    from .protocol import Device, Stream

_dropped: weakref.WeakKeyDictionary[Any, deque[int]] = weakref.WeakKeyDictionary()


def free_dropped(device: Device) -> int:
    """Frees the memory of arrays nobody holds any more. Call it only while the device runs nothing. Returns how many it freed.

    An array may be dropped while a kernel still uses it, so dropping it only queues its memory.
    """
    queue = _dropped.get(device)
    count = 0
    while queue:
        device.free(queue.popleft())
        count += 1
    return count


class Allocation:
    """Memory that `device.allocate` returned, shared by an array and its views.

    `kept_by` names who frees it; None when the array's user does. `users` are told with `memory_freed()` when it is.
    """

    def __init__(self, device: Device, address: int, nbytes: int, kept_by: str | None = None) -> None:
        self.device = device
        self.address = address
        self.nbytes = nbytes
        self.kept_by = kept_by
        self.alive = True
        self.users: weakref.WeakSet[Any] = weakref.WeakSet()

    def release(self) -> None:
        if self.alive:
            self.device.free(self.address)
            self.alive = False
            for user in self.users:
                user.memory_freed()

    def __del__(self) -> None:
        # During interpreter shutdown the module's names may be gone; the driver frees everything then.
        if getattr(self, "alive", False) and self.kept_by is None and _dropped is not None:
            self.alive = False
            _dropped.setdefault(self.device, deque()).append(self.address)


class DeviceArray:
    """A C-contiguous array in a device's memory.

    address  device address of the first element
    shape    elements along each axis
    dtype    element type: a name, a NumPy dtype or a type of the language
    owner    the memory it lies in; None for memory that someone else keeps alive
    source   another library's array that it is, kept alive with it
    """

    def __init__(
        self, device: Device, address: int, shape: Sequence[int], dtype: Any, owner: Allocation | None = None, source: Any = None
    ) -> None:
        self.device = device
        self.shape = tuple(int(n) for n in shape)
        self.element: Element = element(dtype)
        self._address = address
        self._owner = owner
        self._source = source

    @property
    def dtype_name(self) -> str:
        return self.element.name

    @property
    def dtype(self) -> np.dtype[Any]:
        """NumPy dtype of `numpy()`: bytes for a struct."""
        return self.element.numpy or np.dtype((np.void, self.element.nbytes))

    @property
    def size(self) -> int:
        count = 1
        for n in self.shape:
            count *= n
        return count

    @property
    def nbytes(self) -> int:
        return self.size * self.element.nbytes

    @property
    def freed(self) -> bool:
        return self._owner is not None and not self._owner.alive

    @property
    def address(self) -> int:
        """Device address of the first element. Raises ValueError once the memory is freed."""
        if self.freed:
            raise ValueError(f"{self!r} was freed; allocate another array")
        return self._address

    def __repr__(self) -> str:
        state = ", freed" if self.freed else ""
        return f"<{self.dtype_name} array of shape {self.shape} at 0x{self._address:x} on {_place(self.device)}{state}>"

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("an array of no axes has no length")
        return self.shape[0]

    def __getitem__(self, key: int | slice) -> DeviceArray:
        """A view of rows `key` of the first axis. Steps other than 1 are refused: a view is contiguous."""
        if not self.shape:
            raise IndexError("an array of no axes cannot be sliced")
        rows = self.shape[0]
        row_bytes = self.nbytes // rows if rows else 0
        if isinstance(key, slice):
            start, stop, step = key.indices(rows)
            if step != 1:
                raise ValueError(f"{self!r} can be sliced with step 1 only, not {step}; download it with numpy() first")
            return DeviceArray(
                self.device,
                self.address + start * row_bytes,
                (max(stop - start, 0), *self.shape[1:]),
                self.element,
                self._owner,
                self._source,
            )
        index = key + rows if key < 0 else key
        if not 0 <= index < rows:
            raise IndexError(f"row {key} is outside {self!r} of {rows} rows")
        return DeviceArray(self.device, self.address + index * row_bytes, self.shape[1:], self.element, self._owner, self._source)

    def reshape(self, *shape: int) -> DeviceArray:
        """The same memory under another shape of as many elements."""
        view = DeviceArray(self.device, self.address, shape, self.element, self._owner, self._source)
        if view.size != self.size:
            raise ValueError(f"{self!r} has {self.size} elements, shape {shape} has {view.size}")
        return view

    def view(self, dtype: Any) -> DeviceArray:
        """The same memory as elements of another type; the last axis changes with the element size."""
        other = element(dtype)
        last = (self.shape[-1] if self.shape else 1) * self.element.nbytes
        if last % other.nbytes:
            raise ValueError(f"the last axis of {self!r} is {last} bytes, which {other.name} of {other.nbytes} bytes does not divide")
        return DeviceArray(self.device, self.address, (*self.shape[:-1], last // other.nbytes), other, self._owner, self._source)

    def numpy(self) -> NDArray[Any]:
        """A copy on the host, after everything the device was given is done.

        Raises what the kernels reported (see faults).
        """
        address = self.address
        self.device.synchronize()
        out = np.empty(self.shape, self.dtype)
        if out.nbytes:
            self.device.download(out, address)
        return out

    def copy_from(self, source: NDArray[Any] | Sequence[Any], stream: Stream | None = None) -> DeviceArray:
        """Uploads `source`, of the same shape and dtype. Returns self."""
        host = np.ascontiguousarray(source, dtype=None if isinstance(source, np.ndarray) else self.dtype)
        if host.ndim == 1 and not self.shape:
            host = host.reshape(())
        if host.shape != self.shape:
            raise ValueError(f"{self!r} cannot take a source of shape {host.shape}; the shapes must be equal")
        if self.element.numpy is not None and host.dtype != self.element.numpy:
            raise TypeError(f"{self!r} cannot take a source of dtype {host.dtype}; convert it with astype first")
        if host.nbytes != self.nbytes:
            raise ValueError(f"{self!r} holds {self.nbytes} bytes, the source {host.nbytes}")
        if host.nbytes:
            self.device.upload(self.address, host, stream)
        return self

    def zero(self, stream: Stream | None = None) -> DeviceArray:
        """Sets every byte to 0, in the stream's order. Returns self."""
        return self.fill_bytes(0, stream)

    def fill_bytes(self, byte: int, stream: Stream | None = None) -> DeviceArray:
        """Sets every byte to `byte`, in the stream's order. Returns self."""
        if not 0 <= byte <= 255:
            raise ValueError(f"a byte is 0 to 255, not {byte}")
        if self.nbytes:
            self.device.memset(self.address, byte, self.nbytes, stream)
            if self.device.capturing is not None:
                self.device.capturing.keep(self)
        return self

    def free(self) -> None:
        """Frees the memory now; the array and its views refuse use from then on."""
        owner = self._owner
        if owner is None:
            raise ValueError(f"{self!r} is memory that another library or array keeps; free it there")
        if owner.kept_by is not None:
            raise ValueError(f"{self!r} belongs to {owner.kept_by}, which frees it")
        if owner.address != self._address or owner.nbytes > max(self.nbytes, 1):
            raise ValueError(f"{self!r} is a view of an array of {owner.nbytes} bytes; free that array")
        owner.release()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        # NumPy would otherwise take it for a sequence, and its rows for objects.
        raise TypeError(f"{self!r} is no memory that NumPy reads; copy it to the host with numpy()")

    def __dlpack_device__(self) -> tuple[int, int]:
        from .dlpack import device_of

        return device_of(self.device)

    def __dlpack__(self, *, stream: Any = None, max_version: Any = None, dl_device: Any = None, copy: bool | None = None) -> Any:
        """The same memory for another library (`torch.from_dlpack(array)`), which keeps the array alive. See `dlpack.capsule_of`."""
        from .dlpack import capsule_of

        return capsule_of(self, stream, dl_device, copy)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if self.device.info.kind != "cuda":
            raise AttributeError(f"{self!r} is not in CUDA memory; copy it with numpy()")
        # The interface knows NumPy's types alone: bf16 and 8-bit floats go out as raw words of their size.
        dtype = self.dtype
        typestr = dtype.str if dtype.kind in "biuf" else f"<u{dtype.itemsize}" if dtype.itemsize in (1, 2, 4, 8) else f"|V{dtype.itemsize}"
        device: Any = self.device
        return {
            "shape": self.shape,
            "typestr": typestr,
            "data": (self.address if self.nbytes else 0, False),
            "version": 3,
            "strides": None,
            # That of launches without a stream; the interface calls the default stream 1.
            "stream": device.stream_handle(None) or 1,
        }


def extents(shape: int | Sequence[int]) -> tuple[int, ...]:
    """A shape as a tuple. Raises TypeError for what is no whole number or tuple of such, ValueError for a negative length."""
    try:
        found = tuple(operator.index(n) for n in ((shape,) if hasattr(shape, "__index__") else shape))  # pyright: ignore
    except TypeError:
        raise TypeError(f"a shape is a whole number or a tuple of them, got {shape!r}; write 4 or (4, 8), n // 2 and not n / 2") from None
    if any(n < 0 for n in found):
        raise ValueError(f"the shape {found} has a negative length")
    return found


def allocate_array(device: Device, shape: int | Sequence[int], dtype: Any) -> DeviceArray:
    """A new array with undefined contents. An array of no elements owns one byte, so that its address is real."""
    kind = element(dtype)
    shape = extents(shape)
    count = 1
    for n in shape:
        count *= n
    nbytes = max(count * kind.nbytes, 1)
    return DeviceArray(device, address := device.allocate(nbytes), shape, kind, Allocation(device, address, nbytes))


def borrowed(device: Device, source: Any, name: str = "array") -> DeviceArray | None:
    """Another library's array on this device (a torch tensor, ...) as one of ours, without a copy. None for what is no such array.

    Raises TypeError or ValueError, naming `name`, for one that a kernel cannot use.
    """
    from .foreign import foreign_array

    found = foreign_array(name, source, device)
    return None if found is None else DeviceArray(device, found.address, found.shape, found.dtype, source=source)


class PeerTable:
    """The addresses of one symmetric buffer on every rank, as a table in this rank's memory.

    address    device address of the table of `size` 64-bit addresses
    size       ranks
    nbytes     bytes of each rank's buffer
    addresses  the same addresses on the host; entry r leads to rank r's buffer
    alignment  the largest power of two that divides all of them
    """

    def __init__(self, table: DeviceArray, dtype: Any, nbytes: int, addresses: Sequence[int]) -> None:
        self.table = table
        self.element: Element = element(dtype)
        self.nbytes = nbytes
        self.addresses = tuple(addresses)
        bits = functools.reduce(operator.or_, self.addresses, 1 << 63)
        self.alignment = bits & -bits

    @property
    def device(self) -> Device:
        return self.table.device

    @property
    def address(self) -> int:
        return self.table.address

    @property
    def size(self) -> int:
        return len(self.addresses)

    @property
    def dtype_name(self) -> str:
        return self.element.name

    def view(self, dtype: Any) -> PeerTable:
        """The same buffers as elements of another type."""
        return PeerTable(self.table, dtype, self.nbytes, self.addresses)

    def __len__(self) -> int:
        return self.size

    def __repr__(self) -> str:
        return f"<table of {self.size} peers' {self.dtype_name} buffers of {self.nbytes} bytes on {_place(self.device)}>"


def _place(device: Device) -> str:
    return f"{device.info.kind}:{device.info.index}"
