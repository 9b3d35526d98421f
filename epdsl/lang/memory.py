"""Memory operations with an order and a scope, vector access, shared memory and waits."""

from __future__ import annotations

import ast
import enum
import math
from typing import Any

from epdsl.ir import dialect
from epdsl.ir.types import I1, I64, U64, PtrType, ScalarType, VecType

from .arithmetic import condition, convert
from .elements import PLAIN, as_pointer, coerce
from .errors import CompileError
from .intrinsic import intrinsic, required
from .polling import Look, poll_until
from .source import parameter_nodes
from .tracer import Tracer
from .types import as_type
from .values import Closure, Value, describe, is_device, is_number


class Order(enum.Enum):
    """How an access is ordered with the thread's other accesses, as in C++, PTX and LLVM."""

    RELAXED = "relaxed"
    ACQUIRE = "acquire"
    RELEASE = "release"
    ACQ_REL = "acq_rel"
    SEQ_CST = "seq_cst"


class Scope(enum.Enum):
    """Which threads an ordered access is ordered for: of the block, of the device, of every device that reaches the memory."""

    BLOCK = "block"
    DEVICE = "device"
    SYSTEM = "system"


RELAXED, ACQUIRE, RELEASE, ACQ_REL, SEQ_CST = Order
BLOCK, DEVICE, SYSTEM = Scope


def _shown(value: Any) -> str:
    return f"ep.{value.name}" if isinstance(value, enum.Enum) else repr(value)


def check_order(operation: str, order: Any, allowed: tuple[str, ...]) -> str:
    if not isinstance(order, Order):
        raise CompileError(
            "EP041",
            f"{operation}: order={_shown(order)} is not an order",
            "ep.RELAXED, ep.ACQUIRE, ep.RELEASE, ep.ACQ_REL or ep.SEQ_CST",
            about="order",
        )
    if order.value not in allowed:
        raise CompileError(
            "EP042", f"{operation} cannot be {order.name}", f"order={' or '.join('ep.' + a.upper() for a in allowed)}", about="order"
        )
    return order.value


def check_scope(operation: str, scope: Any, pointer: PtrType | None) -> str:
    if not isinstance(scope, Scope):
        raise CompileError("EP041", f"{operation}: scope={_shown(scope)} is not a scope", "ep.BLOCK, ep.DEVICE or ep.SYSTEM", about="scope")
    if pointer is not None and pointer.peer and scope is not Scope.SYSTEM:
        raise CompileError(
            "EP043",
            f"{operation} at scope {scope.name} on a peer pointer: the other rank is on another device and would not be ordered with it",
            "scope=ep.SYSTEM",
            about="scope",
        )
    return scope.value


# ---- ordered and scoped operations


def _word(operation: str, kind: PtrType, widths: tuple[int, ...] = (32, 64)) -> ScalarType:
    elem = kind.elem
    if not isinstance(elem, ScalarType) or elem.bits not in widths:
        raise CompileError(
            "EP044",
            f"{operation} on {kind} is not one access on every target",
            f"a pointer to a type of {' or '.join(str(w) for w in widths)} bits, such as ep.u32",
            about="ptr",
        )
    return elem


def _aligned(t: Tracer, operation: str, pointer: Value, nbytes: int) -> None:
    """Refuses an address known to be misaligned, and records what the parameter must satisfy."""
    step = math.gcd(pointer.modulus, nbytes)
    if pointer.remainder % step:
        raise CompileError(
            "EP045",
            f"{operation} of {nbytes} bytes at an address {pointer.remainder % step} bytes past a multiple of {step}",
            f"an address that is a multiple of {nbytes}, or a narrower access",
            about="ptr",
        )
    if pointer.root is not None:
        t.param_align[pointer.root] = max(t.param_align.get(pointer.root, 1), min(16, nbytes))


def _cache(operation: str, cache: str) -> str:
    if cache not in ("default", "streaming"):
        raise CompileError("EP047", f"{operation}: cache={cache!r} is not known", 'cache="default" or cache="streaming"', about="cache")
    return cache


