"""Loops: which variables they carry, their exits, and loops that are repeated while building."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from epdsl.ir.types import I32, I64, PtrType, ScalarType, VecType, default_type, promote

from .arithmetic import compile_time_type, convert, materialize, truth
from .assignment import assign
from .elements import settle
from .errors import CompileError
from .joins import Leaf, Mismatch, emit_leaf, join, same
from .source import loop_names
from .stops import forget_stale
from .tracer import Binding, Edge, Env, Loop, Tracer
from .values import ArrayValue, Device, PeersValue, StructValue, Undefined, Value, describe, is_device, is_number

LeafType = ScalarType | VecType | PtrType
# How to loop, for who tried something else.
LOOPS = "for i in range(...), or ep.unroll(range(n)) for a compile-time loop"


class Unroll:
    """`ep.unroll(range(n))`: the loop body is repeated while building."""

    def __init__(self, items: Iterable[Any]) -> None:
        self.items = tuple(items)

    def __iter__(self) -> Any:
        return iter(self.items)


class DeviceRange:
    """`range(...)` inside a kernel: always a loop on the device. A step known only there counts upwards."""

    def __init__(self, start: Any, stop: Any, step: Any) -> None:
        self.start, self.stop, self.step = start, stop, step

    @property
    def known(self) -> range | None:
        """The range, where all of it is known while building."""
        bounds = (self.start, self.stop, self.step)
        return None if any(is_device(v) for v in bounds) else range(*(int(v) for v in bounds))


# ---- carried variables


def _split(value: Any) -> tuple[list[tuple[LeafType, Leaf]], Callable[[list[Value]], Any]]:
    """A variable's leaves as (type, value), and how to put it together from device values. Raises Mismatch for what stays compile-time."""
    if isinstance(value, Value):
        if isinstance(value.type, PtrType):
            return [(value.type, value)], lambda made: replace(made.pop(0), modulus=1)
        return [(value.type, value)], lambda made: made.pop(0)
    if is_number(value):
        kind = compile_time_type(value)
        if kind is None:
            raise Mismatch
        return [(kind, value)], lambda made: made.pop(0)
    match value:
        case StructValue(type=kind, fields=fields):
            return _split_all(fields.values(), lambda parts: StructValue(kind, dict(zip(fields, parts, strict=True))))
        case ArrayValue(type=kind, elements=elements):
            return _split_all(elements, lambda parts: ArrayValue(kind, tuple(parts)))
        case PeersValue(type=kind, table=table, size=size):
            return _split_all((table, size), lambda parts: PeersValue(kind, *parts))
        case tuple():
            return _split_all(value, tuple)  # pyright: ignore[reportUnknownArgumentType]
        case _:
            raise Mismatch


def _split_all(parts: Iterable[Any], build: Callable[[list[Any]], Any]) -> tuple[list[tuple[LeafType, Leaf]], Callable[[list[Value]], Any]]:
    leaves: list[tuple[LeafType, Leaf]] = []
    rebuilds: list[Callable[[list[Value]], Any]] = []
    for part in parts:
        found, rebuild = _split(part)
        leaves += found
        rebuilds.append(rebuild)
    return leaves, lambda made: build([rebuild(made) for rebuild in rebuilds])


def _adapt(t: Tracer, kind: LeafType, want: LeafType, value: Leaf) -> Any:
    """A leaf's value as the type its loop carries. Raises Mismatch or CompileError where it has another."""
    if not isinstance(value, Value):
        return emit_leaf(t, want, value)
    pointers = isinstance(kind, PtrType) and isinstance(want, PtrType) and (kind.elem, kind.space) == (want.elem, want.space)
    if kind == want or (pointers and (want.peer or not kind.peer)):  # pyright: ignore[reportAttributeAccessIssue]
        return value.ir
    raise Mismatch


def _carried(t: Tracer, node: ast.For | ast.While) -> list[str]:
    """Names the loop must carry: it binds them, and somebody reads them before they are bound again."""
    names = loop_names(node)
    by_value = (StructValue, ArrayValue, Value)
    found: list[str] = []
    for name in {**names.assigned, **names.changed}:
        binding = t.frame.env.get(name)
        if binding is None or isinstance(binding.value, Undefined):
            continue
        changed = name in names.assigned or (
            isinstance(binding.value, by_value) and not isinstance(binding.value.type, PtrType)  # pyright: ignore[reportAttributeAccessIssue]
        )
        if changed and (name in names.exposed or name in t.frame.source.captured or _live_after(t, name, node)):
            found.append(name)
    return found


def _live_after(t: Tracer, name: str, node: ast.stmt) -> bool:
    """Whether the function may read `name` after the loop: below it, or again in an outer loop's next turn."""
    end = node.end_lineno or node.lineno
    if any(line > end for line in t.frame.source.loads.get(name, ())):
        return True
    return any(loop.exposed is None or name in loop.exposed for loop in t.frame.loops)


