"""Operators on device values: NumPy's promotion, Python's floor division, conversions."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from epdsl.ir.types import (
    BF16,
    F16,
    F32,
    I1,
    I32,
    I64,
    SMALL_FLOATS,
    U64,
    PtrType,
    ScalarType,
    VecType,
    accepts,
    default_type,
    known_multiple,
    promote,
)

from .errors import CompileError
from .values import Value, describe, is_number

if TYPE_CHECKING:
    from epdsl.ir.builder import Builder

PYTHON_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "%": operator.mod,
    "**": operator.pow,
    "<<": operator.lshift,
    ">>": operator.rshift,
    "&": operator.and_,
    "|": operator.or_,
    "^": operator.xor,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
COMPARISONS = ("==", "!=", "<", "<=", ">", ">=")
_INT_OPS = {
    "+": "arith.addi",
    "-": "arith.subi",
    "*": "arith.muli",
    "&": "arith.andi",
    "|": "arith.ori",
    "^": "arith.xori",
    "<<": "arith.shli",
}
_FLOAT_OPS = {"+": "arith.addf", "-": "arith.subf", "*": "arith.mulf", "/": "arith.divf"}


def constant(b: Builder, kind: ScalarType, number: Any) -> Value:
    """A Python number as a device value. Raises CompileError when it does not fit."""
    number = number.item() if hasattr(number, "item") else number
    if not accepts(kind, number):
        limits = f" ({kind.min} to {kind.max})" if kind.is_int and isinstance(number, int) else ""
        raise CompileError(f"{number!r} does not fit {kind}{limits}", f"a value that fits, or a wider type than ep.{kind}")
    multiple = known_multiple(number) if isinstance(number, int) and not isinstance(number, bool) else 1
    return Value(kind, b.constant(kind, number), multiple)


def materialize(b: Builder, value: Any, like: ScalarType | None = None) -> Value:
    """A device value for `value`: itself, or a Python number as `like` or its default type."""
    if isinstance(value, Value):
        return value
    if is_number(value):
        kind = like or (NUMPY_NAMES.get(type(value).__name__)) or default_type(value)
        if kind is None:
            raise CompileError(f"{value!r} fits no integer type of the language", "a value of at most 64 bits")
        return constant(b, kind, value)
    raise CompileError(f"{describe(value)} cannot be used as a device value", "a number, or a value computed on the device")


def _numpy_names() -> dict[str, ScalarType]:
    from epdsl.ir.types import SCALARS

    names = {"int8": "i8", "int16": "i16", "int32": "i32", "int64": "i64", "uint8": "u8", "uint16": "u16", "uint32": "u32", "uint64": "u64"}
    names |= {"float16": "f16", "float32": "f32", "float64": "f64", "bool_": "i1", "bfloat16": "bf16"}
    return {k: SCALARS[v] for k, v in names.items()}


NUMPY_NAMES = _numpy_names()


def common(b: Builder, symbol: str, left: Any, right: Any) -> tuple[Value, Value, ScalarType]:
    """Both operands as one scalar type."""
    kinds: list[ScalarType] = []
    for side in (left, right):
        if isinstance(side, Value):
            if not isinstance(side.type, ScalarType):
                raise CompileError(
                    f"{describe(left)} {symbol} {describe(right)} is not defined", "an operation on scalars; take a vector apart with v[i]"
                )
            kinds.append(side.type)
        elif not is_number(side):
            raise CompileError(f"{describe(left)} {symbol} {describe(right)} is not defined", "scalars on both sides")
    if len(kinds) == 1:
        kind = kinds[0]
        number = right if isinstance(left, Value) else left
        if kind in SMALL_FLOATS:
            raise CompileError(f"{kind} has no arithmetic", "ep.f32(x) first")
        if kind.kind == "b" and not isinstance(number, bool):
            kind = I32
        if not accepts(kind, number.item() if hasattr(number, "item") else number):
            wide = "ep.f32(x)" if isinstance(number, float) else "ep.i64(x)"
            raise CompileError(
                f"{describe(left)} {symbol} {describe(right)}: {number!r} does not fit {kind}",
                f"convert the other side first, for example {wide}",
            )
    else:
        found = promote(*kinds)
        if found is None:
            raise CompileError(
                f"{kinds[0]} {symbol} {kinds[1]} has no common type without losing values",
                f"convert one side: ep.{kinds[1]}(...) or ep.{kinds[0]}(...)",
            )
        kind = found
    return convert(b, materialize(b, left, kind), kind), convert(b, materialize(b, right, kind), kind), kind


def binary(b: Builder, symbol: str, left: Any, right: Any) -> Value:
    """`left symbol right` where at least one side is a device value."""
    if isinstance(left, Value) and isinstance(left.type, PtrType):
        return _pointer(b, symbol, left, right)
    if isinstance(right, Value) and isinstance(right.type, PtrType):
        if symbol == "+":
            return _pointer(b, symbol, right, left)
        raise CompileError(f"{describe(left)} {symbol} {describe(right)} is not defined", "pointer + count")
    if (isinstance(left, Value) and isinstance(left.type, VecType)) or (isinstance(right, Value) and isinstance(right.type, VecType)):
        return _vector(b, symbol, left, right)
    if symbol in ("<<", ">>"):
        return _shift(b, symbol, left, right)
    x, y, kind = common(b, symbol, left, right)
    if symbol in COMPARISONS:
        return Value(I1, b.compare(symbol, kind, x.ir, y.ir))
    if kind.kind == "b":
        if symbol not in ("&", "|", "^"):
            x, y, kind = convert(b, x, I32), convert(b, y, I32), I32
        else:
            return Value(I1, b.op(_INT_OPS[symbol], [b.i1], [x.ir, y.ir]))
    mlir_type = b.type(kind)
    if kind.is_float:
        if symbol not in _FLOAT_OPS:
            raise CompileError(f"{kind} {symbol} {kind} is not defined", "integers, or ep.f32 arithmetic with + - * /")
        if kind in (F16, BF16):
            wide = Value(F32, b.op(_FLOAT_OPS[symbol], [b.type(F32)], [convert(b, x, F32).ir, convert(b, y, F32).ir]))
            return convert(b, wide, kind)
        return Value(kind, b.op(_FLOAT_OPS[symbol], [mlir_type], [x.ir, y.ir]))
    if symbol == "/":
        raise CompileError(f"{kind} / {kind} is not defined", "// for integer division, or ep.f32(a) / ep.f32(b)")
    if symbol in ("//", "%"):
        return _divide(b, symbol, x, y, kind)
    if symbol == "**":
        raise CompileError(f"{describe(left)} ** {describe(right)} is not defined", "a product")
    made = Value(kind, b.op(_INT_OPS[symbol], [mlir_type], [x.ir, y.ir]))
    if symbol == "*":
        made.multiple = min(1 << 12, x.multiple * y.multiple)
    elif symbol in ("+", "-", "|"):
        made.multiple = min(x.multiple, y.multiple)
    elif symbol == "&":
        made.multiple = max(x.multiple, y.multiple)
    return made


def _divide(b: Builder, symbol: str, x: Value, y: Value, kind: ScalarType) -> Value:
    mlir_type = b.type(kind)
    if kind.kind == "u":
        return Value(kind, b.op("arith.divui" if symbol == "//" else "arith.remui", [mlir_type], [x.ir, y.ir]))
    rest = b.op("arith.remsi", [mlir_type], [x.ir, y.ir])
    zero = b.constant(kind, 0)
    signs = b.op("arith.xori", [mlir_type], [rest, y.ir])
    wrong = b.op("arith.andi", [b.i1], [b.compare("<", kind, signs, zero), b.compare("!=", kind, rest, zero)])
    if symbol == "%":
        return Value(kind, b.select(wrong, b.op("arith.addi", [mlir_type], [rest, y.ir]), rest))
    quotient = b.op("arith.divsi", [mlir_type], [x.ir, y.ir])
    return Value(kind, b.select(wrong, b.op("arith.subi", [mlir_type], [quotient, b.constant(kind, 1)]), quotient))


def _shift(b: Builder, symbol: str, left: Any, right: Any) -> Value:
    x = materialize(b, left, right.type if isinstance(right, Value) and not isinstance(left, Value) else None)
    if not isinstance(x.type, ScalarType) or not x.type.is_int:
        raise CompileError(f"{describe(left)} {symbol} {describe(right)} is not defined", "shifts of integers")
    if is_number(right) and not 0 <= right < x.type.bits:
        raise CompileError(f"a shift of {x.type} by {right} is not defined", f"a distance from 0 to {x.type.bits - 1}")
    y = convert(b, materialize(b, right, x.type), x.type)
    name = "arith.shli" if symbol == "<<" else ("arith.shrsi" if x.type.kind == "i" else "arith.shrui")
    made = Value(x.type, b.op(name, [b.type(x.type)], [x.ir, y.ir]))
    if symbol == "<<" and is_number(right):
        made.multiple = min(1 << 12, x.multiple << min(int(right), 12))
    return made


def _vector(b: Builder, symbol: str, left: Any, right: Any) -> Value:
    kinds = [side.type for side in (left, right) if isinstance(side, Value)]
    vector = next(k for k in kinds if isinstance(k, VecType))
    sides: list[Value] = []
    for side in (left, right):
        if isinstance(side, Value) and side.type == vector:
            sides.append(side)
        elif (isinstance(side, Value) and side.type == vector.elem) or is_number(side):
            sides.append(splat(b, vector, side))
        else:
            raise CompileError(
                f"{describe(left)} {symbol} {describe(right)} is not defined", f"two values of {vector}, or {vector} and {vector.elem}"
            )
    table = _FLOAT_OPS if vector.elem.is_float else _INT_OPS
    if symbol not in table or vector.elem in (F16, BF16):
        raise CompileError(f"{vector} {symbol} {vector} is not defined", "the operation on each v[i]")
    return Value(vector, b.op(table[symbol], [b.type(vector)], [side.ir for side in sides]))


def splat(b: Builder, vector: VecType, value: Any) -> Value:
    scalar = convert(b, materialize(b, value, vector.elem), vector.elem)
    return Value(vector, b.op("vector.broadcast", [b.type(vector)], [scalar.ir]))


def _pointer(b: Builder, symbol: str, pointer: Value, other: Any) -> Value:
    kind = pointer.type
    assert isinstance(kind, PtrType)
    if symbol in ("==", "!=") and isinstance(other, Value) and isinstance(other.type, PtrType):
        x, y = address(b, pointer), address(b, other)
        return Value(I1, b.compare(symbol, U64, x.ir, y.ir))
    if symbol == "-" and isinstance(other, Value) and isinstance(other.type, PtrType):
        bytes_apart = b.op("arith.subi", [b.i64], [address(b, pointer).ir, address(b, other).ir])
        return Value(I64, b.op("arith.divsi", [b.i64], [bytes_apart, b.constant(I64, kind.elem.nbytes)]))
    if symbol not in ("+", "-"):
        raise CompileError(
            f"{describe(pointer)} {symbol} {describe(other)} is not defined", "pointer + count, pointer - count or pointer - pointer"
        )
    return offset_pointer(b, pointer, other if symbol == "+" else negate(b, other))


def index_value(b: Builder, index: Any) -> Value:
    """An integer as the i64 that addresses memory."""
    value = materialize(b, index)
    if not isinstance(value.type, ScalarType) or not value.type.is_int:
        raise CompileError(f"an index must be an integer, not {describe(index)}", "ep.i32(...) or ep.i64(...)")
    return convert(b, value, I64) if value.type.bits < 64 else Value(I64, value.ir, value.multiple)


def offset_pointer(b: Builder, pointer: Value, count: Any) -> Value:
    """`pointer + count` elements."""
    kind = pointer.type
    assert isinstance(kind, PtrType)
    size = kind.elem.nbytes
    if is_number(count):
        if count == 0:
            return pointer
        moved, step = b.gep(pointer.ir, b.constant(I64, int(count) * size)), int(count) * size
        return Value(kind, moved, 1, pointer.root, pointer.modulus, (pointer.remainder + step) % pointer.modulus)
    index = index_value(b, count)
    scaled = index.ir if size == 1 else b.op("arith.muli", [b.i64], [index.ir, b.constant(I64, size)])
    modulus = min(pointer.modulus, known_multiple(size) * index.multiple)
    return Value(kind, b.gep(pointer.ir, scaled), 1, pointer.root, modulus, pointer.remainder % modulus)


def address(b: Builder, pointer: Value) -> Value:
    return Value(U64, b.op("llvm.ptrtoint", [b.i64], [pointer.ir]))


def negate(b: Builder, value: Any) -> Any:
    if not isinstance(value, Value):
        return -value
    if not isinstance(value.type, ScalarType) or value.type.kind == "b":
        raise CompileError(f"-{describe(value)} is not defined", "a number")
    if value.type.is_float:
        if value.type in SMALL_FLOATS:
            raise CompileError(f"{value.type} has no arithmetic", "ep.f32(x) first")
        return Value(value.type, b.op("arith.negf", [b.type(value.type)], [value.ir]))
    return Value(value.type, b.op("arith.subi", [b.type(value.type)], [b.constant(value.type, 0), value.ir]), value.multiple)


def invert(b: Builder, value: Value) -> Value:
    if not isinstance(value.type, ScalarType) or value.type.is_float:
        raise CompileError(f"~{describe(value)} is not defined", "an integer")
    ones = b.constant(value.type, True if value.type.kind == "b" else (-1 if value.type.kind == "i" else value.type.max))
    return Value(value.type, b.op("arith.xori", [b.type(value.type)], [value.ir, ones]))


def truth(b: Builder, value: Value) -> Value:
    """A condition: an i1 as it is, an integer compared with zero."""
    if isinstance(value.type, ScalarType):
        if value.type.kind == "b":
            return value
        if value.type not in SMALL_FLOATS:
            return Value(I1, b.compare("!=", value.type, value.ir, b.constant(value.type, 0)))
    raise CompileError(f"{describe(value)} is not a condition", "a comparison")


def condition(b: Builder, value: Any) -> Value:
    """A device condition for anything a predicate may return."""
    if isinstance(value, Value):
        return truth(b, value)
    return Value(I1, b.constant(I1, bool(value)))


def convert(b: Builder, value: Value, kind: ScalarType) -> Value:
    """`kind(value)`: integers wrap, floats round to nearest even, float to integer truncates towards zero."""
    source = value.type
    if source == kind:
        return value
    if isinstance(source, PtrType):
        if kind.is_int and kind.bits == 64:
            return Value(kind, address(b, value).ir)
        raise CompileError(f"a pointer does not fit {kind}", "ep.u64(p)")
    if not isinstance(source, ScalarType):
        raise CompileError(f"{describe(value)} does not convert to {kind}", f"ep.{kind} of one element")
    mlir_type = b.type(kind)
    if source in SMALL_FLOATS or kind in SMALL_FLOATS:
        raise CompileError(f"{source} does not convert to {kind} here", "ep.f32(x) or ep.f8e4m3(x) in the kernel's own text")
    if kind.kind == "b":
        return truth(b, value)
    if source.is_float and kind.is_float:
        if source.bits == kind.bits:
            return convert(b, convert(b, value, F32), kind)
        return Value(kind, b.op("arith.extf" if kind.bits > source.bits else "arith.truncf", [mlir_type], [value.ir]))
    if source.is_float:
        wide = convert(b, value, F32) if source.bits == 16 else value
        return Value(kind, b.op("arith.fptosi" if kind.kind == "i" else "arith.fptoui", [mlir_type], [wide.ir]))
    if kind.is_float:
        name = "arith.sitofp" if source.kind == "i" else "arith.uitofp"
        if kind.bits == 16:
            return convert(b, Value(F32, b.op(name, [b.type(F32)], [value.ir])), kind)
        return Value(kind, b.op(name, [mlir_type], [value.ir]))
    if kind.bits == source.bits:
        return Value(kind, value.ir, value.multiple)
    if kind.bits < source.bits:
        return Value(kind, b.op("arith.trunci", [mlir_type], [value.ir]), value.multiple)
    return Value(kind, b.op("arith.extsi" if source.kind == "i" else "arith.extui", [mlir_type], [value.ir]), value.multiple)
