"""Expressions: operators, short circuits, calls, displays."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator
from typing import Any

from epdsl.ir.types import I1

from .access import attribute, lookup, subscript
from .arithmetic import BINARY, COMPARE, condition, invert, negate, operate, truth
from .assignment import assign
from .elements import settle
from .errors import CompileError
from .intrinsic import BoundIntrinsic
from .joins import join
from .statements import closure
from .tracer import Edge, Tracer
from .values import Device, Value, describe, is_device


def evaluate(t: Tracer, node: ast.expr) -> Any:
    found = _EVALUATE.get(type(node))
    if found is None:
        raise CompileError("EP005", f"{type(node).__name__} expressions do not exist in kernels", "operators, calls, a if condition else b")
    return found(t, node)


def _binary(t: Tracer, node: ast.BinOp) -> Any:
    symbol = BINARY.get(type(node.op))
    if symbol is None:
        raise CompileError("EP005", f"{ast.unparse(node)} does not exist in kernels")
    return operate(t.b, symbol, settle(t, t.evaluate(node.left)), settle(t, t.evaluate(node.right)))


def _set(t: Tracer, node: ast.Set) -> frozenset[Any]:
    return frozenset(_elements(t, node.elts))


def _named(t: Tracer, node: ast.NamedExpr) -> Any:
    found = settle(t, t.evaluate(node.value))
    assign(t, node.target, found, node.value)
    return found


def _elements(t: Tracer, nodes: list[ast.expr]) -> Iterator[Any]:
    for node in nodes:
        if isinstance(node, ast.Starred):
            yield from t.evaluate(node.value)
        else:
            yield settle(t, t.evaluate(node))


def _dict(t: Tracer, keys: list[ast.expr | None], values: list[ast.expr]) -> dict[Any, Any]:
    made: dict[Any, Any] = {}
    for key, value in zip(keys, values, strict=True):
        if key is None:
            made.update(t.evaluate(value))
        else:
            made[t.evaluate(key)] = settle(t, t.evaluate(value))
    return made


def _formatted(t: Tracer, node: ast.FormattedValue) -> str:
    found = t.evaluate(node.value)
    if is_device(found):
        raise CompileError("EP012", f"{ast.unparse(node.value)} is known only on the device", "ep.printf to print it")
    convert = {-1: lambda v: v, 115: str, 114: repr, 97: ascii}[node.conversion]
    return format(convert(found), t.evaluate(node.format_spec) if node.format_spec is not None else "")


def _comprehension(t: Tracer, element: ast.expr, generators: list[ast.comprehension]) -> Iterator[Any]:
    first, rest = generators[0], generators[1:]
    items = t.evaluate(first.iter)
    items = getattr(items, "known", items)
    if isinstance(items, Device) or not hasattr(items, "__iter__"):
        t.at(first.iter)
        raise CompileError(
            "EP010", "a comprehension runs while building and needs compile-time items", "a range or tuple known while building"
        )
    saved = t.frame.env
    for item in items:
        t.frame.env = dict(saved)
        assign(t, first.target, item, first.iter)
        conditions = [t.evaluate(test) for test in first.ifs]
        if any(is_device(c) for c in conditions):
            raise CompileError("EP010", "the condition of a comprehension must be known while building")
        if all(conditions):
            if rest:
                yield from _comprehension(t, element, rest)
            else:
                yield settle(t, t.evaluate(element))
    t.frame.env = saved


# ---- operators

_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Not: operator.not_,
    ast.Invert: operator.invert,
}


def _unary(t: Tracer, op: ast.unaryop, value: Any) -> Any:
    if not is_device(value):
        return _UNARY[type(op)](value)
    match op:
        case ast.Not():
            return invert(t.b, truth(t.b, value))
        case ast.USub():
            return negate(t.b, value)
        case ast.Invert():
            return invert(t.b, value)
        case _:
            negate(t.b, value)
            return value


Later = Callable[[], Any]


def _later(t: Tracer, node: ast.expr) -> Later:
    return lambda: settle(t, t.evaluate(node))


def _compare(t: Tracer, node: ast.Compare) -> Any:
    """`a < b < c` is `a < b and b < c`, with b evaluated once and c only where the first part holds."""
    known: list[Any] = [settle(t, t.evaluate(node.left)), settle(t, t.evaluate(node.comparators[0]))]

    def part(i: int) -> Later:
        def run() -> Any:
            if i:
                known.append(settle(t, t.evaluate(node.comparators[i])))
            t.at(node)
            return _compare_one(t, node.ops[i], known[i], known[i + 1])

        return run

    return _short_circuit(t, True, [part(i) for i in range(len(node.ops))], node)


def _compare_one(t: Tracer, op: ast.cmpop, left: Any, right: Any) -> Any:
    match op:
        case ast.Is() | ast.IsNot():
            if (is_device(left) and right is not None) or (is_device(right) and left is not None):
                raise CompileError("EP012", f"{describe(left)} is {describe(right)}: values on the device have no identity", "==")
            return (left is right) == isinstance(op, ast.Is)
        case ast.In() | ast.NotIn():
            found = _contains(t, left, right)
            if isinstance(op, ast.In):
                return found
            return invert(t.b, found) if is_device(found) else not found
        case _:
            return operate(t.b, COMPARE[type(op)], left, right)


def _contains(t: Tracer, value: Any, container: Any) -> Any:
    if not is_device(value) and not is_device(container):
        return value in container
    if not isinstance(container, tuple | frozenset | range):
        raise CompileError("EP026", f"{describe(value)} in {describe(container)}", "a tuple of values")
    found: Any = False
    for each in container:  # pyright: ignore[reportUnknownVariableType]
        hit = operate(t.b, "==", value, each)
        if not is_device(hit):
            if hit:
                return True
        elif not is_device(found):
            found = hit
        else:
            found = Value(I1, t.b.op("arith.ori", [t.b.i1], [found.ir, hit.ir]))
    return found


def _short_circuit(t: Tracer, both: bool, operands: list[Later], whole: ast.expr) -> Any:
    """`and` and `or`: what follows runs only where the first does not decide."""
    first = operands[0]()
    if len(operands) == 1:
        return first
    if not is_device(first):
        return _short_circuit(t, both, operands[1:], whole) if bool(first) == both else first
    t.at(whole)
    decided = truth(t.b, first)
    rest, known = t.b.new_block(), t.b.new_block()
    t.b.cond_branch(decided.ir, rest if both else known, known if both else rest)
    t.b.block = rest
    before = t.frame.env
    t.frame.env = dict(before)
    right = condition(t.b, _short_circuit(t, both, operands[1:], whole))
    t.at(whole)
    t.frame.env, result = join(t, [Edge(t.b.block, t.frame.env, whole, right), Edge(known, before, whole, not both)], with_value=True)
    return result


def _choose(t: Tracer, test: Any, body: ast.expr, other: ast.expr) -> Any:
    """`body if test else other`."""
    if not is_device(test):
        return t.evaluate(body if test else other)
    decided = truth(t.b, test)
    then, otherwise = t.b.new_block(), t.b.new_block()
    t.b.cond_branch(decided.ir, then, otherwise)
    before = t.frame.env
    edges: list[Edge] = []
    for block, expression in ((then, body), (otherwise, other)):
        t.b.block = block
        t.frame.env = dict(before)
        value = settle(t, t.evaluate(expression))
        edges.append(Edge(t.b.block, t.frame.env, expression, value))
    t.frame.env, result = join(t, edges, with_value=True)
    return result


def _call(t: Tracer, node: ast.Call) -> Any:
    function = t.evaluate(node.func)
    args: list[Any] = []
    for argument in node.args:
        if isinstance(argument, ast.Starred):
            args += list(t.evaluate(argument.value))
        else:
            args.append(settle(t, t.evaluate(argument)))
    kwargs: dict[str, Any] = {}
    for keyword in node.keywords:
        value = settle(t, t.evaluate(keyword.value))
        if keyword.arg is None:
            kwargs.update(value)
        else:
            kwargs[keyword.arg] = value
    if isinstance(function, BoundIntrinsic):
        return t.call(function.function, (function.first, *args), kwargs)
    return t.call(function, tuple(args), kwargs)


# How each expression is evaluated.
_EVALUATE: dict[type[ast.expr], Callable[[Tracer, Any], Any]] = {
    ast.Name: lambda t, node: lookup(t, node.id),
    ast.Attribute: lambda t, node: attribute(t, t.evaluate(node.value), node.attr),
    ast.Subscript: lambda t, node: subscript(t, t.evaluate(node.value), settle(t, t.evaluate(node.slice))),
    ast.BinOp: _binary,
    ast.UnaryOp: lambda t, node: _unary(t, node.op, settle(t, t.evaluate(node.operand))),
    ast.BoolOp: lambda t, node: _short_circuit(t, isinstance(node.op, ast.And), [_later(t, v) for v in node.values], node),
    ast.Compare: _compare,
    ast.IfExp: lambda t, node: _choose(t, settle(t, t.evaluate(node.test)), node.body, node.orelse),
    ast.Call: _call,
    ast.Lambda: closure,
    ast.Tuple: lambda t, node: tuple(_elements(t, node.elts)),
    ast.List: lambda t, node: tuple(_elements(t, node.elts)),
    ast.Set: _set,
    ast.Dict: lambda t, node: _dict(t, node.keys, node.values),
    ast.JoinedStr: lambda t, node: "".join(str(t.evaluate(v)) for v in node.values),
    ast.FormattedValue: _formatted,
    ast.Slice: lambda t, node: slice(*(None if part is None else t.evaluate(part) for part in (node.lower, node.upper, node.step))),
    ast.ListComp: lambda t, node: tuple(_comprehension(t, node.elt, node.generators)),
    ast.GeneratorExp: lambda t, node: tuple(_comprehension(t, node.elt, node.generators)),
    ast.NamedExpr: _named,
}
