"""Threads: indices, barriers, groups, warp operations, clocks, asserts and printf."""

from __future__ import annotations

import string
from dataclasses import dataclass
from typing import Any

from epdsl_runtime import context_layout as layout

from epdsl.ir.types import F32, F64, I1, I32, I64, U64, ScalarType

from .arithmetic import binary, common, condition, convert, materialize
from .errors import CompileError
from .intrinsic import Member, intrinsic
from .tracer import Tracer
from .types import as_type
from .values import Value, describe, is_device, is_number


class Dim3(Member):
    """`ep.thread_idx` and its like: `.x`, `.y`, `.z`, each an i32."""

    def __init__(self, name: str) -> None:
        self.name = name

    def attribute(self, tracer: Tracer, name: str) -> Any:
        if name not in ("x", "y", "z"):
            raise CompileError(f"ep.{self.name} has no {name}", f"ep.{self.name}.x, .y or .z")
        return Value(I32, tracer.b.ep("special", [I32], [], name=f"{self.name}.{name}"))

    @property
    def x(self) -> Any:
        raise CompileError(f"ep.{self.name} exists only inside a kernel")

    y = z = x


class TargetFacts(Member):
    """`ep.target`: compile-time facts about what the kernel is being compiled for."""

    vendor: str
    arch: str
    name: str
    simulated: bool

    def attribute(self, tracer: Tracer, name: str) -> Any:
        if name not in ("vendor", "arch", "name", "simulated", "warp_size"):
            raise CompileError(f"ep.target has no {name}", "ep.target.vendor, .arch, .name, .warp_size or .simulated")
        return getattr(tracer.target, name)


thread_idx, block_idx, block_dim, grid_dim = (Dim3(n) for n in ("thread_idx", "block_idx", "block_dim", "grid_dim"))
target = TargetFacts()


@dataclass(frozen=True)
class Group:
    """A class of warps inside a block: `num_threads` threads from `thread_base` on, joined by named barrier `barrier_id`.

    `barrier_id` -1 is the block's own barrier. Both numbers are multiples of the warp.
    """

    thread_base: int
    num_threads: int
    barrier_id: int = -1


@intrinsic
def lane_id(t: Tracer) -> Any:
    """This thread's place in its warp, an i32."""
    return Value(I32, t.b.ep("special", [I32], [], name="lane_id"))


@intrinsic
def warp_id(t: Tracer) -> Any:
    """This warp's place in the block, an i32."""
    return Value(I32, t.b.ep("special", [I32], [], name="warp_id"))


@intrinsic
def warp_size(t: Tracer) -> int:
    """Lanes of a warp, a compile-time constant: 32 on NVIDIA, 64 or 32 on AMD."""
    return t.target.warp_size


@intrinsic
def clock(t: Tracer) -> Any:
    """The multiprocessor's cycle counter, a u64."""
    t.looks_at_memory += 1
    return Value(U64, t.b.ep("special", [I64], [], name="clock"))


@intrinsic
def globaltimer(t: Tracer) -> Any:
    """Nanoseconds since some moment, the same for the whole device, a u64."""
    t.looks_at_memory += 1
    return Value(U64, t.b.ep("special", [I64], [], name="globaltimer"))


@intrinsic
def sleep_ns(t: Tracer, n: Any) -> None:
    """Suspends the thread for about `n` nanoseconds (at most a millisecond)."""
    t.looks_at_memory += 1
    t.b.ep("sleep", [], [convert(t.b, materialize(t.b, n, I32), I32).ir])


# ---- barriers


@intrinsic
def barrier(t: Tracer) -> None:
    """Waits for every thread of the block, and orders memory among them."""
    t.site("barrier", "ep.barrier()")
    t.b.ep("barrier", [], [])


def _barrier_operands(t: Tracer, name: str, barrier_id: Any, threads: Any) -> list[Any]:
    if is_number(barrier_id) and not 1 <= int(barrier_id) <= 15:
        clash = "id 0 is the block's own barrier" if int(barrier_id) == 0 else "there are 16 barriers"
        raise CompileError(f"ep.{name}: id {barrier_id} is not free: {clash}", "an id from 1 to 15")
    if is_number(threads) and (int(threads) < 1 or int(threads) % t.target.warp_size):
        raise CompileError(
            f"ep.{name} of {threads} threads is not a whole number of warps of {t.target.warp_size}", f"a multiple of {t.target.warp_size}"
        )
    return [convert(t.b, materialize(t.b, v, I32), I32).ir for v in (barrier_id, threads)]


