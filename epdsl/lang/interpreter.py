"""Interprets a kernel's syntax tree and builds its IR."""

from __future__ import annotations

import ast
import builtins
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from epdsl.ir.types import F32, SMALL_FLOATS, ScalarType, StructType, VecType

from . import context, expressions, library, statements
from .arithmetic import convert, materialize
from .errors import CompileError
from .function import BoundFunc, Func
from .intrinsic import Intrinsic
from .joins import join
from .memory import coerce, make_vector
from .source import Source, source_of
from .statements import DeviceRange, Unroll
from .threads import extreme
from .tracer import Binding, Edge, Env, Frame, Tracer
from .types import as_type, resolve_annotations
from .values import ArrayValue, Closure, StructValue, Value, describe, is_device, is_number

_SAFE_ON_DEVICE = (isinstance, len, type, tuple, list, zip, enumerate, reversed)


class Interpreter(Tracer):
    """One run over one kernel."""

    def evaluate(self, node: ast.expr) -> Any:
        saved = self.node
        self.at(node)
        result = self._located(lambda: expressions.evaluate(self, node))
        if saved is not None:
            self.at(saved)
        return result

    def execute(self, statements_: Sequence[ast.stmt]) -> None:
        for statement in statements_:
            if self.b.block is None:
                return
            self._located(lambda s=statement: statements.execute_one(self, s))

    def _located(self, run: Callable[[], Any]) -> Any:
        try:
            return run()
        except CompileError as error:
            raise error.at(self.places()) from None
        except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, NotImplementedError) as error:
            if getattr(error, "__epdsl_internal__", False):
                raise
            frames = inspect.trace()
            if (
                (frames
                and "/epdsl/lang/" in frames[-1].filename.replace("\\", "/"))
                or "/epdsl/ir/" in frames[-1].filename.replace("\\", "/")
            ):
                error.__epdsl_internal__ = True  # pyright: ignore[reportAttributeAccessIssue]
                error.add_note(f"while building:\n{self.place().render()}")
                raise
            raise CompileError(f"{type(error).__name__}: {error}").at(self.places()) from error

    # ---- calls

    def call(self, function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        args = tuple(args)
        match function:
            case Intrinsic():
                return function.emit(self, args, kwargs)
            case Func():
                return self.inline(function.function, args, kwargs)
            case BoundFunc(func=inner, instance=instance):
                return self.inline(inner.function, (instance, *args), kwargs)
            case Closure():
                return self._closure(function, args, kwargs)
            case _:
                pass
        kind = getattr(function, "type", None)
        if isinstance(kind, ScalarType | VecType | StructType) and not isinstance(function, Value):
            return self._construct(kind, function, args, kwargs)
        if function is range:
            return self._range(args)
        if function is Unroll:
            if any(is_device(v) for v in args):
                raise CompileError(
                    "ep.unroll needs a compile-time range: a dynamic value where a constant is needed", "a plain loop: for i in range(...)"
                )
            (items,) = args
            if isinstance(items, DeviceRange):
                bounds = (items.start, items.stop, items.step)
                if any(is_device(v) for v in bounds):
                    raise CompileError(
                        "ep.unroll needs a compile-time range: a dynamic value where a constant is needed",
                        "a plain loop: for i in range(...)",
                    )
                return Unroll(range(*(int(v) for v in bounds)))
            return Unroll(items)
        return self._python(function, args, kwargs)

    def _python(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of an ordinary Python callable, which runs now."""
        args = tuple(self._plain_range(v) for v in args)
        on_device = any(is_device(v) for v in (*args, *kwargs.values()))
        if on_device:
            if function is min or function is max:
                return extreme(self, "<" if function is min else ">", args)
            if function is abs:
                value = args[0]
                if isinstance(value, Value) and isinstance(value.type, ScalarType) and value.type.is_float:
                    return self.call(library.float_abs, (value,), {})
                return extreme(self, ">", (value, self.call(library.negated, (value,), {})))
            if function is sum:
                total: Any = 0
                for value in args[0]:
                    total = statements.operate(self, "+", total, value)
                return total
            if function in (int, float, bool):
                raise CompileError(
                    f"a dynamic value where a constant is needed: {function.__name__}() of {describe(args[0])}",
                    {int: "ep.i32(x)", float: "ep.f32(x)", bool: "a comparison"}[function],
                )
            if function is print:
                raise CompileError("print() runs while building and cannot show a device value", 'ep.printf("{}", x)')
            if function not in _SAFE_ON_DEVICE and not isinstance(function, type):
                name = getattr(function, "__qualname__", repr(function))
                raise CompileError(
                    f"{name} is an ordinary Python function and is given device values", f"@ep.func above def {name.split('.')[-1]}"
                )
        if function is list:
            function = tuple
        if function is reversed:
            return tuple(reversed(args[0]))
        return function(*args, **kwargs)

    def _plain_range(self, value: Any) -> Any:
        if isinstance(value, DeviceRange) and not any(is_device(v) for v in (value.start, value.stop, value.step)):
            return range(value.start, value.stop, value.step)
        return value

    def _range(self, args: tuple[Any, ...]) -> DeviceRange:
        for value in args:
            if not is_device(value) and (not is_number(value) or isinstance(value, float)):
                raise CompileError(f"range() needs integers, not {describe(value)}")
        match args:
            case (stop,):
                return DeviceRange(0, stop, 1)
            case (start, stop):
                return DeviceRange(start, stop, 1)
            case (start, stop, step):
                return DeviceRange(start, stop, step)
            case _:
                raise CompileError(f"range() takes 1 to 3 arguments, not {len(args)}")

    def _construct(self, kind: ScalarType | VecType | StructType, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if isinstance(kind, ScalarType):
            if len(args) != 1 or kwargs:
                raise CompileError(f"ep.{kind} converts one value, not {len(args)}", f"ep.{kind}(x)")
            return self._scalar(kind, args[0])
        if isinstance(kind, VecType):
            return make_vector(self, kind, args)
        names = [name for name, _ in kind.fields]
        defaults = {
            n: f.default
            for n, f in function.__dataclass_fields__.items()
            if f.default is not inspect.Parameter.empty and not _missing(f.default)
        }
        if len(args) > len(names):
            raise CompileError(f"{kind} has {len(names)} fields, not {len(args)}", f"{kind}({', '.join(names)})")
        given = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
        absent = [n for n in names if n not in given]
        unknown = [n for n in given if n not in names]
        if absent or unknown:
            raise CompileError(f"{kind}: missing {absent}, unknown {unknown}", f"{kind}({', '.join(names)})")
        fields: dict[str, Any] = {}
        for name, field in kind.fields:
            value = given[name]
            if isinstance(value, tuple) and hasattr(field, "n"):
                elements = tuple(coerce(self, v, field.elem, f"{kind}.{name}") for v in value)  # pyright: ignore[reportAttributeAccessIssue]
                if len(elements) != field.n:  # pyright: ignore[reportAttributeAccessIssue]
                    raise CompileError(f"{kind}.{name} takes {field.n} values, not {len(elements)}")  # pyright: ignore[reportAttributeAccessIssue]
                value = ArrayValue(field, elements)  # pyright: ignore[reportArgumentType]
            fields[name] = coerce(self, value, field, f"{kind}.{name}")
        return StructValue(kind, fields)

    def _scalar(self, kind: ScalarType, value: Any) -> Value:
        if is_number(value):
            number = value.item() if hasattr(value, "item") else value
            if kind in SMALL_FLOATS:
                return self._scalar(kind, materialize(self.b, float(number)))
            if kind.is_int and isinstance(number, float):
                number = int(number)
            if kind.kind == "b":
                number = bool(number)
            return materialize(self.b, number, kind)
        if not isinstance(value, Value):
            raise CompileError(f"{describe(value)} does not convert to {kind}")
        if value.type == kind:
            return value
        if kind in SMALL_FLOATS:
            single = value if value.type == F32 else convert(self.b, value, F32)
            return self.call(library.TO_SMALL[kind.name], (single,), {})
        if value.type in SMALL_FLOATS:
            return self._scalar(kind, self.call(library.FROM_SMALL[value.type.name], (value,), {}))
        return convert(self.b, value, kind)

    # ---- functions

    def inline(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Interprets a function's body in place of a call. Raises CompileError for recursion and bad arguments."""
        outer: Frame | None = self.frame
        while outer is not None:
            if outer.code is function.__code__:
                raise CompileError(f"{function.__qualname__} calls itself: recursion does not exist on the device", "a loop")
            outer = outer.parent
        try:
            bound = inspect.signature(function).bind(*args, **kwargs)
        except TypeError as error:
            raise CompileError(f"{function.__qualname__}: {error}", f"{function.__name__}{inspect.signature(function)}") from None
        bound.apply_defaults()
        source = source_of(function)
        frame = Frame(source, lookup_in(function), {}, self.frame, self.node, function.__code__, _loads(source))
        annotations = resolve_annotations(function, {n: a for n, a in function.__annotations__.items() if n != "return"})
        for name, value in bound.arguments.items():
            frame.env[name] = Binding(self._argument(function, name, annotations.get(name), value), self.node)
        return self._run(frame, source.node.body)  # pyright: ignore[reportArgumentType]

    def _argument(self, function: Callable[..., Any], name: str, annotation: Any, value: Any) -> Any:
        kind = getattr(annotation, "type", None)
        if not isinstance(kind, ScalarType | VecType | StructType) and not hasattr(kind, "elem"):
            return value
        return coerce(self, value, as_type(annotation), f"{function.__qualname__}'s {name}")

    def _run(self, frame: Frame, body: Sequence[ast.stmt]) -> Any:
        saved_frame, saved_node = self.frame, self.node
        self.frame = frame
        try:
            self.execute(body)
            edges = list(frame.returns)
            if self.b.block is not None:
                edges.append(Edge(self.b.block, {}, None, None))
            if any(e.value is None for e in edges) and any(e.value is not None for e in edges):
                gives = next(e for e in edges if e.value is not None)
                raise self.error(
                    f"{frame.source.name} returns {describe(gives.value)} on one path and nothing on another",
                    "a return with a value on every path",
                    (("returns a value", frame.source.place(gives.node or frame.source.node)),),
                )
            _, result = join(self, edges, with_value=True)
            return result
        finally:
            self.forget(frame)
            self.frame, self.node = saved_frame, saved_node
            if self.node is not None and self.b.block is not None:
                self.at(self.node)

    def _closure(self, closure: Closure, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        node = closure.node
        names = [a.arg for a in node.args.args]
        if len(args) + len(kwargs) != len(names):
            raise CompileError(f"{ast.unparse(node)} takes {len(names)} arguments, not {len(args) + len(kwargs)}")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        outer: Frame = closure.frame
        env: Env = {**outer.env, **{name: Binding(value, self.node) for name, value in given.items()}}
        frame = Frame(outer.source, outer.lookup, env, self.frame, self.node, node, outer.loads)
        if isinstance(node, ast.Lambda):
            saved_frame, saved_node = self.frame, self.node
            self.frame = frame
            try:
                return self.evaluate(node.body)
            finally:
                self.forget(frame)
                self.frame, self.node = saved_frame, saved_node
        walker: Frame | None = self.frame
        while walker is not None:
            if walker.code is node:
                raise CompileError(f"{node.name} calls itself: recursion does not exist on the device", "a loop")
            walker = walker.parent
        return self._run(frame, node.body)

    # ---- reports

    def write_fault(self, kind: int, site: int, address: Any, expected: Any, last: Any) -> None:
        self.call(context.write_fault, (self.context, kind, self.site_tag << 32 | site, address, expected, last), {})
        # The kernel stops here: threads that went on would use what this one was to provide.
        self.b.ep("trap", [], [])

    def write_log(self, site: int, values: tuple[Any, ...]) -> None:
        self.call(context.write_log, (self.context, self.site_tag << 32 | site, values), {})

    def run_kernel(self, source: Source, lookup: Callable[[str], Any], env: Env, code: Any) -> None:
        """Interprets the kernel itself and ends it."""
        self.frame = Frame(source, lookup, env, None, None, code, _loads(source))
        self.execute(source.node.body)  # pyright: ignore[reportArgumentType]
        edges = list(self.frame.returns)
        for edge in edges:
            if edge.value is not None:
                self.node = edge.node
                raise self.error("a kernel returns nothing", "a store through a pointer parameter")
        if self.b.block is not None:
            edges.append(Edge(self.b.block, {}, None))
        self.node = source.node
        self.at(source.node)
        edges += [Edge(block, {}, None) for block in self.fault_exits]
        join(self, edges)
        if self.b.block is None:
            raise self.error("the kernel never ends", "a loop with an exit")
        self.b.finish()


def _missing(value: Any) -> bool:
    import dataclasses

    return value is dataclasses.MISSING


def _loads(source: Source) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for node in ast.walk(source.node):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            found.setdefault(node.id, []).append(node.lineno)
    return found


def lookup_in(function: Callable[..., Any]) -> Callable[[str], Any]:
    """Finds a name as Python would from inside `function`."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=False))

    def lookup(name: str) -> Any:
        if name in cells:
            try:
                return cells[name].cell_contents
            except ValueError:
                raise CompileError(f"{name} is not defined yet") from None
        if name in function.__globals__:
            return function.__globals__[name]
        if hasattr(builtins, name):
            return getattr(builtins, name)
        raise CompileError(f"{name} is not defined", "a name that is set before this line")

    return lookup
