"""Threads: indices, barriers, groups, warp operations and clocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from epdsl.ir.types import F32, F64, I1, I32, I64, U8, U16, U32, U64, ScalarType

from .arithmetic import condition, convert, materialize
from .errors import CompileError
from .intrinsic import Member, intrinsic
from .tracer import Tracer
from .values import Value, describe, is_device, is_number


class Dim3(Member):
    """`ep.thread_idx` and its like: `.x`, `.y`, `.z`, each an i32."""

    def __init__(self, name: str) -> None:
        self.name = name

    def attribute(self, tracer: Tracer, name: str) -> Any:
        if name not in ("x", "y", "z"):
            raise CompileError("EP004", f"ep.{self.name} has no {name}", f"ep.{self.name}.x, .y or .z")
        return Value(I32, tracer.b.ep("special", [I32], [], name=f"{self.name}.{name}"))

    @property
    def x(self) -> Any:
        raise CompileError("EP013", f"ep.{self.name} exists only inside a kernel")

    y = z = x


class TargetFacts(Member):
    """`ep.target`: compile-time facts about what the kernel is being compiled for."""

    vendor: str
    arch: str
    name: str
    simulated: bool
    warp_size: int
    has_bulk_copy: bool

    def attribute(self, tracer: Tracer, name: str) -> Any:
        if name not in ("vendor", "arch", "name", "simulated", "warp_size", "has_bulk_copy"):
            raise CompileError(
                "EP004", f"ep.target has no {name}", "ep.target.vendor, .arch, .name, .warp_size, .has_bulk_copy or .simulated"
            )
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
    t.b.ep("sleep", [], [_as_i32(t, "ep.sleep_ns", n).ir], site=t.site("sleep", "ep.sleep_ns(...)"))


# ---- barriers


@intrinsic
def barrier(t: Tracer) -> None:
    """Waits for every thread of the block, and orders memory among them."""
    t.b.ep("barrier", [], [], site=t.site("barrier", "ep.barrier()"))


def _as_i32(t: Tracer, what: str, value: Any) -> Value:
    """An integer operand of at most 32 bits."""
    made = materialize(t.b, value, I32 if is_number(value) else None)
    if not isinstance(made.type, ScalarType) or not made.type.is_int or made.type.bits > 32:
        raise CompileError("EP064", f"{what} takes an i32, not {describe(value)}", "ep.i32(...)")
    return convert(t.b, made, I32)


def _named(t: Tracer, operation: str, name: str, barrier_id: Any, threads: Any) -> None:
    size = t.target.warp_size
    if is_number(barrier_id) and not 1 <= int(barrier_id) <= 15:
        clash = "id 0 is the block's own barrier" if int(barrier_id) == 0 else "a block has barriers 0 to 15"
        raise CompileError("EP061", f"ep.{name}: barrier id {barrier_id} cannot be used: {clash}", "an id from 1 to 15")
    if is_number(threads) and (int(threads) < 1 or int(threads) % size):
        raise CompileError("EP062", f"ep.{name} of {threads} threads is not a whole number of warps of {size}", f"a multiple of {size}")
    if is_number(threads) and t.block_threads is not None and int(threads) > t.block_threads:
        raise CompileError(
            "EP063",
            f"ep.{name} waits for {threads} threads, a block has at most {t.block_threads}",
            f"at most the {t.block_threads} of max_threads=",
        )
    operands = [_as_i32(t, f"ep.{name}", v).ir for v in (barrier_id, threads)]
    t.b.ep(operation, [], operands, site=t.site("barrier", f"ep.{name}(...)"))


@intrinsic
def named_barrier(t: Tracer, barrier_id: Any, threads: Any) -> None:
    """Waits for `threads` threads at barrier `barrier_id` (1 to 15), and orders memory among them. `threads` counts whole warps."""
    _named(t, "named_barrier", "named_barrier", barrier_id, threads)


@intrinsic
def named_arrive(t: Tracer, barrier_id: Any, threads: Any) -> None:
    """Arrives at a named barrier without waiting."""
    _named(t, "named_arrive", "named_arrive", barrier_id, threads)


@intrinsic
def group_barrier(t: Tracer, group: Group) -> None:
    """Waits for every thread of a group."""
    if not isinstance(group, Group):
        raise CompileError(
            "EP064", f"ep.group_barrier needs a Group, not {describe(group)}", "ep.Group(thread_base, num_threads, barrier_id)"
        )
    if any(is_device(v) for v in (group.thread_base, group.num_threads, group.barrier_id)):
        raise CompileError(
            "EP010", "a dynamic value where a constant is needed: a group's numbers", "compile-time numbers, or ep.named_barrier"
        )
    if group.barrier_id < 0:
        t.b.ep("barrier", [], [], site=t.site("barrier", "ep.group_barrier(...)"))
        return
    if group.thread_base % t.target.warp_size:
        raise CompileError(
            "EP062",
            f"the group starts at thread {group.thread_base}, inside a warp of {t.target.warp_size}",
            f"a multiple of {t.target.warp_size}",
        )
    _named(t, "named_barrier", "group_barrier", group.barrier_id, group.num_threads)


# ---- warps


def _mask(t: Tracer, name: str, mask: Any) -> Any:
    """The lanes that take part, as a 64-bit word: all lanes of the warp unless given."""
    every = (1 << t.target.warp_size) - 1
    if mask is None:
        return t.b.constant(U64, every)
    if is_number(mask) and not 0 < int(mask) <= every:
        raise CompileError(
            "EP065", f"ep.{name}: mask {int(mask):#x} names no lanes of a warp of {t.target.warp_size}", f"a mask from 1 to {every:#x}"
        )
    made = materialize(t.b, mask, U64 if is_number(mask) else None)
    if not isinstance(made.type, ScalarType) or not made.type.is_int:
        raise CompileError("EP065", f"ep.{name}: a mask is an integer, not {describe(mask)}", "a u64, such as ep.ballot returns")
    return convert(t.b, convert(t.b, made, _UNSIGNED[made.type.bits]), U64).ir


# A mask's bits stay what they are: i32 -1 names 32 lanes.
_UNSIGNED = {8: U8, 16: U16, 32: U32, 64: U64}


@intrinsic
def warp_sync(t: Tracer, mask: Any = None) -> None:
    """Waits for the lanes of `mask` (all by default) and orders memory among them."""
    t.b.ep("warp_sync", [], [_mask(t, "warp_sync", mask)], site=t.site("warp", "ep.warp_sync()"))


def _shuffle(t: Tracer, name: str, kind: str, value: Any, lane: Any, mask: Any) -> Value:
    made = materialize(t.b, value)
    original = made.type
    if not isinstance(original, ScalarType):
        fix = "a scalar; ep.u64(p) of a pointer, or each v[i] of a vector"
        raise CompileError("EP064", f"ep.{name} cannot move {describe(value)}", fix, about="value")
    word = _shuffled_as(original)
    carried = convert(t.b, _bits_as_integer(t, made), word) if word.is_int else made
    site = t.site("warp", f"ep.{name}(...)")
    operands = [carried.ir, _as_i32(t, f"ep.{name}", lane).ir, _mask(t, name, mask)]
    result = Value(word, t.b.ep("shuffle", [word], operands, kind=kind, site=site))
    if original.is_float and word.is_int:
        narrow = convert(t.b, result, _UNSIGNED[original.bits])
        same = t.b.type(original) == t.b.type(narrow.type)
        return Value(original, narrow.ir if same else t.b.op("arith.bitcast", [t.b.type(original)], [narrow.ir]))
    return convert(t.b, result, original)


def _shuffled_as(kind: ScalarType) -> ScalarType:
    """The 32- or 64-bit type whose shuffle moves a value of `kind`."""
    if kind in (F32, F64):
        return kind
    return U64 if kind.bits == 64 else U32


def _bits_as_integer(t: Tracer, value: Value) -> Value:
    """A 16- or 8-bit float's bits; an integer as it is."""
    kind = value.type
    assert isinstance(kind, ScalarType)
    if not kind.is_float:
        return value
    to = _UNSIGNED[kind.bits]
    return Value(to, value.ir if t.b.type(kind) == t.b.type(to) else t.b.op("arith.bitcast", [t.b.type(to)], [value.ir]))


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


