"""Assignment: to names, to fields and elements of what a variable holds, and to memory."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from epdsl.ir.types import PtrType, ScalarType

from .access import attribute, lookup, subscript
from .arithmetic import operate
from .elements import check_field, coerce, field_pointer, settle, store_element, with_element
from .errors import CompileError
from .tracer import Binding, Tracer
from .values import ArrayValue, StructElement, StructValue, Value, describe


@dataclass(frozen=True)
class Target:
    """Something that can be assigned to, its own expressions evaluated."""

    get: Callable[[], Any]
    set: Callable[[Any], None]


def target_of(t: Tracer, node: ast.expr) -> Target:
    match node:
        case ast.Name(id=name):
            return Target(lambda: lookup(t, name), lambda value: t.frame.env.__setitem__(name, Binding(value, node)))
        case ast.Attribute(value=base, attr=name):
            outer = target_of(t, base)
            return _field(t, node, outer, outer.get(), name)
        case ast.Subscript(value=base, slice=position):
            outer = target_of(t, base)
            holder = outer.get()
            return _element(t, node, outer, holder, settle(t, t.evaluate(position)))
        case _:
            value = t.evaluate(node)
            return Target(lambda: value, lambda _: _refuse(node))


def _refuse(node: ast.expr) -> None:
    raise CompileError(f"{ast.unparse(node)} cannot be assigned to", "a name, a struct's field or p[i]")


def _root(node: ast.expr) -> str | None:
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def _field(t: Tracer, node: ast.expr, outer: Target, holder: Any, name: str) -> Target:
    def assign_field(value: Any) -> None:
        t.at(node)
        match holder:
            case StructElement():
                kind = check_field(holder.type, name)
                made = coerce(t, value, kind, f"{holder.type}.{name}")
                at = field_pointer(t, holder.pointer, name)
                if isinstance(made, ArrayValue):
                    for i, element in enumerate(made.elements):
                        store_element(t, at, i, element)
                else:
                    store_element(t, at, 0, made)
            case StructValue():
                kind = check_field(holder.type, name)
                if t.frame.copied is not None and _root(node) == t.frame.copied:
                    raise CompileError(
                        f"{t.frame.copied} is a copy of the struct: the caller's would not change",
                        "return the new struct, or call the method on p[i]",
                    )
                outer.set(holder.with_field(name, coerce(t, value, kind, f"{holder.type}.{name}")))
            case Value(type=PtrType()):
                raise CompileError(f"{describe(holder)} has no fields that can be assigned", "p[0].field = value")
            case _:
                raise CompileError(
                    f"{describe(holder)} has no fields that can be assigned", "compile-time objects are constants inside a kernel"
                )

    return Target(lambda: attribute(t, holder, name), assign_field)


def _element(t: Tracer, node: ast.expr, outer: Target, holder: Any, position: Any) -> Target:
    def assign_element(value: Any) -> None:
        t.at(node)
        if isinstance(holder, Value) and isinstance(holder.type, ScalarType):
            raise CompileError(f"{holder.type} has no elements", "a pointer, an array or a vector")
        if isinstance(holder, ArrayValue) or (isinstance(holder, Value) and not isinstance(holder.type, PtrType)):
            outer.set(with_element(t, holder, position, value))
        else:
            store_element(t, holder, position, value)

    return Target(lambda: subscript(t, holder, position), assign_element)


def assign(t: Tracer, node: ast.expr, value: Any) -> None:
    """`node = value`."""
    match node:
        case ast.Tuple(elts=elements) | ast.List(elts=elements):
            if not isinstance(value, tuple | list) or any(isinstance(e, ast.Starred) for e in elements):
                raise CompileError(f"{describe(value)} does not unpack into {len(elements)} names", "a tuple of as many values")
            if len(value) != len(elements):  # pyright: ignore[reportUnknownArgumentType]
                raise CompileError(f"{len(value)} values do not unpack into {len(elements)} names", "a tuple of as many values")  # pyright: ignore[reportUnknownArgumentType]
            for element, each in zip(elements, value, strict=True):  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
                assign(t, element, each)
        case _:
            target_of(t, node).set(value)


def augment(t: Tracer, node: ast.expr, symbol: str, value: ast.expr) -> None:
    """`node symbol= value`: the target's own expressions are evaluated once."""
    whole = t.node
    target = target_of(t, node)
    old = settle(t, target.get())
    added = settle(t, t.evaluate(value))
    if whole is not None:
        t.at(whole)
    target.set(operate(t.b, symbol, old, added))
