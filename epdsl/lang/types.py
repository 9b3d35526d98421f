"""The types a kernel author writes: `ep.f32`, `ep.Ptr[ep.f32]`, `ep.vec(ep.u32, 4)`, `@ep.struct`, ...

Each is a Python class whose `type` is the compiler's own description (`epdsl.ir.types`). Inside a kernel `T(v)` converts.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import linecache
import sys
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar, dataclass_transform

from epdsl.ir import types as t

from .errors import CompileError, Place

T = TypeVar("T")
LANGUAGE_TYPES = (t.ScalarType, t.VecType, t.PtrType, t.PeersType, t.ArrayType, t.StructType)


class _ScalarMeta(type):
    type: t.ScalarType

    @property
    def name(cls) -> str:
        return cls.type.name

    @property
    def nbytes(cls) -> int:
        return cls.type.nbytes

    def __repr__(cls) -> str:
        return f"ep.{cls.type.name}"


class Scalar(metaclass=_ScalarMeta):
    """A scalar type. Called inside a kernel it converts; outside it makes a NumPy scalar."""

    type: t.ScalarType

    def __new__(cls, value: Any = 0) -> Any:
        from epdsl_runtime.dtypes import numpy_dtype

        return numpy_dtype(cls.type.name).type(value)

    if typing.TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...
        def __add__(self, other: Any) -> Any: ...
        def __radd__(self, other: Any) -> Any: ...
        def __sub__(self, other: Any) -> Any: ...
        def __rsub__(self, other: Any) -> Any: ...
        def __mul__(self, other: Any) -> Any: ...
        def __rmul__(self, other: Any) -> Any: ...
        def __truediv__(self, other: Any) -> Any: ...
        def __rtruediv__(self, other: Any) -> Any: ...
        def __floordiv__(self, other: Any) -> Any: ...
        def __rfloordiv__(self, other: Any) -> Any: ...
        def __mod__(self, other: Any) -> Any: ...
        def __rmod__(self, other: Any) -> Any: ...
        def __lshift__(self, other: Any) -> Any: ...
        def __rlshift__(self, other: Any) -> Any: ...
        def __rshift__(self, other: Any) -> Any: ...
        def __and__(self, other: Any) -> Any: ...
        def __rand__(self, other: Any) -> Any: ...
        def __or__(self, other: Any) -> Any: ...
        def __ror__(self, other: Any) -> Any: ...
        def __xor__(self, other: Any) -> Any: ...
        def __lt__(self, other: Any) -> Any: ...
        def __le__(self, other: Any) -> Any: ...
        def __gt__(self, other: Any) -> Any: ...
        def __ge__(self, other: Any) -> Any: ...
        def __neg__(self) -> Any: ...
        def __invert__(self) -> Any: ...
        def __index__(self) -> int: ...


class i1(Scalar):
    """A truth value, as comparisons give it."""

    type = t.I1


class i8(Scalar):
    """Signed integer of 8 bits."""

    type = t.I8


class i16(Scalar):
    """Signed integer of 16 bits."""

    type = t.I16


class i32(Scalar):
    """Signed integer of 32 bits."""

    type = t.I32


class i64(Scalar):
    """Signed integer of 64 bits."""

    type = t.I64


class u8(Scalar):
    """Unsigned integer of 8 bits."""

    type = t.U8


class u16(Scalar):
    """Unsigned integer of 16 bits."""

    type = t.U16


class u32(Scalar):
    """Unsigned integer of 32 bits."""

    type = t.U32


class u64(Scalar):
    """Unsigned integer of 64 bits."""

    type = t.U64


class f16(Scalar):
    """IEEE float of 16 bits."""

    type = t.F16


class bf16(Scalar):
    """Float of 16 bits with f32's exponent."""

    type = t.BF16


class f32(Scalar):
    """IEEE float of 32 bits."""

    type = t.F32


class f64(Scalar):
    """IEEE float of 64 bits."""

    type = t.F64


class f8e4m3(Scalar):
    """OCP float of 8 bits, largest 448, no infinity. Converts to and from f32; no arithmetic."""

    type = t.F8E4M3


class f8e5m2(Scalar):
    """OCP float of 8 bits, largest 57344. Converts to and from f32; no arithmetic."""

    type = t.F8E5M2


