"""Where control flow meets: which variables differ, and the block arguments that carry them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from epdsl.ir.types import PtrType, ScalarType, Type, VecType, accepts

from .arithmetic import compile_time_type, constant
from .errors import CompileError, Place
from .tracer import Binding, Edge, Env, Tracer
from .values import ArrayValue, PeersValue, StructElement, StructValue, Undefined, Value, describe, is_number

Leaf = Value | bool | int | float
Rebuild = Callable[[list[Value]], Any]


class Mismatch(Exception):
    """Two values that one variable cannot hold."""


def same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if isinstance(a, Value) or isinstance(b, Value):
        return isinstance(a, Value) and isinstance(b, Value) and a.ir == b.ir and a.type == b.type
    if type(a) is not type(b):
        return False
    if isinstance(a, StructValue):
        return a.type == b.type and all(same(a.fields[k], b.fields[k]) for k in a.fields)
    if isinstance(a, tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    if isinstance(a, ArrayValue | PeersValue | StructElement):
        return False
    try:
        return bool(a == b)
    except Exception:
        return False


def unify(values: Sequence[Any]) -> tuple[list[tuple[ScalarType | VecType | PtrType, list[Leaf]]], Rebuild]:
    """The leaves one variable is carried as, with every path's value of each, and how to put it together again.

    Raises Mismatch when the values have no common shape.
    """
    first = values[0]
    if all(same(first, v) for v in values[1:]):
        return [], lambda _: first
    if all(isinstance(v, Value) or is_number(v) for v in values):
        kind = _leaf_type(values)
        multiple = min((v.multiple for v in values if isinstance(v, Value)), default=1)
        pointers = [v for v in values if isinstance(v, Value) and isinstance(v.type, PtrType)]

        def leaf(made: list[Value]) -> Value:
            value = made.pop(0)
            if pointers:
                agree = all(
                    p.root == pointers[0].root and p.modulus == pointers[0].modulus and p.remainder == pointers[0].remainder
                    for p in pointers
                )
                p = pointers[0]
                return replace(value, root=p.root, modulus=p.modulus, remainder=p.remainder) if agree else replace(value, modulus=1)
            return replace(value, multiple=multiple if len(values) == sum(isinstance(v, Value) for v in values) else 1)

        return [(kind, list(values))], leaf
    shapes = {type(v) for v in values}
    if len(shapes) == 1:
        if isinstance(first, StructValue) and all(v.type == first.type for v in values):
            return _children([(name, [v.fields[name] for v in values]) for name in first.fields], lambda d: StructValue(first.type, d))
        if isinstance(first, tuple) and all(len(v) == len(first) for v in values):  # pyright: ignore[reportUnknownArgumentType]
            return _children([(str(i), [v[i] for v in values]) for i in range(len(first))], lambda d: tuple(d.values()))  # pyright: ignore[reportUnknownArgumentType]
        if isinstance(first, ArrayValue) and all(v.type == first.type for v in values):
            pairs = [(str(i), [v.elements[i] for v in values]) for i in range(first.type.n)]
            return _children(pairs, lambda d: ArrayValue(first.type, tuple(d.values())))
        if isinstance(first, PeersValue) and all(v.type == first.type for v in values):
            pairs = [("table", [v.table for v in values]), ("size", [v.size for v in values])]
            return _children(pairs, lambda d: PeersValue(first.type, d["table"], d["size"]))
    raise Mismatch(" and ".join(dict.fromkeys(describe(v) for v in values)))


def _children(pairs: list[tuple[str, list[Any]]], build: Callable[[dict[str, Any]], Any]) -> tuple[Any, Rebuild]:
    leaves: list[Any] = []
    rebuilds: list[tuple[str, Rebuild]] = []
    for name, values in pairs:
        found, rebuild = unify(values)
        leaves += found
        rebuilds.append((name, rebuild))
    return leaves, lambda made: build({name: rebuild(made) for name, rebuild in rebuilds})


def _leaf_type(values: Sequence[Any]) -> ScalarType | VecType | PtrType:
    kinds: list[Any] = list(dict.fromkeys(v.type for v in values if isinstance(v, Value)))
    if not kinds:
        kinds = list(dict.fromkeys(compile_time_type(v) for v in values))
        if len(kinds) > 1 and all(isinstance(k, ScalarType) and k.is_int for k in kinds):
            kinds = [max(kinds, key=lambda k: k.bits)]
    if len(kinds) > 1 and all(isinstance(k, PtrType) for k in kinds) and len({(k.elem, k.space) for k in kinds}) == 1:
        return replace(kinds[0], peer=True)
    if len(kinds) != 1 or kinds[0] is None:
        raise Mismatch(" and ".join(dict.fromkeys(describe(v) for v in values)))
    kind = kinds[0]
    for v in values:
        if not isinstance(v, Value):
            number = v.item() if hasattr(v, "item") else v
            if not isinstance(kind, ScalarType) or not accepts(kind, number):
                raise Mismatch(f"{kind} and {describe(v)}")
    return kind


def emit_leaf(t: Tracer, kind: Type, value: Leaf) -> Any:
    if isinstance(value, Value):
        return value.ir
    assert isinstance(kind, ScalarType)
    return constant(t.b, kind, value).ir


def join(t: Tracer, edges: list[Edge], with_value: bool = False) -> tuple[Env, Any]:
    """Makes one block where all `edges` meet and goes on there.

    Returns the variables there and, with `with_value`, the value the edges bring. With no edge nothing is reachable.
    """
    if not edges:
        t.b.block = None
        return {}, None
    if len(edges) == 1:
        t.b.block = edges[0].block
        return edges[0].env, edges[0].value
    env: Env = {}
    carried: list[tuple[Any, list[Leaf]]] = []
    rebuilds: list[tuple[str, Rebuild]] = []
    names = dict.fromkeys(name for edge in edges for name in edge.env)
    first, *others = [edge.env for edge in edges]
    for name in names:
        binding = first.get(name)
        if binding is not None and all(other.get(name) is binding for other in others):
            env[name] = binding
            continue
        bindings = [edge.env.get(name) for edge in edges]
        present = [x for x in bindings if x is not None]
        hidden = next((x.value for x in present if isinstance(x.value, Undefined)), None)
        if hidden is not None:
            env[name] = Binding(hidden, None)
        elif len(present) < len(edges):
            env[name] = Binding(_missing(t, name, present, edges), None)
        else:
            try:
                leaves, rebuild = unify([x.value for x in present])
            except Mismatch as problem:
                env[name] = Binding(_changed(t, name, present, problem), None)
                continue
            if not leaves and rebuild([]) is present[0].value:
                env[name] = present[0]
                continue
            carried += leaves
            rebuilds.append((name, rebuild))
            env[name] = present[-1]
    result: Rebuild | None = None
    if with_value:
        try:
            leaves, result = unify([edge.value for edge in edges])
        except Mismatch as problem:
            also = tuple((describe(e.value), t.frame.source.place(e.node)) for e in edges if e.node is not None)
            raise CompileError("EP003", f"the paths that meet here bring {problem}", "the same type on every path", also) from None
        carried += leaves
    block = t.b.new_block([kind for kind, _ in carried])
    for index, edge in enumerate(edges):
        t.b.block = edge.block
        t.b.branch(block, [emit_leaf(t, kind, values[index]) for kind, values in carried])
    t.b.block = block
    made = [Value(kind, argument) for (kind, _), argument in zip(carried, block.arguments, strict=True)]
    for name, rebuild in rebuilds:
        env[name] = Binding(rebuild(made), env[name].node)
        t.named(name, env[name].value)
    return env, result(made) if result else None


def _places(t: Tracer, bindings: Sequence[Binding], label: Callable[[Any], str]) -> tuple[tuple[str, Place], ...]:
    return tuple((label(x.value), t.frame.source.place(x.node)) for x in bindings if x.node is not None)


def _missing(t: Tracer, name: str, present: Sequence[Binding], edges: Sequence[Edge]) -> Undefined:
    return Undefined(
        "EP001",
        f"{name} is not defined on every path that leads here",
        _places(t, present, lambda _: f"{name} is set only on the path through"),
    )


def _changed(t: Tracer, name: str, present: Sequence[Binding], problem: Mismatch) -> Undefined:
    return Undefined(
        "EP003",
        f"{name} has no single type here: {problem}",
        _places(t, present, lambda v: f"{name} is {describe(v)}"),
        f"one type for {name} on every path",
    )
