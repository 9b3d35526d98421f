"""From what a caller passes to the machine words of a kernel's parameter list, checked."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .array import Allocation, DeviceArray, PeerTable
from .artifact import Param
from .dtypes import FLOATS, INTEGERS, NBYTES, numpy_dtype
from .errors import ArgumentTypeError, ArgumentValueError
from .foreign import Foreign, foreign_array

if TYPE_CHECKING:
    from .protocol import Device

Number = int | float


@dataclass(frozen=True)
class Address:
    """A raw device address for a pointer parameter. Nothing but its alignment is checked."""

    value: int

    def __post_init__(self) -> None:
        if not 0 <= self.value < 1 << 64:
            raise ArgumentValueError("EP209", f"an address has 64 bits; {self.value} does not fit")


def bind(params: Sequence[Param], args: Sequence[Any], device: Device | None = None) -> list[Number]:
    """One number per slot of `params`, in order.

    device  when given, arrays must be memory this device can use

    Raises TypeError or ValueError naming the parameter, what it takes and what was passed.
    """
    if number_of(args) != len(params):
        names = ", ".join(p.name for p in params)
        raise ArgumentTypeError("EP207", f"the kernel takes {len(params)} arguments ({names}), {len(args)} were passed")
    values: list[Number] = []
    for param, arg in zip(params, args, strict=True):
        values.extend(bind_one(param, arg, device))
    return values


def number_of(args: Any) -> int:
    """How many arguments there are. Raises TypeError for what is no tuple or list of them, such as a generator."""
    if isinstance(args, (tuple, list)):
        return len(args)
    raise ArgumentTypeError(
        "EP207", f"args is a tuple with one argument for each parameter, got {_described(args)}; write args=(x,) for one"
    )


class Binder:
    """`bind` for one list of parameters, made fast for our arrays and tables, Python's own numbers, and structs of these."""

    def __init__(self, params: Sequence[Param]) -> None:
        self._params = tuple(params)
        self._plan = tuple(_plan(param) for param in params)

    def __call__(self, args: Sequence[Any], device: Device) -> list[Number]:
        if number_of(args) != len(self._params):
            return bind(self._params, args, device)
        values: list[Number] = []
        _bind_fast(self._plan, args, device, values, "")
        return values


def _bind_fast(plan: Sequence[tuple[Any, ...]], args: Sequence[Any], device: Device, values: list[Number], prefix: str) -> None:
    append = values.append
    for (kind, dtype, low, high, param), arg in zip(plan, args, strict=True):
        if kind == "pointer":
            if type(arg) is DeviceArray and arg.device is device and arg.element.name == dtype:
                owner, address = arg._owner, arg._address
                if (owner is None or owner.alive) and not address % high:
                    append(address)
                    continue
        elif kind == "peers":
            if type(arg) is PeerTable and arg.element.name == dtype and not arg.alignment % high:
                table = arg.table
                if table.device is device and (table._owner is None or table._owner.alive):
                    append(table._address)
                    append(len(arg.addresses))
                    continue
        elif kind == "struct":
            if not isinstance(arg, Mapping) and (members := _members(low, arg)) is not None:
                _bind_fast(high, members, device, values, f"{prefix}{param.name}.")
                continue
        elif kind is type(arg) and low <= arg <= high:
            append(arg)
            continue
        values.extend(bind_one(param, arg, device, prefix))


def _members(get: Callable[[Any], tuple[Any, ...]], arg: Any) -> tuple[Any, ...] | None:
    try:
        return get(arg)
    except AttributeError:
        return None


def _plan(param: Param) -> tuple[Any, str, Any, Any, Param]:
    """What the fast way takes for a parameter, (None, ...) for none.

    Pointers and peers of an element type and an alignment, a Python type within a range, what gets a struct's members and their plans.
    """
    if param.kind in ("pointer", "peers"):
        return param.kind, param.dtype, 0, max(param.align, 1), param
    if param.kind == "struct" and len(param.fields) > 1:
        return "struct", param.dtype, operator.attrgetter(*(f.name for f in param.fields)), tuple(map(_plan, param.fields)), param
    if param.kind == "scalar" and param.dtype in INTEGERS:
        return int, param.dtype, *integer_range(param.dtype), param
    if param.kind == "scalar" and param.dtype in FLOATS:
        limit = math.inf if param.dtype == "f64" else _largest(param.dtype)
        return float, param.dtype, -limit, limit, param
    return None, param.dtype, 0, 0, param