@intrinsic
def load(t: Tracer, ptr: Any, *, order: Any = None, scope: Any = None, width: int = 1, cache: str = "default") -> Any:
    """The value at `ptr`. `width` > 1 reads that many elements as one vector of at most 16 bytes, aligned to its size.

    `order` (RELAXED, ACQUIRE, SEQ_CST) and `scope` are required, except for a plain vector or streaming read, which promises nothing
    to another thread.
    """
    pointer, kind = as_pointer(ptr, "ep.load")
    if order is None and scope is None and (width != 1 or cache != "default"):
        return _load_wide(t, pointer, kind, width, _cache("ep.load", cache))
    required("load", order=order, scope=scope)
    chosen = check_order("ep.load", order, dialect.LOAD_ORDERS)
    chosen_scope = check_scope("ep.load", scope, kind)
    if width != 1:
        raise CompileError(
            "EP044",
            "a vector load cannot be ordered: no target has it as one access",
            "scalar loads with order=, or a plain vector load after a wait",
            about="width",
        )
    elem = _word("ep.load", kind)
    t.looks_at_memory += 1
    return Value(elem, t.b.ep("load", [elem], [pointer.ir], order=chosen, scope=chosen_scope, cache=_cache("ep.load", cache)))


def _vector_type(operation: str, kind: PtrType, width: int) -> ScalarType | VecType:
    if width == 1 and isinstance(kind.elem, ScalarType | VecType) and kind.elem != I1:
        return kind.elem
    if not isinstance(kind.elem, ScalarType) or kind.elem == I1 or width not in (2, 4, 8, 16) or width * kind.elem.nbytes > 16:
        raise CompileError(
            "EP023",
            f"{operation} of {width} x {kind.elem} is not a vector of up to 16 bytes",
            "width 2, 4, 8 or 16 with at most 16 bytes",
            about="width",
        )
    return VecType(kind.elem, width)


def _load_wide(t: Tracer, pointer: Value, kind: PtrType, width: int, cache: str) -> Value:
    made = _vector_type("ep.load", kind, width)
    _aligned(t, "ep.load", pointer, made.nbytes)
    return Value(made, t.b.ep("load", [made], [pointer.ir], **PLAIN, cache=cache))


@intrinsic
def store(t: Tracer, ptr: Any, value: Any, *, order: Any = None, scope: Any = None, cache: str = "default") -> None:
    """Writes `value` at `ptr`. A vector value is written as one aligned access.

    `order` (RELAXED, RELEASE, SEQ_CST) and `scope` are required, except for a plain vector or streaming write.
    """
    pointer, kind = as_pointer(ptr, "ep.store")
    is_vector = isinstance(value, Value) and isinstance(value.type, VecType)
    if order is None and scope is None and (is_vector or cache != "default"):
        chosen = value.type if is_vector else _vector_type("ep.store", kind, 1)  # pyright: ignore[reportOptionalMemberAccess]
        made = coerce(t, value, chosen, "the value stored", "value")
        base = chosen.elem if isinstance(chosen, VecType) else chosen
        if base != kind.elem and chosen != kind.elem:
            raise CompileError("EP028", f"ep.store of {chosen} through {kind}", f"a pointer to {base}: p.cast(ep.{base})", about="ptr")
        _aligned(t, "ep.store", pointer, made.type.nbytes)
        t.b.ep("store", [], [made.ir, pointer.ir], **PLAIN, cache=_cache("ep.store", cache))
        return
    required("store", order=order, scope=scope)
    chosen_order = check_order("ep.store", order, dialect.STORE_ORDERS)
    chosen_scope = check_scope("ep.store", scope, kind)
    elem = _word("ep.store", kind)
    made = coerce(t, value, elem, "the value stored", "value")
    t.b.ep("store", [], [made.ir, pointer.ir], order=chosen_order, scope=chosen_scope, cache=_cache("ep.store", cache))


def _rmw(t: Tracer, name: str, op: str, ptr: Any, value: Any, order: Any, scope: Any, result: bool) -> Any:
    pointer, kind = as_pointer(ptr, f"ep.{name}")
    required(name, order=order, scope=scope)
    chosen = check_order(f"ep.{name}", order, dialect.RMW_ORDERS)
    chosen_scope = check_scope(f"ep.{name}", scope, kind)
    elem = _word(f"ep.{name}", kind)
    if elem.is_float:
        if op not in ("add", "xchg"):
            raise CompileError("EP046", f"ep.{name} on {elem} does not exist", "an integer type, or ep.atomic_add", about="ptr")
        op = "fadd" if op == "add" else op
    if op in ("min", "max") and elem.kind == "u":
        op = f"u{op}"
    made = coerce(t, value, elem, f"the value given to ep.{name}", "value")
    t.looks_at_memory += 1
    if result:
        return Value(elem, t.b.ep("atomic_rmw", [elem], [pointer.ir, made.ir], op=op, order=chosen, scope=chosen_scope))
    t.b.ep("reduce", [], [pointer.ir, made.ir], op=op, order=chosen, scope=chosen_scope)
    return None


