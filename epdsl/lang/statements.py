"""Statements: assignment, branches, loops and their exits."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from epdsl.ir.types import I32, I64, ArrayType, PtrType, ScalarType, default_type, promote

from .arithmetic import NUMPY_NAMES, PYTHON_OPERATORS, binary, convert, materialize, truth
from .errors import CompileError
from .joins import Mismatch, emit_leaf, join, same
from .memory import coerce, field_pointer, insert_element, load_element, load_struct, store_element
from .source import assigned_names, exposed_names, loaded_names
from .tracer import Binding, Edge, Env, Frame, Loop, Tracer
from .values import ArrayValue, Closure, Device, PeersValue, StructElement, StructValue, Undefined, Value, describe, is_device, is_number

BINARY = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%", ast.Pow: "**",
    ast.LShift: "<<", ast.RShift: ">>", ast.BitAnd: "&", ast.BitOr: "|", ast.BitXor: "^",
}  # fmt: skip


class Unroll:
    """`ep.unroll(range(n))`: the loop body is repeated while building."""

    def __init__(self, items: Iterable[Any]) -> None:
        self.items = tuple(items)


class DeviceRange:
    """`range(...)` inside a kernel: always a loop on the device."""

    def __init__(self, start: Any, stop: Any, step: Any) -> None:
        self.start, self.stop, self.step = start, stop, step


def execute_one(t: Tracer, node: ast.stmt) -> None:
    t.at(node)
    match node:
        case ast.Expr(value=ast.Constant()):
            pass
        case ast.Expr(value=value):
            t.evaluate(value)
        case ast.Assign(targets=targets, value=value):
            result = settle(t, t.evaluate(value))
            for target in targets:
                assign(t, target, result)
        case ast.AnnAssign(target=target, value=value, annotation=annotation):
            if value is None:
                raise CompileError("a declaration without a value does nothing here", "name: T = value")
            result = settle(t, t.evaluate(value))
            assign(t, target, t.call(t.evaluate(annotation), (result,), {}) if is_number(result) else result)
        case ast.AugAssign(target=target, op=op, value=value):
            _augmented(t, target, op, value)
        case ast.If():
            _if(t, node)
        case ast.For():
            _for(t, node)
        case ast.While():
            _while(t, node)
        case ast.Return(value=value):
            result = settle(t, t.evaluate(value)) if value is not None else None
            t.frame.returns.append(Edge(t.b.block, {}, node, result))
            t.b.block = None
        case ast.Break():
            _loop_of(t, "break").breaks.append(Edge(t.b.block, dict(t.frame.env), node))
            t.b.block = None
        case ast.Continue():
            _loop_of(t, "continue").continues.append(Edge(t.b.block, dict(t.frame.env), node))
            t.b.block = None
        case ast.Pass():
            pass
        case ast.Assert(test=test, msg=message):
            _assert(t, test, message)
        case ast.FunctionDef():
            t.frame.env[node.name] = Binding(Closure(node, t.frame), node)
        case ast.Raise(exc=exc):
            text = t.evaluate(exc) if exc is not None else "raise"
            raise CompileError(f"the kernel refuses this configuration: {text}")
        case _:
            raise CompileError(
                f"{type(node).__name__} statements do not exist in kernels", "if, for ... in range(...), while, assignments and calls"
            )


def settle(t: Tracer, value: Any) -> Any:
    """A value as a variable keeps it: a struct behind a pointer is loaded."""
    if isinstance(value, StructElement):
        return load_struct(t, value.pointer)
    if isinstance(value, tuple):
        return tuple(settle(t, v) for v in value)  # pyright: ignore[reportUnknownVariableType]
    return value


def _loop_of(t: Tracer, word: str) -> Loop:
    if not t.frame.loops:
        raise CompileError(f"{word} outside a loop")
    return t.frame.loops[-1]


def assign(t: Tracer, target: ast.expr, value: Any) -> None:
    match target:
        case ast.Name(id=name):
            t.frame.env[name] = Binding(value, target)
        case ast.Tuple(elts=elements) | ast.List(elts=elements):
            if not isinstance(value, tuple) or len(value) != len(elements):  # pyright: ignore[reportUnknownArgumentType]
                raise CompileError(f"{describe(value)} does not unpack into {len(elements)} names")
            for element, each in zip(elements, value, strict=True):  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
                assign(t, element, each)
        case ast.Subscript(value=base, slice=index):
            container = t.evaluate(base)
            if isinstance(container, ArrayValue):
                _assign_array(t, base, container, t.evaluate(index), value)
            elif isinstance(container, Value) and not isinstance(container.type, PtrType):
                assign(t, base, insert_element(t, container, t.evaluate(index), value))
            else:
                store_element(t, container, t.evaluate(index), value)
        case ast.Attribute(value=base, attr=name):
            _assign_field(t, base, name, value)
        case _:
            raise CompileError(f"{ast.unparse(target)} cannot be assigned to", "a name, a struct's field or p[i]")


def _assign_field(t: Tracer, base: ast.expr, name: str, value: Any) -> None:
    container = t.evaluate(base)
    if isinstance(container, StructValue | StructElement):
        kind = container.type.field_type(name)
        if kind is None:
            raise CompileError(f"{container.type} has no field {name}", f"one of {', '.join(n for n, _ in container.type.fields)}")
        if isinstance(container, StructElement):
            store_element(t, field_pointer(t, container.pointer, name), 0, value)
            return
        assign(t, base, container.with_field(name, coerce(t, value, kind, f"{container.type}.{name}")))
        return
    raise CompileError(f"{describe(container)} has no fields that can be assigned", "compile-time objects are constants inside a kernel")


def _assign_array(t: Tracer, base: ast.expr, array: ArrayValue, index: Any, value: Any) -> None:
    assert isinstance(array.type, ArrayType)
    made = coerce(t, value, array.type.elem, f"an element of {array.type}")
    if is_number(index):
        if not 0 <= index < array.type.n:
            raise CompileError(f"index {index} is outside {array.type}", f"0 to {array.type.n - 1}")
        elements = tuple(made if i == index else e for i, e in enumerate(array.elements))
    else:
        if not isinstance(made, Value):
            raise CompileError(f"an element of {array.type} cannot be chosen at run time", "a compile-time index")
        position = materialize(t.b, index)
        elements = tuple(
            Value(made.type, t.b.select(binary(t.b, "==", position, i).ir, made.ir, e.ir)) for i, e in enumerate(array.elements)
        )
    assign(t, base, ArrayValue(array.type, elements))


def _augmented(t: Tracer, target: ast.expr, op: ast.operator, value: ast.expr) -> None:
    symbol = BINARY.get(type(op))
    if symbol is None:
        raise CompileError("this augmented assignment does not exist in kernels")
    if isinstance(target, ast.Subscript):
        base, index = t.evaluate(target.value), t.evaluate(target.slice)
        if isinstance(base, Value) and isinstance(base.type, PtrType):
            store_element(t, base, index, operate(t, symbol, load_element(t, base, index), t.evaluate(value)))
            return
    load = ast.copy_location(ast.parse(ast.unparse(target), mode="eval").body, target)
    for each in ast.walk(load):
        ast.copy_location(each, target)
    assign(t, target, operate(t, symbol, t.evaluate(load), t.evaluate(value)))


def operate(t: Tracer, symbol: str, left: Any, right: Any) -> Any:
    left, right = settle(t, left), settle(t, right)
    if is_device(left) or is_device(right):
        return binary(t.b, symbol, left, right)
    return PYTHON_OPERATORS[symbol](left, right)


def _assert(t: Tracer, test: ast.expr, message: ast.expr | None) -> None:
    condition = t.evaluate(test)
    if is_device(condition):
        raise CompileError("assert needs a compile-time condition", 'ep.device_assert(condition, "message")')
    if not condition:
        raise CompileError(f"assertion failed: {t.evaluate(message) if message is not None else ast.unparse(test)}")


# ---- branches


def _if(t: Tracer, node: ast.If) -> None:
    condition = t.evaluate(node.test)
    if not is_device(condition):
        t.execute(node.body if condition else node.orelse)
        return
    t.at(node.test)
    then, other = t.b.new_block(), t.b.new_block()
    t.b.cond_branch(truth(t.b, settle(t, condition)).ir, then, other)
    before = t.frame.env
    edges: list[Edge] = []
    for block, body in ((then, node.body), (other, node.orelse)):
        t.b.block = block
        t.frame.env = dict(before)
        t.execute(body)
        if t.b.block is not None:
            edges.append(Edge(t.b.block, t.frame.env, body[-1] if body else node))
    t.at(node)
    t.frame.env, _ = join(t, edges)


# ---- loops


def _carried(t: Tracer, node: ast.For | ast.While, extra: Sequence[ast.AST]) -> tuple[list[str], set[str], dict[str, ast.AST]]:
    """Names the loop must carry, names it may read before writing, and all names it assigns."""
    assigned = assigned_names(node.body)
    exposed = exposed_names(node.body) | loaded_names(list(extra))
    names: list[str] = []
    for name in assigned:
        binding = t.frame.env.get(name)
        if binding is None or isinstance(binding.value, Undefined):
            continue
        if name in exposed or _live_after(t.frame, name, node):
            names.append(name)
    return names, exposed, assigned


def _live_after(frame: Frame, name: str, node: ast.stmt) -> bool:
    end = node.end_lineno or node.lineno
    return (
        any(line > end for line in frame.loads.get(name, ()))
        or any(name in loop.exposed for loop in frame.loops if not loop.unrolled)
        or any(loop.unrolled for loop in frame.loops)
    )


class Header:
    """A loop's head: one block whose arguments are the carried variables."""

    def __init__(self, t: Tracer, node: ast.For | ast.While, names: list[str], extra: list[Value]) -> None:
        self.t, self.node, self.names = t, node, []
        self.fixed: dict[str, Binding] = {}
        leaves: list[tuple[Any, Any]] = [(v.type, v) for v in extra]
        self.rebuilds: list[tuple[str, Any, int]] = []
        for name in names:
            try:
                found, rebuild = _split(t.frame.env[name].value)
            except Mismatch:
                self.fixed[name] = t.frame.env[name]
                continue
            self.rebuilds.append((name, rebuild, len(found)))
            leaves += found
            self.names.append(name)
        self.leaf_kinds = [kind for kind, _ in leaves]
        self.before = {name: t.frame.env[name] for name in self.names}
        self.block = t.b.new_block(self.leaf_kinds)
        t.b.branch(self.block, [emit_leaf(t, kind, value) for kind, value in leaves])
        t.b.block = self.block
        made = [Value(kind, argument) for kind, argument in zip(self.leaf_kinds, self.block.arguments, strict=True)]
        self.extra = made[: len(extra)]
        rest = made[len(extra) :]
        for name, rebuild, _ in self.rebuilds:
            t.frame.env[name] = Binding(rebuild(rest), self.before[name].node)

    def close(self, extra: list[Value], env: Env) -> None:
        """The back edge: from the current block, with `env`'s values."""
        t = self.t
        for name, binding in self.fixed.items():
            if not same(binding.value, env[name].value):
                self.before[name] = binding
                raise self._type_change(name, env[name])
        values: list[Any] = [v.ir for v in extra]
        position = len(extra)
        for name, _, count in self.rebuilds:
            binding = env[name]
            if isinstance(binding.value, Undefined):
                raise t.undefined(name, binding.value)
            try:
                found = [value for _, value in _split(binding.value)[0]]
                kinds = [kind for kind, _ in _split(binding.value)[0]]
                wanted = self.leaf_kinds[position : position + count]
                if len(found) != count:
                    raise Mismatch
                for kind, want, value in zip(kinds, wanted, found, strict=True):
                    values.append(_adapt(t, kind, want, value))
            except (Mismatch, CompileError):
                raise self._type_change(name, binding) from None
            position += count
        t.b.branch(self.block, values)

    def _type_change(self, name: str, binding: Binding) -> CompileError:
        t = self.t
        before = self.before[name]
        wanted = describe(before.value) if is_device(before.value) else describe_default(before.value)
        also = [(f"{name} is {wanted} before the loop", before.node), (f"{name} becomes {describe(binding.value)}", binding.node)]
        scalar = getattr(binding.value, "type", None)
        fix = f"{name} = ep.{scalar}(...) before the loop" if isinstance(scalar, ScalarType) else f"one type for {name}"
        places = tuple((label, t.frame.source.place(node)) for label, node in also if node is not None)
        return t.error(f"{name} changes its type across the loop: {wanted}, then {describe(binding.value)}", fix, places)


