"""Where a debugger may stop a kernel on the simulator: at `breakpoint()`, and then at every line of a kernel that has one."""

from __future__ import annotations

import ast
import dataclasses
import json
from pathlib import Path
from typing import Any

from epdsl.ir.types import PtrType, ScalarType, VecType

from .errors import CompileError
from .tracer import Binding, Env, Frame, Tracer
from .values import ArrayValue, Closure, PeersValue, StructElement, StructValue, Undefined, Value

# Lines of the language's own library are not a kernel's.
_LIBRARY = tuple(str(Path(__file__).parent.parent / part) for part in ("lang", "sim"))
_LITERAL = (bool, int, float, str)
_DEEPEST = 4


def stop_here(t: Tracer, *args: Any, **kwargs: Any) -> None:
    """`breakpoint()` in a kernel. Raises CompileError for a GPU."""
    if args or kwargs:
        raise CompileError("EP073", "breakpoint() takes no arguments in a kernel", "breakpoint()")
    if not t.target.simulated:
        raise CompileError(
            "EP073",
            f"breakpoint() stops a kernel on the simulator only, and this one is compiled for {t.target.name}",
            'device="sim", or if ep.target.simulated: breakpoint()',
        )
    t.breakpoints += 1
    _stop(t, "breakpoint")


def stop_at_line(t: Tracer, node: ast.stmt) -> None:
    """A place before a statement where a thread that is stepped stops."""
    silent = isinstance(node, ast.Pass | ast.FunctionDef) or (
        isinstance(node, ast.Expr) and (isinstance(node.value, ast.Constant) or _is_breakpoint(node.value))
    )
    if not silent and not t.frame.source.file.startswith(_LIBRARY):
        _stop(t, "line")


def _is_breakpoint(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "breakpoint"


def forget_stale(env: Env, assigned: Any, carried: Any) -> None:
    """Takes away what variables were before a loop that binds them in each turn before it reads them."""
    for name in assigned:
        if name not in carried:
            env.pop(name, None)


def _stop(t: Tracer, kind: str) -> None:
    values: list[Any] = []
    frames: list[dict[str, Any]] = []
    frame: Frame | None
    frame, node = t.frame, t.node
    while frame is not None:
        place = frame.source.place(node or frame.source.node)
        found = {name: shape for name, bound in frame.env.items() if (shape := _shape(values, bound)) is not None}
        frames.append({"file": place.file, "line": place.line, "function": place.function, "variables": found})
        node, frame = frame.call_node, frame.parent
    for slot, value in enumerate(values):
        t.b.ep("debug_value", (), [value], slot=slot)
    scope = json.dumps({"slots": len(values), "frames": frames[::-1]})
    t.b.ep("breakpoint", (), [], kind=kind, site=t.site(kind, t.place().text.strip(), scope=scope))


def _shape(values: list[Any], bound: Binding) -> Any:
    return shape_of(values, bound.value, 0)


def shape_of(values: list[Any], value: Any, depth: int) -> Any:
    """How a debugger puts a variable together, from slots that `values` is extended with. None for what it does not show.

    A shape is ["constant", value], ["scalar", dtype, slot], ["vec", dtype, slot, n], ["ptr", element, slot, bytes of an element],
    ["peers", element, slot, bytes of an element, slot of the size], ["struct", name, {field: shape}] or ["list", [shape, ...]].
    """

    def slot(each: Value) -> int:
        values.append(each.ir)
        return len(values) - 1

    def members(found: dict[str, Any]) -> dict[str, Any]:
        return {name: shape for name, each in found.items() if (shape := shape_of(values, each, depth + 1)) is not None}

    match value:
        case Undefined() | Closure():
            return None
        case Value(type=ScalarType() as kind):
            return ["scalar", kind.name, slot(value)]
        case Value(type=VecType() as kind):
            return ["vec", kind.elem.name, slot(value), kind.n]
        case Value(type=PtrType() as kind):
            return ["ptr", str(kind.elem), slot(value), kind.elem.nbytes]
        case StructElement(pointer=pointer):
            return shape_of(values, pointer, depth)
        case PeersValue(type=kind, table=table, size=size):
            return ["peers", str(kind.elem), slot(table), kind.elem.nbytes, slot(size)]
        case StructValue(type=kind, fields=fields):
            return ["struct", kind.name, members(fields)]
        case ArrayValue(elements=elements):
            return ["list", [shape_of(values, each, depth + 1) for each in elements]]
        case tuple() | list():
            shapes = [shape_of(values, each, depth + 1) for each in value] if depth < _DEEPEST else [None]  # pyright: ignore[reportUnknownVariableType]
            return None if None in shapes else ["list", shapes]
        case _ if value is None or isinstance(value, _LITERAL):
            return ["constant", value]
        case _ if hasattr(value, "item") and getattr(value, "shape", None) == ():
            return ["constant", value.item()]
        case _ if dataclasses.is_dataclass(value) and not isinstance(value, type) and depth < _DEEPEST:
            return ["struct", type(value).__name__, members({f.name: getattr(value, f.name) for f in dataclasses.fields(value)})]
        case _:
            return None
