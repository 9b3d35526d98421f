"""Reading names, attributes and subscripts."""

from __future__ import annotations

import difflib
from contextlib import suppress
from typing import Any

from epdsl.ir.types import PtrType, ScalarType, StructType

from .elements import check_field, field_pointer, load_element, load_plain, retype
from .errors import CompileError
from .function import BoundFunc, Func
from .intrinsic import BoundIntrinsic, Member, intrinsic
from .tracer import Tracer
from .types import as_type
from .values import ArrayValue, PeersValue, StructElement, StructValue, Undefined, Value, describe, is_device

# What other languages call it.
_ELSEWHERE = {
    "syncthreads": "ep.barrier()",
    "syncwarp": "ep.warp_sync()",
    "threadfence": "ep.fence(order=..., scope=ep.DEVICE)",
    "threadfence_system": "ep.fence(order=..., scope=ep.SYSTEM)",
    "program_id": "ep.block_idx.x",
    "arange": "range(ep.thread_idx.x, n, ep.block_dim.x)",
    "print": 'ep.printf("{}", x)',
}


def lookup(t: Tracer, name: str) -> Any:
    binding = t.frame.env.get(name)
    if binding is None:
        if name in t.frame.locals:
            raise CompileError("EP001", f"{name} has no value yet", _value_before(t, name))
        return t.frame.lookup(name)
    if isinstance(binding.value, Undefined):
        raise CompileError(
            binding.value.code,
            binding.value.reason,
            binding.value.fix or f"a value for {name} on every path, before this line",
            binding.value.also,
        )
    return binding.value


def _value_before(t: Tracer, name: str) -> str:
    with suppress(CompileError):
        t.frame.lookup(name)
        return f"another name for what this function assigns: in all of it, {name} is that, and not the {name} outside"
    return f"{name} = ... on every path, before this line"


def attribute(t: Tracer, base: Any, name: str) -> Any:
    """`base.name`."""
    match base:
        case Member():
            return base.attribute(t, name)
        case StructValue():
            if name in base.fields:
                return base.fields[name]
            return _class_attribute(base, name)
        case StructElement():
            kind = base.type.field_type(name)
            if kind is None:
                return _class_attribute(base, name)
            pointer = field_pointer(t, base.pointer, name)
            assert isinstance(pointer.type, PtrType)
            if pointer.type.elem != kind:
                return pointer
            return StructElement(pointer) if isinstance(kind, StructType) else load_plain(t, pointer, kind)
        case PeersValue():
            if name == "size":
                return base.size
            raise CompileError("EP004", f"{base.type} has no {name}", "peers[rank] or peers.size")
        case ArrayValue():
            if name == "size":
                return base.type.n
            raise CompileError("EP004", f"{base.type} has no {name}", "array[i] or array.size")
        case Value(type=PtrType(elem=elem)):
            if name == "cast":
                return BoundIntrinsic(cast_pointer, base)
            if isinstance(elem, StructType):
                return field_pointer(t, base, name)
            raise CompileError("EP004", f"{describe(base)} has no {name}", "p[i], p + n or p.cast(T)")
        case Value():
            raise CompileError("EP004", f"{describe(base)} has no attribute {name}", "scalars and vectors have operators and v[i] alone")
        case _:
            pass
    if not hasattr(base, name):
        owner = getattr(base, "__name__", None) or f"a compile-time {type(base).__name__}"
        near = difflib.get_close_matches(name, dir(base), 1, 0.75)
        prefix = "ep." if owner == "epdsl" else ""
        known = f"{prefix}{near[0]}" if near else _ELSEWHERE.get(name, "") if prefix else ""
        if isinstance(base, tuple) and hasattr(list, name):
            known = "(*a, x): lists written in a kernel are tuples, which do not change"
        raise CompileError("EP004", f"{owner} has no attribute {name}", known)
    return getattr(base, name)


def _class_attribute(base: StructValue | StructElement, name: str) -> Any:
    """A method of a struct, or a constant of its class."""
    found = getattr(base.type.cls, name, None)
    if isinstance(found, Func):
        return BoundFunc(found, base)
    if found is None or name in base.type.cls.__dataclass_fields__:
        check_field(base.type, name)
    return found


@intrinsic
def cast_pointer(t: Tracer, ptr: Any, kind: Any) -> Value:
    """The same address as a pointer to another type."""
    assert isinstance(ptr, Value)
    return retype(ptr, as_type(kind))


cast_pointer.name, cast_pointer.owner = "Ptr.cast", "ptr"


def subscript(t: Tracer, base: Any, index: Any) -> Any:
    """`base[index]`."""
    if isinstance(base, Value) and isinstance(base.type, ScalarType):
        raise CompileError("EP031", f"{base.type} has no elements", "a pointer, an array or a vector")
    if isinstance(base, PeersValue | ArrayValue | Value):
        return load_element(t, base, index)
    if isinstance(base, StructValue | StructElement):
        raise CompileError("EP031", f"{base.type} has no elements", f"its fields: {', '.join(n for n, _ in base.type.fields)}")
    if is_device(index):
        if isinstance(base, tuple):
            raise CompileError(
                "EP011",
                "a tuple's element cannot be chosen at run time",
                "ep.unroll around the loop's range, an ep.Array field or shared memory",
            )
        raise CompileError("EP010", f"a dynamic value where a constant is needed: the index of {describe(base)}", "a compile-time index")
    return base[index]