def describe_default(value: Any) -> str:
    return f"{default_type(value)} (from {value!r})" if is_number(value) else describe(value)


def _split(value: Any) -> tuple[list[tuple[Any, Any]], Any]:
    """A variable's leaves as (type, value), and how to put it together from device values."""
    if isinstance(value, Value):
        kind = value.type
        if isinstance(kind, PtrType):
            return [(kind, value)], lambda made: replace(made.pop(0), modulus=1)
        return [(kind, value)], lambda made: made.pop(0)
    if is_number(value):
        kind = NUMPY_NAMES.get(type(value).__name__) or default_type(value)
        if kind is None:
            raise Mismatch
        return [(kind, value)], lambda made: made.pop(0)
    if isinstance(value, StructValue):
        return _split_all(value.fields, lambda d: StructValue(value.type, d))
    if isinstance(value, tuple):
        return _split_all({str(i): v for i, v in enumerate(value)}, lambda d: tuple(d.values()))  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    if isinstance(value, ArrayValue):
        return _split_all({str(i): v for i, v in enumerate(value.elements)}, lambda d: ArrayValue(value.type, tuple(d.values())))
    if isinstance(value, PeersValue):
        return _split_all({"table": value.table, "size": value.size}, lambda d: PeersValue(value.type, d["table"], d["size"]))
    raise Mismatch