@intrinsic
def atomic_add(t: Tracer, ptr: Any, value: Any, *, order: Any = None, scope: Any = None) -> Any:
    """Adds and returns what was there before. 32 or 64 bits, integers and floats."""
    return _rmw(t, "atomic_add", "add", ptr, value, order, scope, True)


@intrinsic
def atomic_sub(t: Tracer, ptr: Any, value: Any, *, order: Any = None, scope: Any = None) -> Any:
    """Subtracts and returns what was there before."""
    return _rmw(t, "atomic_sub", "sub", ptr, value, order, scope, True)


@intrinsic
def atomic_min(t: Tracer, ptr: Any, value: Any, *, order: Any = None, scope: Any = None) -> Any:
    """Stores the smaller (by the type's signedness) and returns what was there before."""
    return _rmw(t, "atomic_min", "min", ptr, value, order, scope, True)


@intrinsic
def atomic_max(t: Tracer, ptr: Any, value: Any, *, order: Any = None, scope: Any = None) -> Any:
    """Stores the larger (by the type's signedness) and returns what was there before."""
    return _rmw(t, "atomic_max", "max", ptr, value, order, scope, True)


@intrinsic
def atomic_and(t: Tracer, ptr: Any, value: Any, *, order: Any = None, scope: Any = None) -> Any:
    """Stores the bitwise and, and returns what was there before. Integers of 32 or 64 bits."""
    return _rmw(t, "atomic_and", "and", ptr, value, order, scope, True)


@intrinsic
def atomic_or(t: Tracer, ptr: Any, value: Any, *, order: Any = None, scope: Any = None) -> Any:
    """Stores the bitwise or, and returns what was there before. Integers of 32 or 64 bits."""
    return _rmw(t, "atomic_or", "or", ptr, value, order, scope, True)


@intrinsic
def atomic_xor(t: Tracer, ptr: Any, value: Any, *, order: Any = None, scope: Any = None) -> Any:
    """Stores the bitwise exclusive or, and returns what was there before. Integers of 32 or 64 bits."""
    return _rmw(t, "atomic_xor", "xor", ptr, value, order, scope, True)


@intrinsic
def atomic_xchg(t: Tracer, ptr: Any, value: Any, *, order: Any = None, scope: Any = None) -> Any:
    """Stores `value` and returns what was there before."""
    return _rmw(t, "atomic_xchg", "xchg", ptr, value, order, scope, True)


@intrinsic
def atomic_cas(t: Tracer, ptr: Any, expected: Any, desired: Any, *, order: Any = None, scope: Any = None) -> Any:
    """Stores `desired` if `expected` was there; returns what was there before."""
    pointer, kind = as_pointer(ptr, "ep.atomic_cas")
    required("atomic_cas", order=order, scope=scope)
    chosen = check_order("ep.atomic_cas", order, dialect.RMW_ORDERS)
    chosen_scope = check_scope("ep.atomic_cas", scope, kind)
    elem = _word("ep.atomic_cas", kind)
    if elem.is_float:
        raise CompileError("EP046", f"ep.atomic_cas on {elem} does not exist", "p.cast(ep.u32)", about="ptr")
    old, new = coerce(t, expected, elem, "the expected value", "expected"), coerce(t, desired, elem, "the desired value", "desired")
    t.looks_at_memory += 1
    return Value(elem, t.b.ep("atomic_cas", [elem], [pointer.ir, old.ir, new.ir], order=chosen, scope=chosen_scope))


@intrinsic
def reduce_add(t: Tracer, ptr: Any, value: Any, *, order: Any = None, scope: Any = None) -> None:
    """Adds, with no result: cheaper than `atomic_add` where the old value is not needed."""
    _rmw(t, "reduce_add", "add", ptr, value, order, scope, False)