def bind_one(param: Param, arg: Any, device: Device | None = None, prefix: str = "") -> Iterator[Number]:
    """The numbers of one parameter's slots."""
    name = prefix + param.name
    match param.kind:
        case "scalar":
            yield scalar(name, param.dtype, arg)
        case "pointer":
            yield _pointer(name, param, arg, device)
        case "peers":
            yield from _peers(name, param, arg, device)
        case "struct":
            for member in param.fields:
                yield from bind_one(member, _member(name, param, arg, member.name), device, f"{name}.")
        case "array":
            yield from _elements(name, param, arg, device)


def scalar(name: str, dtype: str, arg: Any) -> Number:
    """A scalar argument as a Python number that `dtype` can hold.

    Raises TypeError for what is no number of that kind, ValueError for one out of range.
    """
    if isinstance(arg, np.ndarray) and arg.ndim == 0:
        arg = arg[()]
    if dtype in INTEGERS:
        return _integer(name, dtype, arg)
    if dtype in FLOATS:
        return _float(name, dtype, arg)
    raise ArgumentTypeError("EP208", f"parameter {name!r} has type {dtype!r}, which cannot be passed by value")


def integer_range(dtype: str) -> tuple[int, int]:
    """The smallest and largest value of an integer type."""
    bits = 1 if dtype == "i1" else 8 * NBYTES[dtype]
    if dtype == "i1" or dtype.startswith("u"):
        return 0, (1 << bits) - 1
    return -(1 << bits - 1), (1 << bits - 1) - 1


def _integer(name: str, dtype: str, arg: Any) -> int:
    try:
        value = int(arg) if isinstance(arg, np.bool_) else operator.index(arg)
    except (TypeError, ValueError, RuntimeError):
        raise ArgumentTypeError("EP208", f"parameter {name!r} takes an integer ({dtype}), got {_described(arg)}") from None
    low, high = _RANGES[dtype]
    if not low <= value <= high:
        raise ArgumentValueError("EP209", f"parameter {name!r} is {dtype}, which holds {low} to {high}; {value} does not fit")
    return value


def _float(name: str, dtype: str, arg: Any) -> float:
    try:
        if isinstance(arg, (str, bytes, complex, np.complexfloating)):
            raise TypeError
        value = float(arg)
    except OverflowError:
        raise ArgumentValueError("EP209", f"parameter {name!r} is {dtype}; {_described(arg)} does not fit") from None
    except (TypeError, ValueError, RuntimeError):
        # torch raises all three.
        raise ArgumentTypeError("EP208", f"parameter {name!r} takes a number ({dtype}), got {_described(arg)}") from None
    if math.isfinite(value) and dtype != "f64" and abs(value) > (limit := _largest(dtype)):
        raise ArgumentValueError("EP209", f"parameter {name!r} is {dtype}, whose largest number is {limit:g}; {value:g} does not fit")
    return value


def _largest(dtype: str) -> float:
    if dtype in ("f16", "f32"):
        return float(np.finfo(numpy_dtype(dtype)).max)
    import ml_dtypes

    return float(ml_dtypes.finfo(numpy_dtype(dtype)).max)


_RANGES = {dtype: integer_range(dtype) for dtype in INTEGERS}


def _pointer(name: str, param: Param, arg: Any, device: Device | None) -> int:
    if type(arg) is DeviceArray:
        found = Foreign(arg.address, arg.shape, arg.dtype_name, "")
        if device is not None and arg.device is not device and not _same_memory(arg.device, device):
            raise ArgumentValueError("EP212", f"parameter {name!r} must be memory of {_place(device)}, got {arg!r}")
    elif isinstance(arg, Address):
        return _aligned(name, param, arg.value)
    elif isinstance(arg, PeerTable):
        raise ArgumentTypeError(
            "EP208",
            f"parameter {name!r} is a pointer to {param.dtype}, got {arg!r}; pass the local array, or declare the parameter as peers",
        )
    elif (array := foreign_array(name, arg, device)) is not None:
        found = array
    else:
        hint = (
            "; wrap a raw address as Address(...)"
            if arg is None or isinstance(arg, (int, np.integer))
            else "; upload it with rank.array(...)"
        )
        raise ArgumentTypeError("EP208", f"parameter {name!r} is a pointer to {param.dtype}, got {_described(arg)}{hint}")
    if found.dtype != param.dtype:
        fix = "" if found.source else f"; upload it as that: rank.array(x, ep.{param.dtype})"
        raise ArgumentTypeError(
            "EP208", f"parameter {name!r} is a pointer to {param.dtype}, got {found.source or 'an array'} of {found.dtype}{fix}"
        )
    return _aligned(name, param, found.address)