def _split_all(parts: dict[str, Any], build: Any) -> tuple[list[tuple[Any, Any]], Any]:
    leaves: list[tuple[Any, Any]] = []
    rebuilds: list[tuple[str, Any]] = []
    for name, value in parts.items():
        found, rebuild = _split(value)
        leaves += found
        rebuilds.append((name, rebuild))
    return leaves, lambda made: build({name: rebuild(made) for name, rebuild in rebuilds})


def _adapt(t: Tracer, kind: Any, want: Any, value: Any) -> Any:
    if isinstance(value, Value):
        if kind == want or (
            isinstance(kind, PtrType) and isinstance(want, PtrType) and kind.elem == want.elem and kind.space == want.space
        ):
            if isinstance(kind, PtrType) and kind.peer and not want.peer:
                raise Mismatch
            return value.ir
        raise Mismatch
    return emit_leaf(t, want, value)


def _for(t: Tracer, node: ast.For) -> None:
    if node.orelse:
        raise CompileError("for ... else does not exist in kernels", "a flag set before break")
    items = t.evaluate(node.iter)
    if isinstance(items, DeviceRange):
        _for_range(t, node, items)
        return
    if (
        isinstance(items, Unroll)
        or ((isinstance(items, tuple | list | dict) or hasattr(items, "__iter__"))
        and not isinstance(items, Device))
    ):
        _unrolled(t, node, items.items if isinstance(items, Unroll) else tuple(items))
        return
    raise CompileError(f"{describe(items)} cannot be looped over", "for i in range(...), or ep.unroll(range(n)) for a compile-time loop")