@intrinsic
def reduce_sub(t: Tracer, ptr: Any, value: Any, *, order: Any = None, scope: Any = None) -> None:
    """Subtracts, with no result."""
    _rmw(t, "reduce_sub", "sub", ptr, value, order, scope, False)


@intrinsic
def reduce_min(t: Tracer, ptr: Any, value: Any, *, order: Any = None, scope: Any = None) -> None:
    """Stores the smaller (by the type's signedness), with no result."""
    _rmw(t, "reduce_min", "min", ptr, value, order, scope, False)


@intrinsic
def reduce_max(t: Tracer, ptr: Any, value: Any, *, order: Any = None, scope: Any = None) -> None:
    """Stores the larger (by the type's signedness), with no result."""
    _rmw(t, "reduce_max", "max", ptr, value, order, scope, False)


@intrinsic
def reduce_and(t: Tracer, ptr: Any, value: Any, *, order: Any = None, scope: Any = None) -> None:
    """Stores the bitwise and, with no result. Integers of 32 or 64 bits."""
    _rmw(t, "reduce_and", "and", ptr, value, order, scope, False)


@intrinsic
def reduce_or(t: Tracer, ptr: Any, value: Any, *, order: Any = None, scope: Any = None) -> None:
    """Stores the bitwise or, with no result. Integers of 32 or 64 bits."""
    _rmw(t, "reduce_or", "or", ptr, value, order, scope, False)


@intrinsic
def reduce_xor(t: Tracer, ptr: Any, value: Any, *, order: Any = None, scope: Any = None) -> None:
    """Stores the bitwise exclusive or, with no result. Integers of 32 or 64 bits."""
    _rmw(t, "reduce_xor", "xor", ptr, value, order, scope, False)


@intrinsic
def fence(t: Tracer, *, order: Any = None, scope: Any = None) -> None:
    """Orders this thread's accesses before it with those after it, for the threads of `scope`."""
    required("fence", order=order, scope=scope)
    t.b.ep("fence", [], [], order=check_order("ep.fence", order, dialect.FENCE_ORDERS), scope=check_scope("ep.fence", scope, None))


@intrinsic
def shared(t: Tracer, kind: Any, n: Any = 1, *, at: Any = None) -> Any:
    """A pointer to `n` elements of the block's shared memory, the same for all its threads. Not zeroed.

    at  byte where they begin in a part of shared memory that lies behind everything without a place; what is placed at just the
        same bytes shares them, any other overlap is an error. For phases that are told where their memory is by the kernel around them.
    """
    elem = as_type(kind)
    if is_device(n) or not is_number(n) or int(n) < 1:
        raise CompileError("EP050", f"ep.shared needs a compile-time size of at least 1, not {describe(n)}", "ep.shared(T, 128)", about="n")
    pointer, nbytes, align = PtrType(elem, "shared"), elem.nbytes * int(n), max(16, elem.align)
    if at is None:
        return Value(pointer, t.b.ep("shared", [pointer], [], offset=t.b.integer(t.take_shared(nbytes, align), 64)))
    if is_device(at) or not is_number(at) or int(at) < 0 or int(at) % align:
        raise CompileError(
            "EP050", f"ep.shared needs a compile-time place that is a multiple of {align} bytes, not {describe(at)}", "at=0", about="at"
        )
    placed = t.b.ep("shared", [pointer], [], offset=t.b.integer(0, 64))
    t.place_shared(placed.owner, int(at), nbytes)
    return Value(pointer, placed)


# ---- waiting


def nanoseconds(t: Tracer, timeout: Any) -> Value:
    """A timeout as an i64."""
    if isinstance(timeout, Value) and isinstance(timeout.type, ScalarType) and timeout.type.is_int:
        return convert(t.b, timeout, I64)
    return coerce(t, timeout, I64, "timeout_ns", "timeout_ns")


