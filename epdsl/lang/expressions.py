"""Expressions: names, attributes, operators, short circuits, displays."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from epdsl.ir.types import I1, PtrType, ScalarType, StructType

from .arithmetic import COMPARISONS, condition, invert, negate, truth
from .errors import CompileError
from .function import BoundFunc, Func
from .intrinsic import Intrinsic, Member, intrinsic
from .joins import join
from .memory import field_pointer, load_element, load_plain
from .statements import BINARY, assign, operate, settle
from .tracer import Edge, Tracer
from .values import ArrayValue, Closure, Device, PeersValue, StructElement, StructValue, Undefined, Value, describe, is_device

COMPARE = {ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="}


def evaluate(t: Tracer, node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            return lookup(t, name)
        case ast.Attribute(value=base, attr=name):
            return attribute(t, t.evaluate(base), name)
        case ast.Subscript(value=base, slice=index):
            return subscript(t, t.evaluate(base), index)
        case ast.BinOp(left=left, op=op, right=right):
            symbol = BINARY.get(type(op))
            if symbol is None:
                raise CompileError(f"{ast.unparse(node)} does not exist in kernels")
            a, b = t.evaluate(left), t.evaluate(right)
            t.at(node)
            return operate(t, symbol, a, b)
        case ast.UnaryOp(op=op, operand=operand):
            return _unary(t, op, settle(t, t.evaluate(operand)))
        case ast.BoolOp(op=op, values=values):
            return _short_circuit(t, isinstance(op, ast.And), values, node)
        case ast.Compare():
            return _compare(t, node)
        case ast.IfExp(test=test, body=body, orelse=other):
            return choose(t, t.evaluate(test), body, other, node)
        case ast.Call():
            return _call(t, node)
        case ast.Lambda():
            return Closure(node, t.frame)
        case ast.Tuple(elts=elements) | ast.List(elts=elements):
            return tuple(_elements(t, elements))
        case ast.Set(elts=elements):
            return frozenset(t.evaluate(e) for e in elements)
        case ast.Dict(keys=keys, values=values):
            return {t.evaluate(k): t.evaluate(v) for k, v in zip(keys, values, strict=True) if k is not None}
        case ast.JoinedStr(values=values):
            return "".join(str(t.evaluate(v)) for v in values)
        case ast.FormattedValue(value=value):
            found = t.evaluate(value)
            if is_device(found):
                raise CompileError(f"{ast.unparse(value)} is known only on the device", "ep.printf to print it")
            return found
        case ast.Slice(lower=lower, upper=upper, step=step):
            return slice(*(None if part is None else t.evaluate(part) for part in (lower, upper, step)))
        case ast.ListComp(elt=element, generators=generators) | ast.GeneratorExp(elt=element, generators=generators):
            return tuple(_comprehension(t, element, generators))
        case ast.NamedExpr(target=target, value=value):
            found = settle(t, t.evaluate(value))
            assign(t, target, found)
            return found
        case _:
            raise CompileError(f"{type(node).__name__} expressions do not exist in kernels")


def lookup(t: Tracer, name: str) -> Any:
    binding = t.frame.env.get(name)
    if binding is None:
        return t.frame.lookup(name)
    if isinstance(binding.value, Undefined):
        raise t.undefined(name, binding.value)
    return binding.value


def _elements(t: Tracer, nodes: list[ast.expr]) -> Iterator[Any]:
    for node in nodes:
        if isinstance(node, ast.Starred):
            yield from t.evaluate(node.value)
        else:
            yield settle(t, t.evaluate(node))


def _comprehension(t: Tracer, element: ast.expr, generators: list[ast.comprehension]) -> Iterator[Any]:
    first, rest = generators[0], generators[1:]
    items = t.evaluate(first.iter)
    items = getattr(items, "items", items) if type(items).__name__ == "Unroll" else items
    if isinstance(items, Device) or not hasattr(items, "__iter__"):
        raise CompileError("a comprehension runs while building and needs compile-time items", "ep.unroll(range(n)) with a compile-time n")
    saved = dict(t.frame.env)
    for item in items:
        assign(t, first.target, item)
        conditions = [t.evaluate(test) for test in first.ifs]
        if any(is_device(c) for c in conditions):
            raise CompileError("the condition of a comprehension must be known while building")
        if all(conditions):
            if rest:
                yield from _comprehension(t, element, rest)
            else:
                yield settle(t, t.evaluate(element))
    for name in [n for n in t.frame.env if n not in saved]:
        del t.frame.env[name]
    t.frame.env.update(saved)


# ---- attributes and subscripts


def attribute(t: Tracer, base: Any, name: str) -> Any:
    if isinstance(base, Member):
        return base.attribute(t, name)
    if isinstance(base, StructValue):
        method = getattr(base.type.cls, name, None)
        if name not in base.fields and isinstance(method, Func):
            return BoundFunc(method, base)
        if name not in base.fields:
            raise CompileError(f"{base.type} has no field {name}", f"one of {', '.join(base.fields)}")
        return base.fields[name]
    if isinstance(base, StructElement):
        pointer = field_pointer(t, base.pointer, name)
        kind = base.type.field_type(name)
        assert isinstance(pointer.type, PtrType) and kind is not None
        return pointer if pointer.type.elem != kind else _load_field(t, pointer)
    if isinstance(base, PeersValue):
        if name == "size":
            return base.size
        raise CompileError(f"{base.type} has no {name}", "peers[rank] or peers.size")
    if isinstance(base, ArrayValue):
        if name == "size":
            return base.type.n
        raise CompileError(f"{base.type} has no {name}", "array[i] or array.size")
    if isinstance(base, Value):
        if isinstance(base.type, PtrType):
            if name == "cast":
                return Bound(cast_pointer, base)
            if isinstance(base.type.elem, StructType):
                return field_pointer(t, base, name)
        if name == "type":
            return base.type
        raise CompileError(f"{describe(base)} has no attribute {name}")
    if not hasattr(base, name):
        raise CompileError(f"{type(base).__name__ if not hasattr(base, '__name__') else base.__name__} has no attribute {name}")
    return getattr(base, name)


def _load_field(t: Tracer, pointer: Value) -> Any:
    assert isinstance(pointer.type, PtrType)
    if isinstance(pointer.type.elem, StructType):
        return StructElement(pointer)
    return load_plain(t, pointer, pointer.type.elem)


class Bound:
    """An intrinsic with its first argument given: a pointer's method."""

    def __init__(self, function: Intrinsic[..., Any], first: Any) -> None:
        self.function, self.first = function, first