SCALARS: dict[str, type[Scalar]] = {c.type.name: c for c in (i1, i8, i16, i32, i64, u8, u16, u32, u64, f16, bf16, f32, f64, f8e4m3, f8e5m2)}


@dataclasses.dataclass(frozen=True)
class TypeObject:
    """A constructed type (`ep.Ptr[ep.f32]`, `ep.vec(ep.u32, 4)`) as a Python value."""

    type: t.Type

    @property
    def name(self) -> str:
        return str(self.type)

    @property
    def nbytes(self) -> int:
        return self.type.nbytes

    def __call__(self, *values: Any) -> Any:
        raise TypeError(f"{self.type} values exist only inside a kernel")

    def __repr__(self) -> str:
        return f"ep.{self.type}"


class Ptr(Generic[T]):
    """Pointer to global memory, or from `ep.shared` to block-shared memory. `p[i]`, `p + n`, `p.cast(T)`."""

    def __class_getitem__(cls, item: Any) -> Any:
        return item if isinstance(item, TypeVar) else TypeObject(t.PtrType(as_type(item)))

    if typing.TYPE_CHECKING:

        def __getitem__(self, index: Any) -> Any: ...
        def __setitem__(self, index: Any, value: Any) -> None: ...
        def __add__(self, count: Any) -> Ptr[T]: ...
        def __sub__(self, count: Any) -> Ptr[T]: ...
        def cast(self, kind: Any) -> Ptr[Any]: ...
        def __getattr__(self, name: str) -> Any: ...


class Peers(Generic[T]):
    """One buffer per rank, each mapped here: `peers[rank]` is a `Ptr[T]`, `peers.size` the number of ranks."""

    def __class_getitem__(cls, item: Any) -> Any:
        return item if isinstance(item, TypeVar) else TypeObject(t.PeersType(as_type(item)))

    if typing.TYPE_CHECKING:
        size: Any

        def __getitem__(self, rank: Any) -> Ptr[T]: ...


class Array(Generic[T]):
    """`ep.Array[T, N]`: N values inside a struct."""

    def __class_getitem__(cls, item: tuple[Any, int]) -> Any:
        elem, n = item
        return TypeObject(t.ArrayType(as_type(elem), int(n)))

    if typing.TYPE_CHECKING:

        def __getitem__(self, index: Any) -> Any: ...


class Const(Generic[T]):
    """`ep.Const[int]`: a kernel parameter that is a compile-time constant."""

    def __class_getitem__(cls, item: Any) -> Any:
        return ConstAnnotation(item)


@dataclasses.dataclass(frozen=True)
class ConstAnnotation:
    kind: Any


@functools.cache
def _vec(elem: t.ScalarType, n: int) -> TypeObject:
    return TypeObject(t.VecType(elem, n))


def vec(elem: Any, n: int) -> Any:
    """The type of `n` (2, 4, 8 or 16) scalars held in one register of at most 16 bytes."""
    kind = as_type(elem)
    if not isinstance(kind, t.ScalarType) or kind == t.I1 or n not in (1, 2, 4, 8, 16) or kind.nbytes * n > 16:
        raise CompileError(
            "EP023", f"vec({kind}, {n}) is not a vector of up to 16 bytes", "ep.vec(T, n) with n in 2, 4, 8, 16 and n * T.nbytes <= 16"
        )
    return _vec(kind, n)


def as_type(annotation: Any) -> t.Type:
    """The compiler's type for what an author wrote. Raises CompileError for anything that is not a type of the language."""
    found = getattr(annotation, "type", None)
    if isinstance(found, LANGUAGE_TYPES):
        return found
    shown = getattr(annotation, "__name__", repr(annotation))
    known = f"one of ep.{', ep.'.join(SCALARS)}, ep.Ptr[T], ep.Peers[T], ep.Array[T, N] or an @ep.struct"
    error = CompileError(
        "EP020", f"{shown} is not a type of the language", next((hint for kind, hint in _INSTEAD if annotation is kind), known)
    )
    raise error.at(_line_being_run())


_INSTEAD = ((int, "ep.i32 or ep.i64 (ep.Const[int] for a compile-time value)"), (float, "ep.f32"), (bool, "ep.i1"))