class _Header:
    """A loop's head: one block whose arguments are the carried variables."""

    def __init__(self, t: Tracer, names: list[str], extra: list[Value]) -> None:
        self.t = t
        self.before: dict[str, Binding] = {}
        leaves: list[tuple[Any, Leaf]] = [(v.type, v) for v in extra]
        rebuilds: list[tuple[str, Callable[[list[Value]], Any]]] = []
        self._counts: dict[str, int] = {}
        for name in names:
            self.before[name] = t.frame.env[name]
            try:
                found, rebuild = _split(t.frame.env[name].value)
            except Mismatch:
                continue
            rebuilds.append((name, rebuild))
            self._counts[name] = len(found)
            leaves += found
        self._kinds = [kind for kind, _ in leaves]
        self.block = t.b.new_block(self._kinds)
        t.b.branch(self.block, [emit_leaf(t, kind, value) for kind, value in leaves])
        t.b.block = self.block
        made = [Value(kind, argument) for kind, argument in zip(self._kinds, self.block.arguments, strict=True)]
        self.extra = made[: len(extra)]
        rest = made[len(extra) :]
        t.frame.env = dict(t.frame.env)
        for name, rebuild in rebuilds:
            value, number = rebuild(rest), self.before[name].value
            if is_number(number):
                value.began = f"{name} = {number!r}"
            t.frame.env[name] = Binding(value, self.before[name].node)
            t.named(name, value)

    def close(self, extra: list[Value], env: Env) -> None:
        """The back edge: from the current block, with `env`'s values."""
        t = self.t
        for name, before in self.before.items():
            value = env[name].value
            if isinstance(value, Undefined):
                raise t.error(value.code, value.reason, f"a value for {name} on every path through the loop", value.also)
            if name not in self._counts and not same(before.value, value):
                raise self._type_change(name, env[name])
        values: list[Any] = [v.ir for v in extra]
        position = len(extra)
        for name, count in self._counts.items():
            try:
                found, _ = _split(env[name].value)
                if len(found) != count:
                    raise Mismatch
                wanted = self._kinds[position : position + count]
                values += [_adapt(t, kind, want, value) for want, (kind, value) in zip(wanted, found, strict=True)]
            except (Mismatch, CompileError):
                raise self._type_change(name, env[name]) from None
            position += count
        t.b.branch(self.block, values)

    def _type_change(self, name: str, binding: Binding) -> CompileError:
        t = self.t
        before = self.before[name]
        wanted = _described_as_carried(before.value)
        also = [(f"{name} is {wanted} before the loop", before.node), (f"{name} becomes {describe(binding.value)}", binding.node)]
        scalar = getattr(binding.value, "type", None)
        fix = f"{name} = ep.{scalar}(...) before the loop" if isinstance(scalar, ScalarType) else f"one type for {name}"
        places = tuple((label, t.frame.source.place(node)) for label, node in also if node is not None)
        return t.error("EP003", f"{name} changes its type across the loop: {wanted}, then {describe(binding.value)}", fix, places)


def _described_as_carried(value: Any) -> str:
    return f"{default_type(value)} (from {value!r})" if is_number(value) else describe(value)


# ---- for


def for_loop(t: Tracer, node: ast.For) -> None:
    if node.orelse:
        raise CompileError("EP005", "for ... else does not exist in kernels", "a flag set before break")
    items = t.evaluate(node.iter)
    if isinstance(items, DeviceRange):
        _for_range(t, node, items)
    elif hasattr(items, "__iter__") and not isinstance(items, Device):
        _unrolled(t, node, tuple(items))
    else:
        t.at(node.iter)
        raise CompileError("EP014", f"{describe(items)} cannot be looped over", LOOPS)


def _body(t: Tracer, node: ast.For | ast.While, loop: Loop) -> Env:
    """Interprets the body once and joins what goes on to the next turn. Returns its variables."""
    t.frame.loops.append(loop)
    t.execute(node.body)
    t.frame.loops.pop()
    edges = list(loop.continues)
    if t.b.block is not None:
        edges.append(Edge(t.b.block, t.frame.env, node))
    t.at(node)
    env, _ = join(t, edges)
    return env


def _unrolled(t: Tracer, node: ast.For, items: Sequence[Any]) -> None:
    leaving: list[Edge] = []
    for item in items:
        loop = Loop(None)
        assign(t, node.target, item, node.iter)
        t.frame.env = _body(t, node, loop)
        leaving += loop.breaks
        if t.b.block is None:
            break
    if leaving:
        if t.b.block is not None:
            leaving.append(Edge(t.b.block, t.frame.env, node))
        t.frame.env, _ = join(t, leaving)