@intrinsic
def cast_pointer(t: Tracer, ptr: Any, kind: Any) -> Value:
    """The same address as a pointer to another type."""
    from .types import as_type

    assert isinstance(ptr, Value) and isinstance(ptr.type, PtrType)
    made = PtrType(as_type(kind), ptr.type.space, ptr.type.peer)
    return Value(made, ptr.ir, 1, ptr.root, ptr.modulus, ptr.remainder)


def subscript(t: Tracer, base: Any, node: ast.expr) -> Any:
    index = t.evaluate(node)
    if isinstance(base, PeersValue | ArrayValue) or isinstance(base, Value):
        if isinstance(base, Value) and isinstance(base.type, ScalarType):
            raise CompileError(f"{base.type} has no elements")
        return load_element(t, base, settle(t, index))
    if isinstance(base, StructValue | StructElement):
        raise CompileError(f"{base.type} has no elements", f"its fields: {', '.join(n for n, _ in base.type.fields)}")
    if is_device(index):
        if isinstance(base, tuple) and base and all(isinstance(v, Value) or isinstance(v, bool | int | float) for v in base):  # pyright: ignore[reportUnknownVariableType]
            raise CompileError("a tuple's element cannot be chosen at run time", "an ep.Array field, shared memory, or ep.select")
        raise CompileError(f"a dynamic value where a constant is needed: the index of {describe(base)}", "a compile-time index")
    return base[index]


# ---- operators