def _aligned(name: str, param: Param, address: int) -> int:
    past = address % param.align if param.align > 1 else 0
    if past:
        raise ArgumentValueError(
            "EP213",
            f"parameter {name!r} must be aligned to {param.align} bytes; address 0x{address:x} is {past} bytes past such an address",
        )
    return address


def _peers(name: str, param: Param, arg: Any, device: Device | None) -> tuple[int, int]:
    if not isinstance(arg, PeerTable):
        raise ArgumentTypeError(
            "EP208", f"parameter {name!r} takes a table of peers' {param.dtype} buffers (rank.symmetric(...).peers), got {_described(arg)}"
        )
    if arg.dtype_name != param.dtype:
        raise ArgumentTypeError("EP208", f"parameter {name!r} takes peers' buffers of {param.dtype}, got buffers of {arg.dtype_name}")
    if device is not None and arg.device is not device and not _same_memory(arg.device, device):
        raise ArgumentValueError("EP212", f"parameter {name!r} must be a table in memory of {_place(device)}, got {arg!r}")
    for peer, address in enumerate(arg.addresses):
        if param.align > 1 and address % param.align:
            raise ArgumentValueError(
                "EP213", f"parameter {name!r} must be aligned to {param.align} bytes; rank {peer}'s buffer is at 0x{address:x}"
            )
    return arg.address, arg.size


def _member(name: str, param: Param, arg: Any, member: str) -> Any:
    if isinstance(arg, Mapping):
        if member in arg:
            return arg[member]
    elif hasattr(arg, member):
        return getattr(arg, member)
    fields = ", ".join(f.name for f in param.fields)
    raise ArgumentTypeError(
        "EP208", f"parameter {name!r} is a struct {param.dtype} with fields {fields}; {_described(arg)} has no {member!r}"
    )


def _elements(name: str, param: Param, arg: Any, device: Device | None) -> Iterator[Number]:
    if isinstance(arg, (str, bytes)) or not hasattr(arg, "__getitem__") or not hasattr(arg, "__len__"):
        raise ArgumentTypeError("EP208", f"parameter {name!r} takes {param.count} values of {param.fields[0].dtype}, got {_described(arg)}")
    if len(arg) != param.count:
        raise ArgumentValueError("EP209", f"parameter {name!r} takes {param.count} values, got {len(arg)}")
    for index in range(param.count):
        member = param.fields[0]
        yield from bind_one(Param(**{**vars(member), "name": f"{name}[{index}]"}), arg[index], device)


def _same_memory(one: Device, other: Device) -> bool:
    return (one.info.kind, one.info.index) == (other.info.kind, other.info.index)


def _place(device: Device) -> str:
    return f"{device.info.kind}:{device.info.index}"


def _described(arg: Any) -> str:
    if isinstance(arg, np.ndarray):
        return f"a NumPy array of {arg.dtype} and shape {arg.shape}"
    text = repr(arg)
    return f"{text if len(text) < 80 else text[:77] + '...'} ({type(arg).__name__})"


def owners(param: Param, arg: Any) -> Iterator[Allocation]:
    """The allocations of ours that an argument lies in."""
    match param.kind:
        case "pointer" if isinstance(arg, DeviceArray):
            if arg._owner is not None:
                yield arg._owner
        case "peers" if isinstance(arg, PeerTable):
            if arg.table._owner is not None:
                yield arg.table._owner
        case "struct":
            for member in param.fields:
                yield from owners(member, arg[member.name] if isinstance(arg, Mapping) else getattr(arg, member.name))
        case "array":
            for one in arg:
                yield from owners(param.fields[0], one)


def encoder(dtype: str) -> Callable[[Number], Number] | None:
    """What turns a value of `dtype` into the number `struct` packs, None when it is that number already."""
    if dtype == "bf16":
        return lambda value: int(np.array(value, numpy_dtype("bf16")).view(np.uint16))
    if dtype in ("f8e4m3", "f8e5m2"):
        return lambda value: int(np.array(value, numpy_dtype(dtype)).view(np.uint8))
    return None
