"""Values in memory and in registers: plain access to elements, fields, arrays and vectors."""

from __future__ import annotations

from typing import Any

from epdsl.ir.types import I1, I8, I32, I64, U32, U64, ArrayType, PeersType, PtrType, ScalarType, StructType, Type, VecType, promote

from .arithmetic import address, binary, constant, convert, index_value, materialize, offset_pointer, splat
from .errors import CompileError
from .tracer import Tracer
from .values import ArrayValue, PeersValue, StructElement, StructValue, Value, describe, is_device, is_number

PLAIN = {"order": "plain", "scope": "none"}


def as_pointer(value: Any, operation: str) -> tuple[Value, PtrType]:
    if isinstance(value, Value) and isinstance(value.type, PtrType):
        return value, value.type
    raise CompileError("EP048", f"{operation} needs a pointer, not {describe(value)}", "a Ptr[T]; an element's address is p + i")


def settle(t: Tracer, value: Any) -> Any:
    """A value as a variable keeps it: a struct behind a pointer is loaded."""
    if type(value) is Value:
        return value
    if isinstance(value, StructElement):
        return load_struct(t, value.pointer)
    if isinstance(value, tuple):
        return tuple(settle(t, v) for v in value)  # pyright: ignore[reportUnknownVariableType]
    return value


def coerce(t: Tracer, value: Any, kind: Type, what: str, about: str = "") -> Any:
    """`value` as `kind`: a number chooses its type, a scalar widens where no value is lost. Raises CompileError for any other difference.

    what   the value's name in the error
    about  the parameter it is the argument of
    """
    value = settle(t, value)
    if is_number(value):
        if isinstance(kind, ScalarType):
            try:
                return constant(t.b, kind, value)
            except CompileError as error:
                raise CompileError(error.code, f"{what}: {error.message}", error.fix, about=about) from None
        if isinstance(kind, VecType):
            return splat(t.b, kind, value)
    if isinstance(value, tuple) and isinstance(kind, ArrayType):
        if len(value) != kind.n:  # pyright: ignore[reportUnknownArgumentType]
            raise CompileError("EP023", f"{what} takes {kind.n} values, not {len(value)}", f"a tuple of {kind.n} values")  # pyright: ignore[reportUnknownArgumentType]
        return ArrayValue(kind, tuple(coerce(t, v, kind.elem, f"an element of {what}") for v in value))  # pyright: ignore[reportUnknownVariableType]
    found = getattr(value, "type", None)
    if isinstance(found, PtrType) and isinstance(kind, PtrType) and found.elem == kind.elem:
        return value
    if is_device(value) and found == kind:
        return value
    if isinstance(value, Value) and isinstance(found, ScalarType) and isinstance(kind, ScalarType) and promote(found, kind) == kind:
        return convert(t.b, value, kind)
    raise CompileError("EP028", f"{what} is {kind}, not {describe(value)}", _conversion(value, kind), about=about)


def _conversion(value: Any, kind: Type) -> str:
    if isinstance(kind, ScalarType) and isinstance(getattr(value, "type", None), ScalarType):
        return f"ep.{kind}(...)"
    if isinstance(kind, PtrType) and isinstance(getattr(value, "type", None), PtrType):
        return f"p.cast(ep.{kind.elem})"
    return f"a value of type {kind}"


# ---- plain access


def plain_load(t: Tracer, kind: Any, pointer: Any, cache: str = "default") -> Any:
    """One `ep.load` of an MLIR type that promises nothing to other threads."""
    return t.b.op("ep.load", [kind], [pointer], _attributes(t, cache))


def plain_store(t: Tracer, value: Any, pointer: Any, cache: str = "default") -> None:
    t.b.op("ep.store", [], [value, pointer], _attributes(t, cache))


def _attributes(t: Tracer, cache: str) -> dict[str, Any]:
    return {name: t.b.string(value) for name, value in {**PLAIN, "cache": cache}.items()}