def _unary(t: Tracer, op: ast.unaryop, value: Any) -> Any:
    if not is_device(value):
        return {ast.USub: lambda: -value, ast.UAdd: lambda: +value, ast.Not: lambda: not value, ast.Invert: lambda: ~value}[type(op)]()
    if isinstance(op, ast.Not):
        return invert(t.b, truth(t.b, value))
    if not isinstance(value, Value):
        raise CompileError(f"an operator on {describe(value)}")
    return negate(t.b, value) if isinstance(op, ast.USub) else invert(t.b, value) if isinstance(op, ast.Invert) else value


def _compare(t: Tracer, node: ast.Compare) -> Any:
    left = settle(t, t.evaluate(node.left))
    if len(node.ops) == 1:
        return _compare_one(t, node.ops[0], left, settle(t, t.evaluate(node.comparators[0])), node)
    result: Any = True
    for op, comparator in zip(node.ops, node.comparators, strict=True):
        right = settle(t, t.evaluate(comparator))
        part = _compare_one(t, op, left, right, node)
        if not is_device(result):
            if not result:
                return False
            result = part
        elif not is_device(part):
            result = result if part else False
        else:
            result = Value(I1, t.b.op("arith.andi", [t.b.i1], [condition(t.b, result).ir, condition(t.b, part).ir]))
        left = right
    return result


def _compare_one(t: Tracer, op: ast.cmpop, left: Any, right: Any, node: ast.Compare) -> Any:
    match op:
        case ast.Is():
            return left is right
        case ast.IsNot():
            return left is not right
        case ast.In() | ast.NotIn():
            if is_device(left):
                if not isinstance(right, tuple):
                    raise CompileError(f"{describe(left)} in {describe(right)}", "a tuple of values")
                found: Any = False
                for each in right:  # pyright: ignore[reportUnknownVariableType]
                    hit = condition(t.b, operate(t, "==", left, each))
                    found = hit if found is False else Value(I1, t.b.op("arith.ori", [t.b.i1], [found.ir, hit.ir]))
                return found if isinstance(op, ast.In) else invert(t.b, found) if is_device(found) else not found
            return (left in right) == isinstance(op, ast.In)
        case _:
            symbol = COMPARE[type(op)]
            assert symbol in COMPARISONS
            t.at(node)
            return operate(t, symbol, left, right)


def _short_circuit(t: Tracer, both: bool, nodes: list[ast.expr], whole: ast.expr) -> Any:
    """`and` and `or`: the right side runs only where the left does not decide."""
    first = settle(t, t.evaluate(nodes[0]))
    if len(nodes) == 1:
        return first
    if not is_device(first):
        return _short_circuit(t, both, nodes[1:], whole) if bool(first) == both else first
    decided = truth(t.b, first)
    rest, known = t.b.new_block(), t.b.new_block()
    t.b.cond_branch(decided.ir, rest if both else known, known if both else rest)
    t.b.block = rest
    env = t.frame.env
    right = condition(t.b, _short_circuit(t, both, nodes[1:], whole))
    edges = [Edge(t.b.block, {}, whole, right), Edge(known, {}, whole, not both)]
    _, result = join(t, edges, with_value=True)
    t.frame.env = env
    return result


def choose(t: Tracer, test: Any, body: ast.expr, other: ast.expr, node: ast.expr) -> Any:
    """`body if test else other`."""
    test = settle(t, test)
    if not is_device(test):
        return t.evaluate(body if test else other)
    decided = truth(t.b, test)
    then, otherwise = t.b.new_block(), t.b.new_block()
    t.b.cond_branch(decided.ir, then, otherwise)
    env = t.frame.env
    edges: list[Edge] = []
    for block, expression in ((then, body), (otherwise, other)):
        t.b.block = block
        value = settle(t, t.evaluate(expression))
        edges.append(Edge(t.b.block, {}, expression, value))
    _, result = join(t, edges, with_value=True)
    t.frame.env = env
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
    t.at(node)
    if isinstance(function, Bound):
        return t.call(function.function, (function.first, *args), kwargs)
    return t.call(function, tuple(args), kwargs)