def _vote(t: Tracer, kind: str, result: ScalarType, predicate: Any, mask: Any) -> Any:
    operands = [condition(t.b, predicate).ir, _mask(t, kind, mask)]
    return t.b.ep("vote", [result], operands, kind=kind, site=t.site("warp", f"ep.{kind}(...)"))


@intrinsic
def ballot(t: Tracer, predicate: Any, mask: Any = None) -> Any:
    """A u64 with bit i set where lane i of `mask` has a true predicate."""
    return Value(U64, _vote(t, "ballot", I64, predicate, mask))


@intrinsic
def any_lane(t: Tracer, predicate: Any, mask: Any = None) -> Any:
    """Whether the predicate holds in some lane of `mask`."""
    return Value(I1, _vote(t, "any", I1, predicate, mask))


@intrinsic
def all_lanes(t: Tracer, predicate: Any, mask: Any = None) -> Any:
    """Whether the predicate holds in every lane of `mask`."""
    return Value(I1, _vote(t, "all", I1, predicate, mask))


any_lane.name, all_lanes.name = "any", "all"


@intrinsic
def elect(t: Tracer, mask: Any = None) -> Any:
    """True in exactly one lane of `mask`."""
    return Value(I1, t.b.ep("elect", [I1], [_mask(t, "elect", mask)], site=t.site("warp", "ep.elect()")))