@intrinsic
def named_barrier(t: Tracer, barrier_id: Any, threads: Any) -> None:
    """Waits for `threads` threads at barrier `barrier_id` (1 to 15), and orders memory among them. `threads` counts whole warps."""
    operands = _barrier_operands(t, "named_barrier", barrier_id, threads)
    t.b.ep("named_barrier", [], operands)


@intrinsic
def named_arrive(t: Tracer, barrier_id: Any, threads: Any) -> None:
    """Arrives at a named barrier without waiting."""
    operands = _barrier_operands(t, "named_arrive", barrier_id, threads)
    t.b.ep("named_arrive", [], operands)


@intrinsic
def group_barrier(t: Tracer, group: Group) -> None:
    """Waits for every thread of a group."""
    if not isinstance(group, Group):
        raise CompileError(f"ep.group_barrier needs a Group, not {describe(group)}", "ep.Group(thread_base, num_threads, barrier_id)")
    if group.barrier_id < 0:
        t.b.ep("barrier", [], [])
        return
    if group.thread_base % t.target.warp_size:
        raise CompileError(
            f"the group starts at thread {group.thread_base}, inside a warp of {t.target.warp_size}", "a multiple of the warp"
        )
    t.b.ep("named_barrier", [], _barrier_operands(t, "group_barrier", group.barrier_id, group.num_threads))


# ---- warps


def _mask(t: Tracer, mask: Any) -> Any:
    if mask is None:
        return t.b.constant(U64, (1 << t.target.warp_size) - 1)
    return convert(t.b, materialize(t.b, mask, U64), U64).ir


@intrinsic
def warp_sync(t: Tracer, mask: Any = None) -> None:
    """Waits for the lanes of `mask` (all by default) and orders memory among them."""
    t.b.ep("warp_sync", [], [_mask(t, mask)])


def _shuffle(t: Tracer, name: str, kind: str, value: Any, lane: Any, mask: Any) -> Value:
    made = materialize(t.b, value)
    if not isinstance(made.type, ScalarType):
        raise CompileError(f"ep.{name} of {describe(value)}", "a scalar")
    original = made.type
    word = I64 if original.bits == 64 and not original.is_float else F64 if original.bits == 64 else F32 if original == F32 else I32
    carried = made if original == word else Value(word, made.ir) if original.is_int and original.bits == word.bits else None
    if carried is None:
        if original.is_float:
            raise CompileError(f"ep.{name} of {original}", "ep.f32(x)")
        carried = convert(t.b, made, word)
    distance = convert(t.b, materialize(t.b, lane, I32), I32)
    result = Value(word, t.b.ep("shuffle", [word], [carried.ir, distance.ir, _mask(t, mask)], kind=kind))
    if original.is_int and original.bits == word.bits:
        return Value(original, result.ir)
    return convert(t.b, result, original)


@intrinsic
def shfl(t: Tracer, value: Any, lane: Any, mask: Any = None) -> Any:
    """The `value` of lane `lane`."""
    return _shuffle(t, "shfl", "idx", value, lane, mask)


@intrinsic
def shfl_up(t: Tracer, value: Any, distance: Any, mask: Any = None) -> Any:
    """The `value` of the lane `distance` below; the first lanes keep their own."""
    return _shuffle(t, "shfl_up", "up", value, distance, mask)


@intrinsic
def shfl_down(t: Tracer, value: Any, distance: Any, mask: Any = None) -> Any:
    """The `value` of the lane `distance` above; the last lanes keep their own."""
    return _shuffle(t, "shfl_down", "down", value, distance, mask)


@intrinsic
def shfl_xor(t: Tracer, value: Any, lanes: Any, mask: Any = None) -> Any:
    """The `value` of the lane whose number differs in the bits of `lanes`."""
    return _shuffle(t, "shfl_xor", "xor", value, lanes, mask)


@intrinsic
def ballot(t: Tracer, predicate: Any, mask: Any = None) -> Any:
    """A u64 with bit i set where lane i of `mask` has a true predicate."""
    return Value(U64, t.b.ep("vote", [I64], [condition(t.b, predicate).ir, _mask(t, mask)], kind="ballot"))


@intrinsic
def any_lane(t: Tracer, predicate: Any, mask: Any = None) -> Any:
    """Whether the predicate holds in some lane of `mask`."""
    return Value(I1, t.b.ep("vote", [I1], [condition(t.b, predicate).ir, _mask(t, mask)], kind="any"))