def load_plain(t: Tracer, pointer: Value, kind: Type) -> Any:
    """The value of type `kind` at an address."""
    match kind:
        case ScalarType(kind="b"):
            byte = Value(U32, t.b.op("arith.extui", [t.b.i32], [plain_load(t, t.b.i8, pointer.ir)]))
            return convert(t.b, byte, I1)
        case ScalarType() | VecType():
            return Value(kind, plain_load(t, t.b.type(kind), pointer.ir))
        case PtrType():
            return Value(kind, t.b.op("llvm.inttoptr", [t.b.type(kind)], [plain_load(t, t.b.i64, pointer.ir)]), modulus=1)
        case StructType():
            return load_struct(t, retype(pointer, kind))
        case ArrayType(elem=elem, n=n):
            base = retype(pointer, elem)
            return ArrayValue(kind, tuple(load_plain(t, offset_pointer(t.b, base, i), elem) for i in range(n)))
        case PeersType():
            word = plain_load(t, t.b.i64, pointer.ir)
            table = Value(PtrType(PtrType(kind.elem, peer=True)), t.b.op("llvm.inttoptr", [t.b.ptr_global], [word]))
            size = load_plain(t, retype(offset_pointer(t.b, retype(pointer, I64), 1), I32), I32)
            return PeersValue(kind, table, size)


def store_plain(t: Tracer, pointer: Value, kind: Type, value: Any) -> None:
    match kind:
        case ScalarType(kind="b"):
            plain_store(t, t.b.op("arith.extui", [t.b.i8], [value.ir]), pointer.ir)
        case ScalarType() | VecType():
            plain_store(t, value.ir, pointer.ir)
        case PtrType():
            if value.type.space == "shared":
                raise CompileError(
                    "EP049", "the address of shared memory cannot be stored in memory", "a pointer from ep.shared in a variable"
                )
            plain_store(t, address(t.b, value).ir, pointer.ir)
        case StructType():
            for name, field in kind.fields:
                store_plain(t, _field(t, pointer, kind, name), field, value.fields[name])
        case ArrayType(elem=elem):
            base = retype(pointer, elem)
            for i, each in enumerate(value.elements):
                store_plain(t, offset_pointer(t.b, base, i), elem, each)
        case PeersType():
            raise CompileError("EP049", "ep.Peers cannot be stored in memory", "pass it as a kernel parameter")


def retype(pointer: Value, elem: Type) -> Value:
    """The same address as a pointer to another type."""
    assert isinstance(pointer.type, PtrType)
    made = PtrType(elem, pointer.type.space, pointer.type.peer)
    return Value(made, pointer.ir, 1, pointer.root, pointer.modulus, pointer.remainder)


def pointer_from(t: Tracer, kind: PtrType, value: Any) -> Value:
    """`ep.Ptr[T](address)`: a global address of 64 bits, or another pointer, as a pointer to T."""
    if isinstance(value, Value):
        if isinstance(value.type, PtrType):
            return retype(value, kind.elem)
        if value.type in (I64, U64):
            return Value(kind, t.b.op("llvm.inttoptr", [t.b.type(kind)], [value.ir]), modulus=1)
    raise CompileError("EP028", f"{describe(value)} does not convert to {kind}", "a u64 address or a pointer")


def _field(t: Tracer, pointer: Value, kind: StructType, name: str) -> Value:
    elem = kind.field_type(name)
    assert elem is not None
    raw = offset_pointer(t.b, retype(pointer, I8), kind.offsets[name])
    return retype(raw, elem.elem if isinstance(elem, ArrayType) else elem)


def field_pointer(t: Tracer, pointer: Value, name: str) -> Value:
    """`&p->name`; an array field becomes a pointer to its first element."""
    kind = pointer.type
    assert isinstance(kind, PtrType) and isinstance(kind.elem, StructType)
    check_field(kind.elem, name)
    return _field(t, pointer, kind.elem, name)


def check_field(kind: StructType, name: str) -> Type:
    found = kind.field_type(name)
    if found is None:
        raise CompileError("EP004", f"{kind} has no field {name}", f"one of {', '.join(n for n, _ in kind.fields)}")
    return found


def load_struct(t: Tracer, pointer: Value) -> StructValue:
    kind = pointer.type
    assert isinstance(kind, PtrType) and isinstance(kind.elem, StructType)
    return StructValue(kind.elem, {name: load_plain(t, _field(t, pointer, kind.elem, name), field) for name, field in kind.elem.fields})


# ---- elements


