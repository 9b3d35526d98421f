"""Statements of a kernel."""

from __future__ import annotations

import ast
from dataclasses import replace
from typing import Any

from .arithmetic import BINARY, truth
from .assignment import assign, augment
from .elements import coerce, settle
from .errors import CompileError
from .joins import join
from .loops import for_loop, while_loop
from .stops import stop_at_line
from .tracer import Binding, Edge, Loop, Tracer
from .types import as_type
from .values import Closure, describe, is_device


def execute_one(t: Tracer, node: ast.stmt) -> None:
    t.at(node)
    if t.stops_at_lines:
        stop_at_line(t, node)
    match node:
        case ast.Expr(value=ast.Constant()) | ast.Pass():
            pass
        case ast.Expr(value=value):
            t.evaluate(value)
        case ast.Assign(targets=targets, value=value):
            result = settle(t, t.evaluate(value))
            for target in targets:
                assign(t, target, result, value)
        case ast.AnnAssign():
            _declare(t, node)
        case ast.AugAssign(target=target, op=op, value=value):
            symbol = BINARY.get(type(op))
            if symbol is None:
                raise CompileError("EP005", "this augmented assignment does not exist in kernels", "name = name + value")
            augment(t, target, symbol, value)
        case ast.If():
            _if(t, node)
        case ast.For():
            for_loop(t, node)
        case ast.While():
            while_loop(t, node)
        case ast.Return():
            _return(t, node)
        case ast.Break():
            _loop_of(t, "break").breaks.append(Edge(t.b.block, dict(t.frame.env), node))
            t.b.block = None
        case ast.Continue():
            _loop_of(t, "continue").continues.append(Edge(t.b.block, dict(t.frame.env), node))
            t.b.block = None
        case ast.Assert(test=test, msg=message):
            _assert(t, test, message)
        case ast.FunctionDef():
            t.frame.env[node.name] = Binding(closure(t, node), node)
        case ast.Raise(exc=exc):
            text = t.evaluate(exc) if exc is not None else "raise"
            raise CompileError("EP018", f"the kernel refuses this configuration: {text}")
        case _:
            raise CompileError(
                "EP005",
                f"{ast.unparse(node).split(maxsplit=1)[0].rstrip(':')} statements do not exist in kernels",
                "if, for ... in range(...), while, assignments and calls",
            )


def closure(t: Tracer, node: ast.FunctionDef | ast.Lambda) -> Closure:
    """A lambda or nested function with its defaults, which are evaluated where it is written."""
    a = node.args
    if a.vararg is not None or a.kwarg is not None:
        raise CompileError("EP005", "a function inside a kernel takes named arguments only", "def name(a, b): ...")
    positional = [*a.posonlyargs, *a.args]
    defaults = {p.arg: d for p, d in zip(reversed(positional), reversed(a.defaults), strict=False)}
    defaults |= {p.arg: d for p, d in zip(a.kwonlyargs, a.kw_defaults, strict=True) if d is not None}
    outer = t.frame.source
    source = replace(outer, name=f"{outer.name}.{node.name}") if isinstance(node, ast.FunctionDef) else outer
    return Closure(node, t.frame, source, {name: settle(t, t.evaluate(d)) for name, d in defaults.items()})


def _declare(t: Tracer, node: ast.AnnAssign) -> None:
    """`name: T = value`: the value has that type."""
    if node.value is None:
        raise CompileError("EP005", "a declaration without a value does nothing here", "name: T = value")
    result = settle(t, t.evaluate(node.value))
    t.annotated.update(n.id for n in ast.walk(node.annotation) if isinstance(n, ast.Name))
    declared = t.evaluate(node.annotation)
    if hasattr(declared, "type"):
        result = coerce(t, result, as_type(declared), ast.unparse(node.target))
    elif is_device(result) and declared in (int, float, bool, str):
        raise CompileError(
            "EP028",
            f"{ast.unparse(node.target)} is declared {declared.__name__}, not {describe(result)}",
            f"{ast.unparse(node.target)}: ep.i32",
        )
    assign(t, node.target, result, node.value)


def _return(t: Tracer, node: ast.Return) -> None:
    result: Any = None
    if node.value is not None:
        result = settle(t, t.evaluate(node.value))
        if t.frame.result is not None:
            t.at(node.value)
            result = coerce(t, result, t.frame.result, f"the result of {t.frame.source.name}")
    t.frame.returns.append(Edge(t.b.block, {}, node, result))
    t.b.block = None


def _loop_of(t: Tracer, word: str) -> Loop:
    if not t.frame.loops:
        raise CompileError("EP005", f"{word} outside a loop")
    return t.frame.loops[-1]


def _assert(t: Tracer, test: ast.expr, message: ast.expr | None) -> None:
    condition = t.evaluate(test)
    if is_device(condition):
        raise CompileError("EP010", "assert needs a compile-time condition", 'ep.device_assert(condition, "message")')
    if not condition:
        raise CompileError("EP018", f"assertion failed: {t.evaluate(message) if message is not None else ast.unparse(test)}")


def _if(t: Tracer, node: ast.If) -> None:
    condition = settle(t, t.evaluate(node.test))
    if not is_device(condition):
        t.execute(node.body if condition else node.orelse)
        return
    t.at(node.test)
    then, other = t.b.new_block(), t.b.new_block()
    t.b.cond_branch(truth(t.b, condition).ir, then, other)
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