@dataclass_transform()
def struct(cls: type[T]) -> type[T]:
    """Makes a struct of plain annotated fields: passed by value, nests, may hold `ep.Array[T, N]`.

    Outside a kernel an instance is a plain object with these attributes, to be passed to a launch.
    """
    fields: dict[str, t.Type] = {}
    for owner in reversed(cls.__mro__):
        for name, annotation in inspect.get_annotations(owner).items():
            try:
                fields[name] = as_type(resolve_annotations(owner, {name: annotation})[name])
            except CompileError as error:
                made = CompileError(error.code, f"{cls.__name__}.{name}: {error.message}", error.fix)
                raise made.at(_field_places(owner, name) or error.places) from None
    made: Any = dataclasses.dataclass(cls)
    made.type = t.StructType(cls.__name__, tuple(fields.items()), made)
    made.name = cls.__name__
    made.nbytes = made.type.nbytes
    return made


_PACKAGE = str(Path(__file__).parent.parent)


def _line_being_run() -> tuple[Place, ...]:
    """The line outside this package that Python runs now, as of a module that is imported. Nothing while a kernel is built."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        if frame.f_code.co_filename.endswith("interpreter.py"):
            return ()
        frame = frame.f_back
    if frame is None:
        return ()
    line, end_line, start, end = next(itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None))
    if line is None or start is None or end is None:
        return ()
    file, text = frame.f_code.co_filename, linecache.getline(frame.f_code.co_filename, line).rstrip("\n")
    return (Place(file, line, start, end if end_line == line else len(text), frame.f_code.co_name, text),)


def _field_places(cls: type, name: str) -> tuple[Place, ...]:
    """The line that declares a field, where Python has the class's source."""
    try:
        lines, first = inspect.getsourcelines(cls)
    except (OSError, TypeError):
        return ()
    for number, line in enumerate(lines):
        if line.lstrip().partition(":")[0].strip() == name:
            text = line.rstrip("\n")
            start = len(text) - len(text.lstrip())
            return (
                Place(inspect.getsourcefile(cls) or "", first + number, start, len(text.partition("#")[0].rstrip()), cls.__name__, text),
            )
    return ()


def resolve_annotations(owner: Any, annotations: dict[str, Any]) -> dict[str, Any]:
    """Annotations as objects, also where `from __future__ import annotations` made them strings.

    Local names of an enclosing function are found as long as it is still running.
    """

    module = sys.modules.get(getattr(owner, "__module__", ""), None)
    # A function knows its own globals, also where its module is in no table (runpy, exec).
    scope: dict[str, Any] = dict(getattr(owner, "__globals__", None) or (vars(module) if module else {}))
    closure = getattr(owner, "__closure__", None)
    if closure:
        scope.update(zip(owner.__code__.co_freevars, (_cell(c) for c in closure), strict=True))
    resolved: dict[str, Any] = {}
    for name, annotation in annotations.items():
        if isinstance(annotation, str):
            try:
                annotation = eval(annotation, scope, _enclosing_locals(annotation, scope))
            except Exception as error:
                raise CompileError(
                    "EP020",
                    f"the annotation {annotation!r} of {name} cannot be evaluated: {error}",
                    "a type of the language, such as ep.i32",
                ) from None
        resolved[name] = annotation
    return resolved


def keep_annotations(function: Callable[..., Any]) -> None:
    """Makes a function's string annotations objects while the function it is written in still runs.

    Those that name something defined later stay strings, to be read when the kernel is built.
    """
    for name, annotation in function.__annotations__.items():
        if isinstance(annotation, str):
            try:
                function.__annotations__[name] = resolve_annotations(function, {name: annotation})[name]
            except CompileError:
                continue


def _cell(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _enclosing_locals(expression: str, scope: dict[str, Any]) -> dict[str, Any]:

    names = {n for n in compile(expression, "", "eval").co_names if n not in scope}
    found: dict[str, Any] = {}
    frame = sys._getframe(2)
    while names - found.keys() and frame is not None:
        for name in names - found.keys():
            if name in frame.f_locals:
                found[name] = frame.f_locals[name]
        frame = frame.f_back
    return found