def _unrolled(t: Tracer, node: ast.For, items: Sequence[Any]) -> None:
    after: list[Edge] = []
    for item in items:
        loop = Loop(set(), unrolled=True)
        t.frame.loops.append(loop)
        assign(t, node.target, item)
        t.execute(node.body)
        t.frame.loops.pop()
        after += loop.breaks
        edges = list(loop.continues)
        if t.b.block is not None:
            edges.append(Edge(t.b.block, t.frame.env, node))
        t.at(node)
        t.frame.env, _ = join(t, edges)
        if t.b.block is None:
            break
    if after:
        if t.b.block is not None:
            after.append(Edge(t.b.block, t.frame.env, node))
        t.frame.env, _ = join(t, after)


def _range_type(t: Tracer, values: Sequence[Any]) -> ScalarType:
    kinds = [v.type for v in values if isinstance(v, Value)]
    for kind in kinds:
        if not isinstance(kind, ScalarType) or not kind.is_int:
            raise CompileError(f"range() needs integers, not {kind}", "ep.i32(...)")
    if not kinds:
        return I32 if all(I32.min <= int(v) <= I32.max for v in values) else I64
    found = kinds[0]
    for kind in kinds[1:]:
        wider = promote(found, kind)  # pyright: ignore[reportArgumentType]
        if wider is None:
            raise CompileError(f"range() mixes {found} and {kind}", "one type for start, stop and step")
        found = wider
    assert isinstance(found, ScalarType)
    if found.bits < 32:
        found = I32
    return found


