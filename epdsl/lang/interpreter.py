"""Interprets a kernel's syntax tree and builds its IR."""

from __future__ import annotations

import ast
import builtins
import dataclasses
import difflib
import functools
import inspect
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from epdsl.ir.types import F16, F32, F64, SMALL_FLOATS, PtrType, ScalarType, StructType, Type, VecType

from . import context, expressions, library, maths
from . import statements as stmts
from .arithmetic import condition, constant, convert, operate
from .elements import coerce, make_vector, pointer_from
from .errors import FAULT_OF_OURS, CompileError
from .function import BoundFunc, Func
from .intrinsic import Intrinsic
from .joins import join
from .loops import LOOPS, DeviceRange, Unroll
from .maths import absolute, extreme
from .source import Source, local_names, parameter_nodes, source_of
from .stops import stop_here
from .tracer import Binding, Edge, Env, Frame, Tracer
from .types import LANGUAGE_TYPES, ConstAnnotation, resolve_annotations
from .values import ArrayValue, Closure, PeersValue, StructValue, Value, describe, is_device, is_number

_OF_ELEMENTS = (len, tuple, list, zip, enumerate, reversed, set)
_SAFE_ON_DEVICE = (isinstance, type, *_OF_ELEMENTS)
_CONSTANT = {int: "ep.i32(x)", float: "ep.f32(x)", bool: "a comparison"}
_OWN_FILES = tuple(str(Path(__file__).parent.parent / part) for part in ("lang", "ir"))
_DYNAMIC = "a dynamic value where a constant is needed"


