"""Operators on device values: NumPy's promotion, Python's floor division, conversions."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from epdsl_runtime.dtypes import numpy_dtype

from epdsl.ir.types import (
    BF16,
    F8E4M3,
    F8E5M2,
    F16,
    F32,
    F64,
    I1,
    I8,
    I16,
    I32,
    I64,
    SMALL_FLOATS,
    U8,
    U16,
    U32,
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
from .values import Value, describe, is_device, is_number

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
BINARY: dict[type[ast.operator], str] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%", ast.Pow: "**",
    ast.LShift: "<<", ast.RShift: ">>", ast.BitAnd: "&", ast.BitOr: "|", ast.BitXor: "^",
}  # fmt: skip
COMPARE: dict[type[ast.cmpop], str] = {ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="}
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


def operate(b: Builder, symbol: str, left: Any, right: Any) -> Any:
    """`left symbol right`, now where both sides are compile-time values."""
    if is_device(left) or is_device(right):
        return binary(b, symbol, left, right)
    return PYTHON_OPERATORS[symbol](left, right)


def _python_number(number: Any) -> bool | int | float:
    return number.item() if hasattr(number, "item") else number


def constant(b: Builder, kind: ScalarType, number: Any) -> Value:
    """A Python number as a device value. Raises CompileError when it does not fit."""
    number = _python_number(number)
    if not accepts(kind, number):
        if kind.is_int and isinstance(number, float):
            raise CompileError("EP025", f"{number!r} is a float and does not fit {kind}", f"an integer (10**9, not 1e9), or ep.{kind}(...)")
        limits = f" ({kind.min} to {kind.max})" if kind.is_int else ""
        raise CompileError("EP025", f"{number!r} does not fit {kind}{limits}", f"a value that fits, or a wider type than ep.{kind}")
    if kind in SMALL_FLOATS:
        return Value(kind, b.constant(kind, int(numpy_dtype(kind.name).type(float(number)).view("uint8"))))
    multiple = known_multiple(number) if isinstance(number, int) and not isinstance(number, bool) else 1
    return Value(kind, b.constant(kind, number), multiple)


def compile_time_type(number: Any) -> ScalarType | None:
    """The type a number has where nothing else decides: a NumPy scalar's own, for Python's i1, i32 (or what it fits) or f32."""
    return _NUMPY.get(type(number).__name__) or default_type(number)


def materialize(b: Builder, value: Any, like: ScalarType | None = None) -> Value:
    """A device value for `value`: itself, or a Python number as `like` or its default type."""
    if isinstance(value, Value):
        return value
    if is_number(value):
        kind = like or compile_time_type(value)
        if kind is None:
            raise CompileError("EP025", f"{value!r} fits no integer type of the language", "a value of at most 64 bits")
        return constant(b, kind, value)
    raise CompileError("EP032", f"{describe(value)} cannot be used as a device value", "a number, or a value computed on the device")


# NumPy's scalar types are as strong as the device's own.
_NUMPY: dict[str, ScalarType] = {
    "int8": I8, "int16": I16, "int32": I32, "int64": I64, "uint8": U8, "uint16": U16, "uint32": U32, "uint64": U64,
    "float16": F16, "float32": F32, "float64": F64, "bool": I1, "bool_": I1, "bfloat16": BF16,
    "float8_e4m3fn": F8E4M3, "float8_e5m2": F8E5M2,
}  # fmt: skip


def _strong(b: Builder, side: Any) -> Any:
    """NumPy scalars as device values; Python's numbers, which take the other side's type, as they are."""
    if is_number(side) and not isinstance(side, Value) and type(side) not in (bool, int, float):
        return materialize(b, side)
    return side


def common(b: Builder, symbol: str, left: Any, right: Any) -> tuple[Value, Value, ScalarType]:
    """Both operands as one scalar type."""
    left, right = _strong(b, left), _strong(b, right)
    kinds: list[ScalarType] = []
    for side in (left, right):
        if isinstance(side, Value):
            if not isinstance(side.type, ScalarType):
                raise _undefined(symbol, left, right, "an operation on scalars; take a vector apart with v[i]")
            kinds.append(side.type)
        elif not is_number(side):
            raise _undefined(symbol, left, right, "scalars on both sides")
    if len(kinds) == 1:
        kind = kinds[0]
        number = right if isinstance(left, Value) else left
        if kind in SMALL_FLOATS:
            raise CompileError("EP026", f"{kind} has no arithmetic", "ep.f32(x) first")
        if kind.kind == "b" and not isinstance(number, bool):
            kind = I32
        if not accepts(kind, number):
            wide = f"ep.{default_type(number)}(x)"
            raise CompileError(
                "EP025",
                f"{describe(left)} {symbol} {describe(right)}: {number!r} does not fit {kind}",
                f"convert the other side first, for example {wide}",
            )
    else:
        found = promote(*kinds)
        if found is None:
            raise CompileError(
                "EP024", f"{kinds[0]} {symbol} {kinds[1]} has no common type without losing values", _common_fix(left, right, kinds)
            )
        kind = found
    return convert(b, materialize(b, left, kind), kind), convert(b, materialize(b, right, kind), kind), kind


def _common_fix(left: Value, right: Value, kinds: list[ScalarType]) -> str:
    """How two scalars without a common type are brought together."""
    if set(kinds) & set(SMALL_FLOATS):
        return "ep.f32(x) first"
    for side, other in ((left, kinds[1]), (right, kinds[0])):
        if side.began:
            name, _, number = side.began.partition(" = ")
            return f"{name} = ep.{other}({number}) before the loop, or convert one side"
    return f"convert one side: ep.{kinds[1]}(...) or ep.{kinds[0]}(...)"


def _undefined(symbol: str, left: Any, right: Any, fix: str) -> CompileError:
    return CompileError("EP026", f"{describe(left)} {symbol} {describe(right)} is not defined", fix)


def binary(b: Builder, symbol: str, left: Any, right: Any) -> Value:
    """`left symbol right` where at least one side is a device value."""
    kinds = [side.type for side in (left, right) if isinstance(side, Value)]
    if any(isinstance(kind, PtrType) for kind in kinds):
        return _pointer(b, symbol, left, right)
    if any(isinstance(kind, VecType) for kind in kinds):
        return _vector(b, symbol, left, right)
    if symbol in ("<<", ">>"):
        return _shift(b, symbol, left, right)
    x, y, kind = common(b, symbol, left, right)
    if symbol in COMPARISONS:
        return Value(I1, b.compare(symbol, kind, x.ir, y.ir))
    if kind.is_float:
        return _float(b, symbol, x, y, kind)
    if kind.kind == "b":
        if symbol in ("&", "|", "^"):
            return Value(I1, b.op(_INT_OPS[symbol], [b.i1], [x.ir, y.ir]))
        x, y, kind = convert(b, x, I32), convert(b, y, I32), I32
    match symbol:
        case "/":
            raise CompileError("EP026", f"{kind} / {kind} is not defined", "// for integer division, or ep.f32(a) / ep.f32(b)")
        case "**" | "@":
            raise _undefined(symbol, left, right, "x * x")
        case "//" | "%":
            return _divide(b, symbol, x, y, kind, right)
        case _:
            pass
    made = Value(kind, b.op(_INT_OPS[symbol], [b.type(kind)], [x.ir, y.ir]))
    if symbol == "*":
        made.multiple = min(1 << 12, x.multiple * y.multiple)
    elif symbol in ("+", "-", "|"):
        made.multiple = min(x.multiple, y.multiple)
    elif symbol == "&":
        made.multiple = max(x.multiple, y.multiple)
    return made


def _float(b: Builder, symbol: str, x: Value, y: Value, kind: ScalarType) -> Value:
    """16-bit floats are computed in f32 and rounded once, as NumPy and ml_dtypes do."""
    if symbol not in _FLOAT_OPS:
        raise CompileError("EP026", f"{kind} {symbol} {kind} is not defined", "integers, or ep.f32 arithmetic with + - * /")
    if kind.bits == 16:
        x, y = convert(b, x, F32), convert(b, y, F32)
        return convert(b, Value(F32, b.op(_FLOAT_OPS[symbol], [b.type(F32)], [x.ir, y.ir])), kind)
    return Value(kind, b.op(_FLOAT_OPS[symbol], [b.type(kind)], [x.ir, y.ir]))


def _divide(b: Builder, symbol: str, x: Value, y: Value, kind: ScalarType, right: Any) -> Value:
    """Floor division and its remainder. By zero both are 0, as in NumPy; the smallest integer by -1 wraps."""
    known = int(right) if is_number(right) else None
    if known == 0:
        raise CompileError("EP027", f"{kind} {symbol} 0 is not defined", "a divisor other than 0")
    if known is not None and known > 0 and known & (known - 1) == 0:
        return _divide_by_power(b, symbol, x, kind, known)
    mlir_type, zero, one = b.type(kind), b.constant(kind, 0), b.constant(kind, 1)
    by_zero = None if known is not None else b.compare("==", kind, y.ir, zero)
    if kind.kind == "u":
        divisor = y.ir if by_zero is None else b.select(by_zero, one, y.ir)
        made = b.op("arith.divui" if symbol == "//" else "arith.remui", [mlir_type], [x.ir, divisor])
        return Value(kind, made if by_zero is None else b.select(by_zero, zero, made))
    minus_one = b.constant(kind, -1)
    by_minus_one = None if known is not None and known != -1 else b.compare("==", kind, y.ir, minus_one)
    divisor = y.ir
    for special in (by_zero, by_minus_one):
        divisor = divisor if special is None else b.select(special, one, divisor)
    rest = b.op("arith.remsi", [mlir_type], [x.ir, divisor])
    signs = b.op("arith.xori", [mlir_type], [rest, divisor])
    floors = b.op("arith.andi", [b.i1], [b.compare("<", kind, signs, zero), b.compare("!=", kind, rest, zero)])
    if symbol == "%":
        return Value(kind, b.select(floors, b.op("arith.addi", [mlir_type], [rest, divisor]), rest))
    quotient = b.op("arith.divsi", [mlir_type], [x.ir, divisor])
    made = b.select(floors, b.op("arith.subi", [mlir_type], [quotient, one]), quotient)
    if by_minus_one is not None:
        made = b.select(by_minus_one, b.op("arith.subi", [mlir_type], [zero, x.ir]), made)
    return Value(kind, made if by_zero is None else b.select(by_zero, zero, made))


def _divide_by_power(b: Builder, symbol: str, x: Value, kind: ScalarType, power: int) -> Value:
    if symbol == "%":
        return Value(kind, b.op("arith.andi", [b.type(kind)], [x.ir, b.constant(kind, power - 1)]))
    name = "arith.shrsi" if kind.kind == "i" else "arith.shrui"
    made = Value(kind, b.op(name, [b.type(kind)], [x.ir, b.constant(kind, power.bit_length() - 1)]))
    made.multiple = max(1, x.multiple // power) if x.multiple < 1 << 12 else 1
    return made


def _shift(b: Builder, symbol: str, left: Any, right: Any) -> Value:
    """A shift has the type of its left side; a Python number on the left takes the right side's."""
    left, right = _strong(b, left), _strong(b, right)
    kinds = [side.type if isinstance(side, Value) else compile_time_type(side) if is_number(side) else None for side in (left, right)]
    if not all(isinstance(kind, ScalarType) and kind.is_int for kind in kinds):
        raise _undefined(symbol, left, right, "shifts of integers by integers")
    distance = kinds[1]
    x = materialize(b, left, distance if isinstance(distance, ScalarType) and isinstance(right, Value) else None)
    kind = x.type
    assert isinstance(kind, ScalarType) and isinstance(distance, ScalarType)
    if isinstance(right, Value):
        if distance.bits > kind.bits:
            raise CompileError(
                "EP024",
                f"{kind} {symbol} {distance} has no type without losing values",
                f"ep.{distance}(x) {symbol} n, or x {symbol} ep.{kind}(n)",
            )
    elif not 0 <= right < kind.bits:
        raise CompileError("EP027", f"a shift of {kind} by {right} is not defined", f"a distance from 0 to {kind.bits - 1}")
    y = convert(b, materialize(b, right, kind), kind)
    name = "arith.shli" if symbol == "<<" else ("arith.shrsi" if kind.kind == "i" else "arith.shrui")
    made = Value(kind, b.op(name, [b.type(kind)], [x.ir, y.ir]))
    if symbol == "<<" and not isinstance(right, Value):
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
            raise _undefined(symbol, left, right, f"two values of {vector}, or {vector} and {vector.elem}")
    table = _FLOAT_OPS if vector.elem.is_float else _INT_OPS
    if symbol not in table or vector.elem in (F16, BF16):
        raise CompileError("EP026", f"{vector} {symbol} {vector} is not defined", "the operation on each v[i]")
    return Value(vector, b.op(table[symbol], [b.type(vector)], [side.ir for side in sides]))