def _for_range(t: Tracer, node: ast.For, span: DeviceRange) -> None:
    if not isinstance(node.target, ast.Name):
        raise CompileError("a loop over range() has one loop variable", "for i in range(...)")
    if is_number(span.step) and span.step == 0:
        raise CompileError("range() with a step of 0 never ends", "a step other than 0")
    kind = _range_type(t, [span.start, span.stop, span.step])
    start, stop, step = (convert(t.b, materialize(t.b, settle(t, v), kind), kind) for v in (span.start, span.stop, span.step))
    names, exposed, assigned = _carried(t, node, [])
    names = [n for n in names if n != node.target.id]
    downward = is_number(span.step) and span.step < 0
    header = Header(t, node, names, [start])
    counter = header.extra[0]
    if isinstance(span.step, int) and isinstance(span.start, int):
        counter.multiple = min(start.multiple, step.multiple)
    else:
        counter.multiple = min(start.multiple, step.multiple)
    inside, done = t.b.new_block(), t.b.new_block()
    t.b.cond_branch(t.b.compare(">" if downward else "<", kind, counter.ir, stop.ir), inside, done)
    leave = Edge(done, dict(t.frame.env), node)
    t.b.block = inside
    loop = Loop(exposed)
    t.frame.loops.append(loop)
    t.frame.env = dict(t.frame.env)
    t.frame.env[node.target.id] = Binding(counter, node.target)
    looks = t.looks_at_memory
    t.execute(node.body)
    t.frame.loops.pop()
    edges = list(loop.continues)
    if t.b.block is not None:
        edges.append(Edge(t.b.block, t.frame.env, node))
    t.at(node)
    env, _ = join(t, edges)
    if t.b.block is not None:
        if t.looks_at_memory > looks:
            t.b.ep("yield", (), [], site=t.site("loop", ast.unparse(node).splitlines()[0]))
        header.close([Value(kind, t.b.op("arith.addi", [t.b.type(kind)], [counter.ir, step.ir]))], env)
    _after_loop(t, node, [leave, *loop.breaks], header, {**assigned, node.target.id: node.target})


def _while(t: Tracer, node: ast.While) -> None:
    if node.orelse:
        raise CompileError("while ... else does not exist in kernels", "a flag set before break")
    names, exposed, assigned = _carried(t, node, [node.test])
    header = Header(t, node, names, [])
    looks = t.looks_at_memory
    t.frame.env = dict(t.frame.env)
    condition = t.evaluate(node.test)
    leaves: list[Edge] = []
    if is_device(condition):
        inside, done = t.b.new_block(), t.b.new_block()
        t.at(node.test)
        t.b.cond_branch(truth(t.b, settle(t, condition)).ir, inside, done)
        leaves.append(Edge(done, dict(t.frame.env), node))
        t.b.block = inside
    elif not condition:
        return
    loop = Loop(exposed)
    t.frame.loops.append(loop)
    t.execute(node.body)
    t.frame.loops.pop()
    edges = list(loop.continues)
    if t.b.block is not None:
        edges.append(Edge(t.b.block, t.frame.env, node))
    t.at(node)
    env, _ = join(t, edges)
    if t.b.block is not None:
        if t.looks_at_memory > looks:
            t.b.ep("yield", (), [], site=t.site("loop", ast.unparse(node).splitlines()[0]))
        header.close([], env)
    _after_loop(t, node, [*leaves, *loop.breaks], header, assigned)


def _after_loop(t: Tracer, node: ast.stmt, edges: list[Edge], header: Header, assigned: dict[str, ast.AST]) -> None:
    t.at(node)
    t.frame.env, _ = join(t, edges)
    for name, where in assigned.items():
        if name not in header.names and (name not in t.frame.env or not _same_binding(t, name, header)):
            t.frame.env[name] = Binding(
                Undefined(f"{name} is set only inside the loop", ((f"{name} is set here", t.frame.source.place(where)),)), None
            )


def _same_binding(t: Tracer, name: str, header: Header) -> bool:
    value = t.frame.env[name].value
    return not (is_device(value) or is_number(value)) and not isinstance(value, Undefined)
