"""Assignment: to names, to fields and elements of what a variable holds, and to memory."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from epdsl.ir.types import PtrType, ScalarType, Type

from .access import attribute, lookup, subscript
from .arithmetic import operate
from .elements import as_pointer, check_field, coerce, field_pointer, settle, store_element, with_element
from .errors import CompileError
from .tracer import Binding, Tracer
from .values import ArrayValue, StructElement, StructValue, Value, describe


@dataclass(frozen=True)
class Target:
    """Something that can be assigned to, its own expressions evaluated.

    set  takes the value and the node that gave it, where errors about the value are shown
    """

    get: Callable[[], Any]
    set: Callable[[Any, ast.expr], None]


def target_of(t: Tracer, node: ast.expr) -> Target:
    match node:
        case ast.Name(id=name):
            return Target(lambda: lookup(t, name), lambda value, _: _bind(t, node, value))
        case ast.Attribute(value=base, attr=name):
            outer = target_of(t, base)
            return _field(t, node, outer, outer.get(), name)
        case ast.Subscript(value=base, slice=position):
            outer = target_of(t, base)
            return _element(t, node, outer, outer.get(), settle(t, t.evaluate(position)))
        case _:
            value = t.evaluate(node)
            return Target(lambda: value, lambda _, __: _refuse(node))


def _bind(t: Tracer, node: ast.Name, value: Any) -> None:
    t.frame.env[node.id] = Binding(value, node)
    t.named(node.id, value)


def _refuse(node: ast.expr) -> None:
    raise CompileError("EP007", f"{ast.unparse(node)} cannot be assigned to", "a name, a struct's field or p[i]")


def _root(node: ast.expr) -> str | None:
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def _coerced(t: Tracer, value: Any, kind: Type, what: str, source: ast.expr, node: ast.expr) -> Any:
    """The value as the target's type; an error is shown under the value."""
    t.at(source)
    made = coerce(t, value, kind, what)
    t.at(node)
    return made


def _field(t: Tracer, node: ast.expr, outer: Target, holder: Any, name: str) -> Target:
    def assign_field(value: Any, source: ast.expr) -> None:
        t.at(node)
        if not isinstance(holder, StructElement | StructValue):
            is_pointer = isinstance(holder, Value) and isinstance(holder.type, PtrType)
            fix = "p[0].field = value" if is_pointer else "compile-time objects are constants inside a kernel"
            raise CompileError("EP007", f"{describe(holder)} has no fields that can be assigned", fix)
        if isinstance(holder, StructValue) and t.frame.copied is not None and _root(node) == t.frame.copied:
            raise CompileError(
                "EP007",
                f"{t.frame.copied} is a copy of the struct: the caller's would not change",
                "return the new struct, or call the method on p[i]",
            )
        made = _coerced(t, value, check_field(holder.type, name), f"{holder.type}.{name}", source, node)
        if isinstance(holder, StructValue):
            outer.set(holder.with_field(name, made), source)
            return
        at = field_pointer(t, holder.pointer, name)
        for i, element in enumerate(made.elements if isinstance(made, ArrayValue) else [made]):
            store_element(t, at, i, element)

    return Target(lambda: attribute(t, holder, name), assign_field)


def _element(t: Tracer, node: ast.expr, outer: Target, holder: Any, position: Any) -> Target:
    def assign_element(value: Any, source: ast.expr) -> None:
        t.at(node)
        kind = holder.type if isinstance(holder, ArrayValue | Value) else None
        if isinstance(kind, ScalarType):
            raise CompileError("EP031", f"{kind} has no elements", "a pointer, an array or a vector")
        if kind is None:
            as_pointer(holder, "[...] = ...")
        else:
            made = _coerced(t, value, kind.elem, f"an element of {kind}", source, node)
            if isinstance(kind, PtrType):
                store_element(t, holder, position, made)
            else:
                outer.set(with_element(t, holder, position, made), source)

    return Target(lambda: subscript(t, holder, position), assign_element)


def assign(t: Tracer, node: ast.expr, value: Any, source: ast.expr) -> None:
    """`node = value`, which `source` gave."""
    match node:
        case ast.Tuple(elts=elements) | ast.List(elts=elements):
            t.at(source)
            if not isinstance(value, tuple | list) or any(isinstance(e, ast.Starred) for e in elements):
                raise CompileError("EP009", f"{describe(value)} does not unpack into {len(elements)} names", "a tuple of as many values")
            if len(value) != len(elements):  # pyright: ignore[reportUnknownArgumentType]
                raise CompileError("EP009", f"{len(value)} values do not unpack into {len(elements)} names", "a tuple of as many values")  # pyright: ignore[reportUnknownArgumentType]
            parts = source.elts if isinstance(source, ast.Tuple) and len(source.elts) == len(elements) else [source] * len(elements)
            for element, each, part in zip(elements, value, parts, strict=True):  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
                assign(t, element, each, part)
        case _:
            target_of(t, node).set(value, source)


def augment(t: Tracer, node: ast.expr, symbol: str, value: ast.expr) -> None:
    """`node symbol= value`: the target's own expressions are evaluated once."""
    whole = t.node
    target = target_of(t, node)
    old = settle(t, target.get())
    added = settle(t, t.evaluate(value))
    if whole is not None:
        t.at(whole)
    target.set(operate(t.b, symbol, old, added), value)