@intrinsic
def all_lanes(t: Tracer, predicate: Any, mask: Any = None) -> Any:
    """Whether the predicate holds in every lane of `mask`."""
    return Value(I1, t.b.ep("vote", [I1], [condition(t.b, predicate).ir, _mask(t, mask)], kind="all"))


any_lane.name, all_lanes.name = "any", "all"


@intrinsic
def elect(t: Tracer, mask: Any = None) -> Any:
    """True in exactly one lane of `mask`."""
    return Value(I1, t.b.ep("elect", [I1], [_mask(t, mask)]))


# ---- choices


@intrinsic
def select(t: Tracer, chosen: Any, a: Any, b: Any) -> Any:
    """`a` where the condition holds, else `b`; both are computed."""
    if not is_device(chosen):
        return a if chosen else b
    like = next((v.type for v in (a, b) if isinstance(v, Value) and isinstance(v.type, ScalarType)), None)
    x, y = materialize(t.b, a, like), materialize(t.b, b, like)
    if x.type != y.type:
        raise CompileError(f"ep.select between {x.type} and {y.type}", "one type on both sides")
    return Value(x.type, t.b.select(condition(t.b, chosen).ir, x.ir, y.ir), min(x.multiple, y.multiple))


def extreme(t: Tracer, symbol: str, values: tuple[Any, ...]) -> Any:
    """min and max, of device values where any is one."""
    if len(values) == 1 and isinstance(values[0], tuple):
        values = values[0]
    best = values[0]
    for value in values[1:]:
        if is_device(best) or is_device(value):
            less = binary(t.b, symbol, value, best)
            pair = [v for v in (value, best) if isinstance(v, Value)]
            kind = pair[0].type if len(pair) == 1 else None
            if kind is None:
                x, y, _ = common(t.b, symbol, value, best)
            else:
                x, y = (materialize(t.b, v, kind if isinstance(kind, ScalarType) else None) for v in (value, best))
            best = Value(x.type, t.b.select(less.ir, x.ir, y.ir))
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


# ---- reports to the host


@intrinsic
def device_assert(t: Tracer, test: Any, message: str = "", *values: Any) -> None:
    """Where `test` is false the thread reports a fault (with the first of `values`) and leaves the kernel; the host raises."""
    holds = condition(t.b, test)
    if not isinstance(message, str):
        raise CompileError("ep.device_assert needs a text", 'ep.device_assert(condition, "message")')
    dtypes = [str(materialize(t.b, v).type) for v in values]
    site = t.site("assert", message, dtypes)
    out, on = t.b.new_block(), t.b.new_block()
    inverse = t.b.op("arith.xori", [t.b.i1], [holds.ir, t.b.constant(I1, True)])
    t.b.cond_branch(inverse, out, on, fault=True)
    t.b.block = out
    first = _as_word(t, values[0]) if values else 0
    second = _as_word(t, values[1]) if len(values) > 1 else 0
    t.write_fault(layout.KIND_ASSERT, site, 0, second, first)
    t.fault_exits.append(t.b.block)
    t.b.block = on


def _as_word(t: Tracer, value: Any) -> Value:
    """A scalar's bits in a u64, as a log record holds it."""
    made = materialize(t.b, value)
    if not isinstance(made.type, ScalarType):
        if getattr(made.type, "elem", None) is not None and made.type.nbytes == 8:
            return convert(t.b, made, U64)
        raise CompileError(f"{describe(value)} cannot be printed", "scalars and pointers")
    if made.type.is_float:
        wide = convert(t.b, made, F64)
        return Value(U64, t.b.op("arith.bitcast", [t.b.i64], [wide.ir]))
    if made.type.kind == "i":
        return Value(U64, convert(t.b, made, I64).ir)
    return convert(t.b, made, U64)