class Interpreter(Tracer):
    """One run over one kernel."""

    def evaluate(self, node: ast.expr) -> Any:
        if type(node) is ast.Constant:
            return node.value
        saved = self.node
        self.node = node
        try:
            result = expressions.evaluate(self, node)
        except Exception as error:
            self._raise(error)
        if saved is not None:
            self.node = saved
        return result

    def execute(self, statements: Sequence[ast.stmt]) -> None:
        for statement in statements:
            if self.b.block is None:
                return
            try:
                stmts.execute_one(self, statement)
            except Exception as error:
                self._raise(error)

    def _raise(self, error: Exception) -> NoReturn:
        """Raises an error of the kernel's text with its place. A fault of this package stays what it is, with a note."""
        if isinstance(error, CompileError):
            raise error.at(self.places()) from error.__cause__
        if _is_fault_of_ours(error):
            if not hasattr(error, "__notes__"):
                error.add_note(f"{FAULT_OF_OURS}: a fault of epdsl, not of the kernel, while building:\n{self.place().render()}")
            raise error
        text = str(error) if str(error).startswith(type(error).__name__) else f"{type(error).__name__}: {error}"
        raise CompileError("EP018", text).at(self.places()) from error

    # ---- calls

    def call(self, function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        args = tuple(args)
        match function:
            case Intrinsic():
                return function.emit(self, args, kwargs)
            case Func():
                return self.inline(function.function, args, kwargs)
            case BoundFunc(func=inner, instance=instance):
                return self.inline(inner.function, (instance, *args), kwargs, method=True)
            case Closure():
                return self._closure(function, args, kwargs)
            case _:
                pass
        if is_device(function):
            raise CompileError("EP019", f"{describe(function)} cannot be called")
        kind = getattr(function, "type", None)
        if isinstance(kind, ScalarType | VecType | StructType | PtrType):
            return self._construct(kind, function, args, kwargs)
        if function is range:
            return self._range(args)
        if function is Unroll:
            return self._unroll(args)
        return self._python(function, args, kwargs)

    def _unroll(self, args: tuple[Any, ...]) -> Unroll:
        if len(args) != 1:
            raise CompileError("EP008", f"ep.unroll takes one range or tuple, not {len(args)} arguments", "ep.unroll(range(n))")
        items = args[0].known if isinstance(args[0], DeviceRange) else args[0]
        if items is None or (is_device(items) and not isinstance(items, tuple)):
            raise CompileError("EP010", f"ep.unroll needs a compile-time range: {_DYNAMIC}", "a plain loop: for i in range(...)")
        return Unroll(items)

    def _python(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of an ordinary Python callable, which runs now."""
        if function is breakpoint:
            return stop_here(self, *args, **kwargs)
        args = tuple(v.known if isinstance(v, DeviceRange) and v.known is not None else v for v in args)
        if any(is_device(v) for v in (*args, *kwargs.values())):
            found = self._on_device(function, args)
            if found is not None:
                return found
        if function is list:
            function = tuple
        if function is reversed:
            return tuple(reversed(args[0]))
        return function(*args, **kwargs)

    def _on_device(self, function: Any, args: tuple[Any, ...]) -> Any:
        """What a Python built-in means for device values; None where it may run as it is."""
        name = getattr(function, "__qualname__", repr(function))
        if function is min or function is max:
            return extreme(self, "<" if function is min else ">", args)
        if function is abs:
            return absolute(self, args[0])
        if function is sum:
            items, *start = args
            total = start[0] if start else 0
            for value in items:
                total = operate(self.b, "+", total, value)
            return total
        if (function is any or function is all) and isinstance(args[0], tuple):
            return self._fold(function is all, args[0])
        if isinstance(function, type) and function in _CONSTANT:
            raise CompileError("EP010", f"{_DYNAMIC}: {name}() of {', '.join(describe(v) for v in args)}", _CONSTANT[function])
        if function is print:
            raise CompileError("EP012", "print() runs while building and cannot show a device value", 'ep.printf("{}", x)')
        if function in _OF_ELEMENTS:
            _refuse_one_value(function, args)
        if isinstance(function, type) or function in _SAFE_ON_DEVICE:
            return None
        own = name.split(".")[-1]
        ours = f"ep.{own}" if hasattr(maths, own) else "an @ep.func that does it"
        fix = f"@ep.func above def {own}" if hasattr(function, "__code__") or hasattr(function, "__wrapped__") else ours
        what = "a kernel" if hasattr(function, "launch") else "an ordinary Python function"
        raise CompileError("EP012", f"{name} is {what} and is given device values", fix)

    def _fold(self, every: bool, values: tuple[Any, ...]) -> Any:
        """Python's `all` and `any` of a tuple."""
        result: Any = every
        for value in values:
            result = operate(self.b, "&" if every else "|", result, condition(self.b, value))
        return result

    def _range(self, args: tuple[Any, ...]) -> DeviceRange:
        for value in args:
            if not is_device(value) and (not is_number(value) or int(value) != value):
                raise CompileError("EP014", f"range() needs integers, not {describe(value)}", "range(n) of an integer")
        match args:
            case (stop,):
                return DeviceRange(0, stop, 1)
            case (start, stop):
                return DeviceRange(start, stop, 1)
            case (start, stop, step):
                return DeviceRange(start, stop, step)
            case _:
                raise CompileError("EP008", f"range() takes 1 to 3 arguments, not {len(args)}", "range(start, stop, step)")

    def _construct(
        self, kind: ScalarType | VecType | StructType | PtrType, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A call of a type."""
        if isinstance(kind, ScalarType | PtrType):
            if len(args) != 1 or kwargs:
                raise CompileError("EP008", f"ep.{kind} converts one value, not {len(args) + len(kwargs)}", f"ep.{kind}(x)")
            return self._scalar(kind, args[0]) if isinstance(kind, ScalarType) else pointer_from(self, kind, args[0])
        if isinstance(kind, VecType):
            return make_vector(self, kind, args)
        names = [name for name, _ in kind.fields]
        if len(args) > len(names):
            raise CompileError("EP008", f"{kind} has {len(names)} fields, not {len(args)}", f"{kind}({', '.join(names)})")
        defaults = {f.name: f.default for f in dataclasses.fields(function) if f.default is not dataclasses.MISSING}
        given = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
        absent = [n for n in names if n not in given]
        unknown = [n for n in given if n not in names]
        if absent or unknown:
            wrong = [f"needs {', '.join(absent)}"] * bool(absent) + [f"has no field {', '.join(unknown)}"] * bool(unknown)
            raise CompileError("EP008", f"{kind} {' and '.join(wrong)}", f"{kind}({', '.join(names)})")
        return StructValue(kind, {name: coerce(self, given[name], field, f"{kind}.{name}") for name, field in kind.fields})

    def _scalar(self, kind: ScalarType, value: Any) -> Value:
        """`ep.T(value)`."""
        if is_number(value):
            number = value.item() if hasattr(value, "item") else value
            if kind.is_int and isinstance(number, float):
                number = int(number)
            if kind.kind == "b":
                number = bool(number)
            return constant(self.b, kind, float(number) if kind.is_float else number)
        if not isinstance(value, Value):
            raise CompileError("EP028", f"{describe(value)} does not convert to {kind}", "a number, or a scalar computed on the device")
        if value.type == kind:
            return value
        if kind in SMALL_FLOATS:
            single = value if value.type == F32 else self._scalar(F32, value)
            return self.call(library.TO_SMALL[kind.name], (single,), {})
        if value.type in SMALL_FLOATS:
            return self._scalar(kind, self.call(library.FROM_SMALL[value.type.name], (value,), {}))
        if value.type == F64 and kind == F16:
            return self.call(library.f64_to_f16, (value,), {})
        return convert(self.b, value, kind)

    # ---- functions

    def inline(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], method: bool = False) -> Any:
        """Interprets a function's body in place of a call. `method`: the first argument is what the function is a method of.

        Raises CompileError for recursion and bad arguments.
        """
        self._refuse_recursion(function.__code__, function.__qualname__)
        signature, annotations = _signature(function)
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            shown = ", ".join(str(p.replace(annotation=inspect.Parameter.empty)) for p in signature.parameters.values())
            raise CompileError("EP008", f"{function.__qualname__}: {error}", f"{function.__name__}({shown})") from None
        bound.apply_defaults()
        source = source_of(function)
        nodes = parameter_nodes(source.node)
        env: Env = {}
        for name, value in bound.arguments.items():
            try:
                made = self._argument(f"{function.__qualname__}'s {name}", annotations.get(name), value)
            except CompileError:
                self.at_argument([n for n in bound.arguments if not (method and n == next(iter(bound.arguments)))], name)
                raise
            env[name] = Binding(made, nodes[name])
        result = getattr(annotations.get("return"), "type", None)
        copied = next(iter(env)) if method and isinstance(args[0], StructValue) else None
        frame = Frame(
            source, lookup_in(function), env, local_names(source.node), self.frame, self.node, function.__code__,
            result if isinstance(result, LANGUAGE_TYPES) else None, copied,
        )  # fmt: skip
        return self._run(frame, source.node.body)

    def _refuse_recursion(self, code: Any, name: str) -> None:
        outer: Frame | None = self.frame
        while outer is not None:
            if outer.code is code:
                raise CompileError("EP015", f"{name} calls itself: recursion does not exist on the device", "a loop")
            outer = outer.parent

    def _argument(self, what: str, annotation: Any, value: Any) -> Any:
        kind: Type | None = getattr(annotation, "type", None)
        if isinstance(kind, LANGUAGE_TYPES):
            return coerce(self, value, kind, what)
        if is_device(value) and (isinstance(annotation, ConstAnnotation) or annotation in (int, float, bool, str)):
            raise CompileError(
                "EP010", f"{_DYNAMIC}: {what} is {describe(value)}", "a compile-time argument, or a parameter of a type of the language"
            )
        return value

    def _run(self, frame: Frame, body: Sequence[ast.stmt]) -> Any:
        self.sources.setdefault(frame.source)
        saved_frame, saved_node = self.frame, self.node
        self.frame = frame
        try:
            self.execute(body)
            edges = list(frame.returns)
            if self.b.block is not None:
                edges.append(Edge(self.b.block, {}, None))
            if not edges:
                self.node = frame.source.node
                raise self.error("EP016", f"{frame.source.name} never returns", "a loop with an exit")
            gives = next((e for e in edges if e.value is not None), None)
            if gives is not None and any(e.value is None for e in edges):
                silent = next((e.node for e in edges if e.value is None and e.node is not None), frame.source.node)
                self.node = silent
                raise self.error(
                    "EP017",
                    f"{frame.source.name} returns {describe(gives.value)} on one path and nothing on another",
                    "a return with a value on every path",
                    (("returns a value", frame.source.place(gives.node or frame.source.node)),),
                )
            _, result = join(self, edges, with_value=True)
            return result
        finally:
            self.forget(frame)
            self.frame, self.node = saved_frame, saved_node
            if self.node is not None:
                self.at(self.node)

    def _closure(self, closure: Closure, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        node: ast.Lambda | ast.FunctionDef = closure.node
        names = list(parameter_nodes(node))
        given = {**closure.defaults, **dict(zip(names, args, strict=False)), **kwargs}
        if len(args) > len(names) or set(given) != set(names):
            called = node.name if isinstance(node, ast.FunctionDef) else ast.unparse(node)
            raise CompileError(
                "EP008", f"{called} takes ({', '.join(names)}), not {len(args) + len(kwargs)} arguments", f"{len(names)} arguments"
            )
        outer: Frame = closure.frame
        locals_ = local_names(node)
        env: Env = {name: binding for name, binding in outer.env.items() if name not in locals_}
        env.update({name: Binding(value, node) for name, value in given.items()})
        frame = Frame(closure.source, outer.lookup, env, locals_ | outer.locals, self.frame, self.node, node)
        if isinstance(node, ast.FunctionDef):
            self._refuse_recursion(node, node.name)
            return self._run(frame, node.body)
        saved_frame, saved_node = self.frame, self.node
        self.frame = frame
        try:
            return self.evaluate(node.body)
        finally:
            self.forget(frame)
            self.frame, self.node = saved_frame, saved_node
            if self.node is not None:
                self.at(self.node)

    # ---- reports

    def write_fault(self, kind: int, site: int, address: Any, expected: Any, last: Any) -> None:
        self.call(context.write_fault, (self.context, kind, self.site_tag << 32 | site, address, expected, last), {})

    def write_wait(self, site: int, address: Any, expected: Any, last: Any, since: Any, now: Any) -> None:
        self.call(context.write_wait, (self.context, self.site_tag << 32 | site, address, expected, last, since, now), {})

    def write_log(self, site: int, values: tuple[Any, ...]) -> None:
        self.call(context.write_log, (self.context, self.site_tag << 32 | site, values), {})

    # ---- the kernel itself

    def enter(self, source: Source, lookup: Callable[[str], Any], code: Any) -> Env:
        """Stands at the kernel's first line. Returns its variables, for the parameters to be put in."""
        self.frame = Frame(source, lookup, {}, local_names(source.node), None, None, code)
        self.sources.setdefault(source)
        self.at(source.node)
        return self.frame.env

    def run(self) -> None:
        """Interprets the kernel and ends it."""
        source = self.frame.source
        self.execute(source.node.body)
        edges = list(self.frame.returns)
        for edge in edges:
            if edge.value is not None:
                self.node = edge.node
                raise self.error(
                    "EP017",
                    f"a kernel returns nothing, and {source.name} returns {describe(edge.value)}",
                    "a store through a pointer parameter",
                )
        if self.b.block is not None:
            edges.append(Edge(self.b.block, {}, None))
        self.at(source.node)
        edges += [Edge(block, {}, None) for block in self.fault_exits]
        join(self, edges)
        if self.b.block is None:
            raise self.error("EP016", "the kernel never ends", "a loop with an exit")
        self.b.finish()


# Where the kernel's own compile-time values are used: what these raise is about them.
_APPLIES = (
    "operate",
    "_unary",
    "_python",
    "attribute",
    "subscript",
    "_formatted",
    "_compare_one",
    "_contains",
    "_dict",
    "_set",
    "_range",
)


def _refuse_one_value(function: Any, args: tuple[Any, ...]) -> None:
    """Python's functions of sequences take tuples of device values, and no value that is one to Python."""
    given = next((v for v in args if is_device(v) and not isinstance(v, tuple | list)), None)
    if given is None:
        return
    if function is not len:
        raise CompileError("EP014", f"{describe(given)} cannot be looped over", LOOPS)
    counted = {PeersValue: "peers.size, the number of ranks", ArrayValue: "array.size"}
    fix = counted.get(type(given), "a parameter for it, such as n: ep.i32")
    raise CompileError("EP031", f"{describe(given)} has no length that Python knows", fix)


def _is_fault_of_ours(error: Exception) -> bool:
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return frame.f_code.co_filename.startswith(_OWN_FILES) and frame.f_code.co_name not in _APPLIES


@functools.cache
def _signature(function: Callable[..., Any]) -> tuple[inspect.Signature, dict[str, Any]]:
    return inspect.signature(function), resolve_annotations(function, function.__annotations__)


def lookup_in(function: Callable[..., Any]) -> Callable[[str], Any]:
    """Finds a name as Python would from inside `function`."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=False))

    def lookup(name: str) -> Any:
        if name in cells:
            try:
                return cells[name].cell_contents
            except ValueError:
                raise CompileError("EP002", f"{name} is not defined yet", "a name that is set before the kernel is built") from None
        if name in function.__globals__:
            return function.__globals__[name]
        if hasattr(builtins, name):
            return getattr(builtins, name)
        near = difflib.get_close_matches(name, [*cells, *function.__globals__, *vars(builtins)], 1, 0.75)
        raise CompileError("EP002", f"{name} is not defined", near[0] if near else "a name that is set before this line")

    return lookup