def _range_type(values: Sequence[Any]) -> ScalarType:
    kinds = [v.type for v in values if isinstance(v, Value)]
    found: ScalarType | None = None
    for kind in kinds:
        if not isinstance(kind, ScalarType) or not kind.is_int:
            raise CompileError("EP014", f"range() needs integers, not {kind}", "ep.i32(...)")
        wider = kind if found is None else promote(found, kind)
        if wider is None:
            raise CompileError("EP014", f"range() mixes {found} and {kind}", "one type for start, stop and step")
        found = wider
    if found is None:
        return I32 if all(I32.min <= int(v) <= I32.max for v in values) else I64
    return I32 if found.bits < 32 else found


def _for_range(t: Tracer, node: ast.For, span: DeviceRange) -> None:
    t.at(node.iter)
    if not isinstance(node.target, ast.Name):
        raise CompileError("EP014", "a loop over range() has one loop variable", "for i in range(...)")
    if is_number(span.step) and span.step == 0:
        raise CompileError("EP014", "range() with a step of 0 never ends", "a step other than 0")
    kind = _range_type([span.start, span.stop, span.step])
    downward = is_number(span.step) and span.step < 0
    start, stop = (convert(t.b, materialize(t.b, v, kind), kind) for v in (span.start, span.stop))
    step = convert(t.b, materialize(t.b, -span.step if downward else span.step, kind), kind)
    header = _Header(t, [n for n in _carried(t, node) if n != node.target.id], [start])
    counter = header.extra[0]
    counter.multiple = min(start.multiple, step.multiple)
    inside, done = t.b.new_block(), t.b.new_block()
    t.b.cond_branch(t.b.compare(">" if downward else "<", kind, counter.ir, stop.ir), inside, done)
    names = loop_names(node)
    leave = _leave(t, node, done, header, {**names.assigned, node.target.id: node.target})
    t.b.block = inside
    if t.stops_at_lines:
        forget_stale(t.frame.env, names.assigned, header.before)
    t.frame.env[node.target.id] = Binding(counter, node.target)
    t.named(node.target.id, counter)
    looks = t.looks_at_memory
    loop = Loop(names.exposed)
    env = _body(t, node, loop)
    if t.b.block is not None:
        if t.looks_at_memory > looks:
            _yield(t, node, bounded=True)
        header.close([_next(t, kind, counter, stop, step, downward)], env)
    t.at(node)
    t.frame.env, _ = join(t, [leave, *loop.breaks])


def _next(t: Tracer, kind: ScalarType, counter: Value, stop: Value, step: Value, downward: bool) -> Value:
    if not downward:
        return Value(kind, t.b.op("arith.addi", [t.b.type(kind)], [counter.ir, step.ir]))
    moved = t.b.op("arith.subi", [t.b.type(kind)], [counter.ir, step.ir])
    if kind.kind == "u":
        # An unsigned counter must not pass below 0, where it would be large again.
        left = t.b.op("arith.subi", [t.b.type(kind)], [counter.ir, stop.ir])
        moved = t.b.select(t.b.compare("<", kind, left, step.ir), stop.ir, moved)
    return Value(kind, moved)


# ---- while


def while_loop(t: Tracer, node: ast.While) -> None:
    if node.orelse:
        raise CompileError("EP005", "while ... else does not exist in kernels", "a flag set before break")
    header = _Header(t, _carried(t, node), [])
    condition = settle(t, t.evaluate(node.test))
    edges: list[Edge] = []
    names = loop_names(node)
    if is_device(condition):
        t.at(node.test)
        inside, done = t.b.new_block(), t.b.new_block()
        t.b.cond_branch(truth(t.b, condition).ir, inside, done)
        edges.append(_leave(t, node, done, header, names.assigned))
        t.b.block = inside
    elif not condition:
        return
    if t.stops_at_lines:
        forget_stale(t.frame.env, names.assigned, header.before)
    loop = Loop(names.exposed)
    env = _body(t, node, loop)
    if t.b.block is not None:
        _yield(t, node, bounded=False)
        header.close([], env)
    t.at(node)
    t.frame.env, _ = join(t, [*edges, *loop.breaks])


# ---- both


def _yield(t: Tracer, node: ast.For | ast.While, bounded: bool) -> None:
    """Where the simulator lets other threads run. `bounded`: the loop ends whatever they do."""
    t.b.ep("yield", (), [], site=t.site("loop", t.place(node).text.strip()), bounded=int(bounded))


def _leave(t: Tracer, node: ast.stmt, block: Any, header: _Header, assigned: dict[str, ast.AST]) -> Edge:
    """The way out of the loop's head, where what only the body binds has no value."""
    env = dict(t.frame.env)
    for name, where in assigned.items():
        if name not in header.before:
            reason = f"{name} is set only inside the loop, which may run zero times"
            also = ((f"{name} is set here", t.frame.source.place(where)),)
            env[name] = Binding(Undefined("EP001", reason, also, f"{name} = ... before the loop"), None)
    return Edge(block, env, node)