def splat(b: Builder, vector: VecType, value: Any) -> Value:
    scalar = convert(b, materialize(b, value, vector.elem), vector.elem)
    return Value(vector, b.op("vector.broadcast", [b.type(vector)], [scalar.ir]))


def _pointer(b: Builder, symbol: str, left: Any, right: Any) -> Value:
    pointers = [side for side in (left, right) if isinstance(side, Value) and isinstance(side.type, PtrType)]
    if len(pointers) == 2:
        kind, other = left.type, right.type
        if kind.elem != other.elem or kind.space != other.space or symbol not in (*COMPARISONS, "-"):
            raise _undefined(symbol, left, right, "pointers to one type, one of ==, !=, <, <=, >, >= or -; or ep.u64(p)")
        x, y = address(b, left), address(b, right)
        if symbol != "-":
            return Value(I1, b.compare(symbol, U64, x.ir, y.ir))
        bytes_apart = b.op("arith.subi", [b.i64], [x.ir, y.ir])
        return Value(I64, b.op("arith.divsi", [b.i64], [bytes_apart, b.constant(I64, kind.elem.nbytes)]))
    pointer, other = (left, right) if pointers[0] is left else (right, left)
    if symbol == "+":
        return offset_pointer(b, pointer, other)
    if symbol == "-" and pointer is left:
        return offset_pointer(b, pointer, negate(b, convert(b, other, I64) if isinstance(other, Value) else other))
    raise _undefined(symbol, left, right, "pointer + count, pointer - count or pointer - pointer")