@intrinsic
def wait(t: Tracer, ptr: Any, *, until: Any = None, order: Any = None, scope: Any = None, timeout_ns: Any = None) -> Any:
    """Looks at `*ptr` until `until(value)` holds and returns that value.

    `ptr` may be a tuple of pointers of one type: `until` must hold for the word of each, though not for all at the same moment, and a
    tuple of the values is returned. A GPU makes the loads of a look together, so several RELAXED words cost one round trip where
    waits in a row cost one each.
    ACQUIRE makes what the writer released visible, RELAXED promises nothing. After `timeout_ns`
    nanoseconds (required, at most 2**62) the thread reports a fault and leaves the kernel; the host raises `PeerTimeout`.
    """
    pointers, kind = _pointers(ptr)
    required("wait", order=order, scope=scope)
    chosen = check_order("ep.wait", order, ("relaxed", "acquire"))
    chosen_scope = check_scope("ep.wait", scope, kind)
    if until is None:
        raise CompileError("EP051", "ep.wait needs until=", "until=lambda v: v == 1")
    if timeout_ns is None:
        raise CompileError("EP051", "ep.wait needs timeout_ns=: no wait is unbounded", "timeout_ns=10**9")
    _takes_one_value(until)
    elem = _word("ep.wait", kind)
    if elem.is_float:
        raise CompileError("EP046", f"ep.wait on {elem}", "an integer word", about="ptr")
    text, expected = _predicate(t, until)
    site = t.site("wait", text, (elem.name,))
    limit = nanoseconds(t, timeout_ns)
    polled = chosen if _polls_acquire(t) else "relaxed"

    def look_at(pointer: Value) -> Look:
        return Look(
            pointer,
            lambda: Value(elem, t.b.ep("load", [elem], [pointer.ir], order=polled, scope=chosen_scope, cache="default")),
            lambda seen: condition(t.b, t.call(until, (seen,), {})),
        )

    values = poll_until(t, [look_at(pointer) for pointer in pointers], limit, site, elem.bits, expected)
    if chosen == "acquire" and polled == "relaxed":
        t.b.ep("fence", [], [], order="acquire", scope=chosen_scope)
    return values if isinstance(ptr, tuple) else values[0]


def _pointers(ptr: Any) -> tuple[list[Value], PtrType]:
    """The pointers of a wait, and their type."""
    if not isinstance(ptr, tuple):
        pointer, kind = as_pointer(ptr, "ep.wait")
        return [pointer], kind
    found = [as_pointer(each, "ep.wait") for each in ptr]
    kinds = list(dict.fromkeys(kind for _, kind in found))
    if len(kinds) != 1:
        names = " and ".join(map(str, kinds)) or "none"
        raise CompileError("EP048", f"ep.wait for several words needs pointers of one type, not {names}", "(p, p + 1)", about="ptr")
    return [pointer for pointer, _ in found], kinds[0]


def _polls_acquire(t: Tracer) -> bool:
    """Whether every look acquires. PTX has no fence that only acquires: one after the poll would also wait for the thread's own stores
    on their way to peers. Elsewhere an acquire costs a cache invalidation a look, so the poll is relaxed and one fence follows."""
    return t.target.vendor == "nvidia" and not t.target.simulated


def _takes_one_value(until: Any) -> None:
    """Refuses a condition that cannot be given the value that was seen, and nothing else."""
    fix = "until=lambda v: v == 1"
    if isinstance(until, Closure):
        names = list(parameter_nodes(until.node))
        if not names or any(name not in until.defaults for name in names[1:]):
            raise CompileError(
                "EP008", f"ep.wait: until is given one value, what was seen, and takes ({', '.join(names)})", fix, about="until"
            )
    elif is_device(until) or not callable(until):
        raise CompileError("EP008", f"ep.wait: until is {describe(until)}, not a function of the value that was seen", fix, about="until")


def _predicate(t: Tracer, until: Any) -> tuple[str, Any]:
    """The predicate's text, and the value it compares with where it is a plain comparison."""
    node = getattr(until, "node", None)
    if isinstance(node, ast.Lambda):
        text = ast.unparse(node.body)
        match node.body:
            case ast.Compare(left=ast.Name(id=name), comparators=[right]) if list(parameter_nodes(node)) == [name]:
                saved, t.frame = t.frame, until.frame
                try:
                    expected = t.evaluate(right)
                finally:
                    t.frame = saved
                if is_number(expected):
                    return text, int(expected) & ((1 << 64) - 1)
                if isinstance(expected, Value) and isinstance(expected.type, ScalarType) and expected.type.is_int:
                    return text, convert(t.b, expected, U64)
            case _:
                pass
        return text, 0
    return getattr(until, "__name__", "until"), 0