@intrinsic
def printf(t: Tracer, text: str, *values: Any) -> None:
    """Prints `text` with its `{}` filled in, preceded by rank, block and thread, at the next synchronisation.

    At most 8 values. Records past the log's capacity are counted and reported, not lost silently.
    """
    if not isinstance(text, str):
        raise CompileError("ep.printf needs a text", 'ep.printf("x = {}", x)')
    holes = sum(1 for _, name, _, _ in string.Formatter().parse(text) if name is not None)
    if holes != len(values):
        raise CompileError(f"ep.printf: the text has {holes} {{}} for {len(values)} values", "one {} for each value")
    if len(values) > layout.LOG_MAX_VALUES:
        raise CompileError(f"ep.printf of {len(values)} values", f"at most {layout.LOG_MAX_VALUES}")
    dtypes: list[str] = []
    for value in values:
        kind = materialize(t.b, value).type
        dtypes.append(
            "f64"
            if isinstance(kind, ScalarType) and kind.is_float
            else "i64"
            if isinstance(kind, ScalarType) and kind.kind == "i"
            else "u64"
        )
    t.write_log(t.site("printf", text, dtypes), tuple(_as_word(t, v) for v in values))


@intrinsic
def trap(t: Tracer) -> None:
    """Stops the kernel with a hardware error. Prefer ep.device_assert, which says why."""
    t.b.ep("trap", [], [])


@intrinsic
def inline_asm(t: Tracer, text: str, constraints: str, *operands: Any, result: Any = None, vendor: str | None = None) -> Any:
    """Target assembly: `$0`, `$1`, ... are the result (if any) and the operands, as in LLVM.

    `vendor` ("nvidia" or "amd") is required and must be the target's: guard the call with `if ep.target.vendor == ...`.
    """
    if vendor not in ("nvidia", "amd"):
        raise CompileError("ep.inline_asm needs vendor=", 'vendor="nvidia" or vendor="amd", inside if ep.target.vendor == ...')
    if t.target.simulated:
        raise CompileError("the simulator cannot run assembly", "if not ep.target.simulated: ..., with another way in the else")
    if vendor != t.target.vendor:
        raise CompileError(f"{vendor} assembly in a kernel for {t.target.name}", f'if ep.target.vendor == "{vendor}": ...')
    from mlir import ir

    kind = as_type(result) if result is not None else None
    attributes = {
        "asm_string": t.b.string(text),
        "constraints": t.b.string(constraints),
        "has_side_effects": ir.UnitAttr.get(t.b.context),
    }
    made = t.b.op("llvm.inline_asm", [t.b.type(kind)] if kind else [], [materialize(t.b, v).ir for v in operands], attributes)
    return Value(kind, made) if isinstance(kind, ScalarType) else None


@intrinsic
def bitcast(t: Tracer, kind: Any, value: Any) -> Any:
    """The same bits as another scalar type of the same size."""
    to = as_type(kind)
    made = materialize(t.b, value)
    if not isinstance(to, ScalarType) or not isinstance(made.type, ScalarType) or to.bits != made.type.bits or to.kind == "b":
        raise CompileError(f"the bits of {describe(value)} are not those of a {to}", "types of the same size")
    if t.b.type(to) == t.b.type(made.type):
        return Value(to, made.ir)
    return Value(to, t.b.op("arith.bitcast", [t.b.type(to)], [made.ir]))


_MATH = {"exp": "math.exp", "log": "math.log", "sqrt": "math.sqrt", "rsqrt": "math.rsqrt", "floor": "math.floor", "fabs": "math.absf"}


def unary_math(name: str) -> Any:
    def emit(t: Tracer, value: Any) -> Any:
        made = materialize(t.b, value, F32)
        if made.type not in (F32, F64):
            raise CompileError(f"ep.{name} of {describe(value)}", f"ep.{name}(ep.f32(x))")
        return Value(made.type, t.b.op(_MATH[name], [made.ir.type], [made.ir]))

    emit.__name__ = name
    emit.__doc__ = f"{name} of an f32 or f64."
    return intrinsic(emit)


sqrt, floor, fabs = unary_math("sqrt"), unary_math("floor"), unary_math("fabs")


@intrinsic
def popcount(t: Tracer, value: Any) -> Any:
    """The number of set bits, in the value's own type."""
    made = materialize(t.b, value)
    if not isinstance(made.type, ScalarType) or not made.type.is_int:
        raise CompileError(f"ep.popcount of {describe(value)}", "an integer")
    return Value(made.type, t.b.op("math.ctpop", [made.ir.type], [made.ir]))


@intrinsic
def count_trailing_zeros(t: Tracer, value: Any) -> Any:
    """The position of the lowest set bit; the type's width when there is none."""
    made = materialize(t.b, value)
    if not isinstance(made.type, ScalarType) or not made.type.is_int:
        raise CompileError(f"ep.count_trailing_zeros of {describe(value)}", "an integer")
    return Value(made.type, t.b.op("math.cttz", [made.ir.type], [made.ir]))