def index_value(b: Builder, index: Any) -> Value:
    """An integer as the i64 that addresses memory."""
    if not (is_number(index) or isinstance(index, Value)):
        raise CompileError("EP029", f"an index must be an integer, not {describe(index)}", "ep.i32(...) or ep.i64(...)")
    value = materialize(b, index)
    if not isinstance(value.type, ScalarType) or not value.type.is_int:
        raise CompileError("EP029", f"an index must be an integer, not {describe(index)}", "ep.i32(...) or ep.i64(...)")
    return convert(b, value, I64) if value.type.bits < 64 else Value(I64, value.ir, value.multiple)


def offset_pointer(b: Builder, pointer: Value, count: Any) -> Value:
    """`pointer + count` elements."""
    kind = pointer.type
    assert isinstance(kind, PtrType)
    size = kind.elem.nbytes
    if is_number(count) and int(count) == count:
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
    """`-value`."""
    if is_number(value):
        return -value
    kind = _scalar_of(value, "-", "a number")
    if kind.kind == "b":
        raise CompileError("EP026", "-i1 is not defined", "not x, or ep.i32(x) first")
    if kind.is_float:
        return Value(kind, b.op("arith.negf", [b.type(kind)], [value.ir]))
    return Value(kind, b.op("arith.subi", [b.type(kind)], [b.constant(kind, 0), value.ir]), value.multiple)


