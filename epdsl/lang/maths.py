"""Choices, bits and elementary functions."""

from __future__ import annotations

from typing import Any

from epdsl.ir.types import F32, F64, SMALL_FLOATS, PtrType, ScalarType

from .arithmetic import common, condition, convert, materialize, negate
from .errors import CompileError
from .intrinsic import Intrinsic, intrinsic
from .tracer import Tracer
from .types import as_type
from .values import Value, describe, is_device


@intrinsic
def select(t: Tracer, chosen: Any, a: Any, b: Any) -> Any:
    """`a` where the condition holds, else `b`; both are computed."""
    if not is_device(chosen):
        return a if chosen else b
    like = next((v.type for v in (a, b) if isinstance(v, Value) and isinstance(v.type, ScalarType)), None)
    x, y = materialize(t.b, a, like), materialize(t.b, b, like)
    if x.type != y.type:
        raise CompileError("EP028", f"ep.select between {x.type} and {y.type}", "one type on both sides")
    made = t.b.select(condition(t.b, chosen).ir, x.ir, y.ir)
    return Value(x.type, made, 1 if isinstance(x.type, PtrType) else min(x.multiple, y.multiple), modulus=1)


def extreme(t: Tracer, symbol: str, values: tuple[Any, ...]) -> Any:
    """min ("<") and max (">"), on the device where any value is there."""
    if len(values) == 1 and isinstance(values[0], tuple):
        values = values[0]
    if not values:
        raise CompileError("EP008", "min and max need a value", "ep.min(a, b)")
    best = values[0]
    for value in values[1:]:
        if is_device(best) or is_device(value):
            x, y, kind = common(t.b, symbol, value, best)
            best = Value(kind, t.b.select(t.b.compare(symbol, kind, x.ir, y.ir), x.ir, y.ir))
        else:
            best = min(best, value) if symbol == "<" else max(best, value)
    return best


@intrinsic
def min_of(t: Tracer, *values: Any) -> Any:
    """The smallest value."""
    return extreme(t, "<", values)


@intrinsic
def max_of(t: Tracer, *values: Any) -> Any:
    """The largest value."""
    return extreme(t, ">", values)


min_of.name, max_of.name = "min", "max"


@intrinsic
def bitcast(t: Tracer, kind: Any, value: Any) -> Any:
    """The same bits as another scalar type of the same size."""
    to = as_type(kind)
    made = materialize(t.b, value)
    if not isinstance(to, ScalarType) or not isinstance(made.type, ScalarType) or to.bits != made.type.bits or to.kind == "b":
        raise CompileError("EP028", f"the bits of {describe(value)} are not those of a {to}", "types of the same size")
    if t.b.type(to) == t.b.type(made.type):
        return Value(to, made.ir)
    return Value(to, t.b.op("arith.bitcast", [t.b.type(to)], [made.ir]))


def _float_function(name: str, operation: str) -> Intrinsic[..., Any]:
    def emit(t: Tracer, value: Any) -> Any:
        made = materialize(t.b, value, F32)
        if made.type not in (F32, F64):
            raise CompileError("EP026", f"ep.{name} of {describe(value)}", f"ep.{name}(ep.f32(x))")
        return Value(made.type, t.b.op(operation, [made.ir.type], [made.ir]))

    emit.__name__ = name
    emit.__doc__ = f"{name} of an f32 or f64."
    return intrinsic(emit)


sqrt = _float_function("sqrt", "math.sqrt")
floor = _float_function("floor", "math.floor")
fabs = _float_function("fabs", "math.absf")


def absolute(t: Tracer, value: Any) -> Any:
    """`abs(value)`. The smallest integer is its own, as in NumPy."""
    kind = value.type if isinstance(value, Value) else None
    if not isinstance(kind, ScalarType) or kind.kind == "b" or kind in SMALL_FLOATS:
        raise CompileError("EP026", f"abs of {describe(value)}", "a number")
    if kind.is_float:
        wide = convert(t.b, value, F32) if kind.bits == 16 else value
        return convert(t.b, Value(wide.type, t.b.op("math.absf", [wide.ir.type], [wide.ir])), kind)
    return value if kind.kind == "u" else extreme(t, ">", (value, negate(t.b, value)))


@intrinsic
def popcount(t: Tracer, value: Any) -> Any:
    """The number of set bits, in the value's own type."""
    made = materialize(t.b, value)
    if not isinstance(made.type, ScalarType) or not made.type.is_int:
        raise CompileError("EP026", f"ep.popcount of {describe(value)}", "an integer")
    return Value(made.type, t.b.op("math.ctpop", [made.ir.type], [made.ir]))


@intrinsic
def count_trailing_zeros(t: Tracer, value: Any) -> Any:
    """The position of the lowest set bit; the type's width when there is none."""
    made = materialize(t.b, value)
    if not isinstance(made.type, ScalarType) or not made.type.is_int:
        raise CompileError("EP026", f"ep.count_trailing_zeros of {describe(value)}", "an integer")
    return Value(made.type, t.b.op("math.cttz", [made.ir.type], [made.ir]))