def load_element(t: Tracer, base: Any, index: Any) -> Any:
    """`base[index]` of a device value."""
    if isinstance(base, PeersValue):
        if is_number(index) and index < 0:
            raise CompileError("EP029", f"peers[{index}]: ranks count from 0", "a rank from 0 to peers.size - 1")
        entry = offset_pointer(t.b, base.table, index)
        word = plain_load(t, t.b.i64, entry.ir)
        return Value(PtrType(base.type.elem, peer=True), t.b.op("llvm.inttoptr", [t.b.ptr_global], [word]))
    if isinstance(base, ArrayValue):
        return _array_element(t, base, index)
    if isinstance(base, Value) and isinstance(base.type, VecType):
        return Value(base.type.elem, t.b.op("llvm.extractelement", [t.b.type(base.type.elem)], [base.ir, _lane(t, base.type, index)]))
    pointer, kind = as_pointer(base, "[...]")
    at = offset_pointer(t.b, pointer, index)
    return StructElement(at) if isinstance(kind.elem, StructType) else load_plain(t, at, kind.elem)


def store_element(t: Tracer, base: Any, index: Any, value: Any) -> None:
    """`pointer[index] = value`, of the element's type."""
    pointer, kind = as_pointer(base, "[...] = ...")
    store_plain(t, offset_pointer(t.b, pointer, index), kind.elem, value)


def _array_element(t: Tracer, array: ArrayValue, index: Any) -> Any:
    if is_number(index):
        return array.elements[_inside(index, array.type)]
    kind = array.type.elem
    if not all(isinstance(e, Value) for e in array.elements):
        raise CompileError(
            "EP011", f"an element of {array.type} cannot be chosen at run time", "a compile-time index, or a pointer to memory"
        )
    position = materialize(t.b, index)
    chosen = array.elements[0].ir
    for i, each in enumerate(array.elements[1:], 1):
        chosen = t.b.select(binary(t.b, "==", position, i).ir, each.ir, chosen)
    return Value(array.elements[0].type if kind == array.elements[0].type else kind, chosen, modulus=1)  # pyright: ignore[reportArgumentType]


def with_element(t: Tracer, container: ArrayValue | Value, index: Any, made: Any) -> ArrayValue | Value:
    """An array or vector with one element replaced by a value of its type."""
    kind = container.type
    assert isinstance(kind, ArrayType | VecType)
    if isinstance(container, Value):
        assert isinstance(kind, VecType)
        return Value(kind, t.b.op("llvm.insertelement", [t.b.type(kind)], [container.ir, made.ir, _lane(t, kind, index)]))
    if is_number(index):
        position = _inside(index, container.type)
        return ArrayValue(container.type, tuple(made if i == position else e for i, e in enumerate(container.elements)))
    if not isinstance(made, Value):
        raise CompileError("EP011", f"an element of {kind} cannot be chosen at run time", "a compile-time index")
    position = materialize(t.b, index)
    return ArrayValue(
        container.type,
        tuple(
            Value(e.type, t.b.select(binary(t.b, "==", position, i).ir, made.ir, e.ir), modulus=1) for i, e in enumerate(container.elements)
        ),
    )


def _inside(index: Any, kind: ArrayType | VecType) -> int:
    if not 0 <= index < kind.n:
        raise CompileError("EP029", f"index {index} is outside {kind}", f"0 to {kind.n - 1}")
    return int(index)


def _lane(t: Tracer, vector: VecType, index: Any) -> Any:
    return t.b.constant(I64, _inside(index, vector)) if is_number(index) else index_value(t.b, index).ir


def make_vector(t: Tracer, kind: VecType, values: tuple[Any, ...]) -> Value:
    """`ep.vec(T, n)(a, b, ...)`, one value for all lanes, or the bits of another vector of the same size."""
    if len(values) == 1:
        value = values[0]
        if isinstance(value, Value) and isinstance(value.type, VecType):
            if value.type.nbytes != kind.nbytes:
                raise CompileError(
                    "EP023", f"{value.type} has {value.type.nbytes} bytes, {kind} has {kind.nbytes}", "vectors of the same size"
                )
            return Value(kind, t.b.op("llvm.bitcast", [t.b.type(kind)], [value.ir]))
        return splat(t.b, kind, coerce(t, value, kind.elem, f"the value of {kind}"))
    if len(values) != kind.n:
        raise CompileError("EP023", f"{kind} takes {kind.n} values, not {len(values)}", f"{kind.n} values, or one for all")
    made: Any = splat(t.b, kind, coerce(t, values[0], kind.elem, f"an element of {kind}"))
    for i, value in enumerate(values[1:], 1):
        made = with_element(t, made, i, coerce(t, value, kind.elem, f"an element of {kind}"))
    return made