def invert(b: Builder, value: Any) -> Value:
    """`~value`, and `not` of a condition."""
    kind = _scalar_of(value, "~", "an integer")
    if kind.is_float:
        raise CompileError("EP026", f"~{kind} is not defined", "an integer")
    ones = b.constant(kind, True if kind.kind == "b" else (-1 if kind.kind == "i" else kind.max))
    return Value(kind, b.op("arith.xori", [b.type(kind)], [value.ir, ones]))


def _scalar_of(value: Any, symbol: str, fix: str) -> ScalarType:
    kind = value.type if isinstance(value, Value) else None
    if not isinstance(kind, ScalarType):
        raise CompileError("EP026", f"{symbol}{describe(value)} is not defined", fix)
    if kind in SMALL_FLOATS:
        raise CompileError("EP026", f"{kind} has no arithmetic", "ep.f32(x) first")
    return kind


def truth(b: Builder, value: Any) -> Value:
    """A condition: an i1 as it is, a number compared with zero."""
    kind = value.type if isinstance(value, Value) else None
    if isinstance(value, Value) and isinstance(kind, ScalarType) and kind not in SMALL_FLOATS:
        if kind.kind == "b":
            return value
        return Value(I1, b.compare("!=", kind, value.ir, b.constant(kind, 0)))
    raise CompileError("EP030", f"{describe(value)} is not a condition", "a comparison")


def condition(b: Builder, value: Any) -> Value:
    """A device condition for anything a predicate may return."""
    if is_device(value):
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
        raise CompileError("EP028", f"a pointer does not fit {kind}", "ep.u64(p)")
    if not isinstance(source, ScalarType):
        raise CompileError("EP028", f"{describe(value)} does not convert to {kind}", f"ep.{kind} of one element")
    if source in SMALL_FLOATS or kind in SMALL_FLOATS or (source == F64 and kind == F16):
        raise CompileError("EP028", f"{source} does not convert to {kind} here", f"ep.{kind}(x)")
    mlir_type = b.type(kind)
    if kind.kind == "b":
        return truth(b, value)
    if source.is_float and kind.is_float:
        if source.bits == kind.bits or (source == F64 and kind == BF16):
            # f64 to bf16 is rounded twice, as ml_dtypes does.
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
