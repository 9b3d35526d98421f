"""What a name in a kernel may hold besides ordinary (compile-time) Python values."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from epdsl.ir.types import ArrayType, PeersType, PtrType, ScalarType, StructType, Type, VecType

from .errors import Place


@dataclass(eq=False, slots=True)
class Value:
    """A value known only when the kernel runs.

    multiple   a power of two that is known to divide an integer
    root       the kernel parameter a pointer came from, where known
    modulus, remainder   a pointer's address is `remainder` modulo `modulus`, given that `root` is 16-byte aligned
    began      "name = number": the variable of a loop whose type a Python number chose
    """

    type: ScalarType | VecType | PtrType
    ir: Any
    multiple: int = 1
    root: str | None = None
    modulus: int = 16
    remainder: int = 0
    began: str = ""


@dataclass(eq=False, slots=True)
class PeersValue:
    type: PeersType
    table: Value
    size: Value


@dataclass(eq=False, slots=True)
class StructValue:
    """A struct held in registers; assigning a field makes a new one."""

    type: StructType
    fields: dict[str, Any]

    def with_field(self, name: str, value: Any) -> StructValue:
        return replace(self, fields={**self.fields, name: value})


@dataclass(eq=False, slots=True)
class ArrayValue:
    type: ArrayType
    elements: tuple[Any, ...]


@dataclass(eq=False, slots=True)
class StructElement:
    """`p[i]` where p points to structs: fields are loaded and stored one by one."""

    pointer: Value

    @property
    def type(self) -> StructType:
        assert isinstance(self.pointer.type, PtrType) and isinstance(self.pointer.type.elem, StructType)
        return self.pointer.type.elem


@dataclass(frozen=True, eq=False)
class Undefined:
    """A name that has no usable value here: why, the lines that matter, and what to write."""

    code: str
    reason: str
    also: tuple[tuple[str, Place], ...] = ()
    fix: str = ""


@dataclass(frozen=True, eq=False)
class Closure:
    """A lambda or nested function written inside a kernel; interpreted where it is called."""

    node: Any
    frame: Any
    source: Any
    defaults: dict[str, Any] = field(default_factory=dict[str, Any])


Device = Value | PeersValue | StructValue | ArrayValue | StructElement
# These are asked for at every node: a union of types in isinstance is made anew each time.
_DEVICE = frozenset((Value, PeersValue, StructValue, ArrayValue, StructElement))
_TUPLES = (tuple, list)
_NUMBERS = (bool, int, float, np.generic)


def is_device(value: Any) -> bool:
    """Whether a value, or anything in a tuple of them, is known only when the kernel runs."""
    if type(value) in _DEVICE:
        return True
    return isinstance(value, _TUPLES) and any(map(is_device, value))


def is_number(value: Any) -> bool:
    return isinstance(value, _NUMBERS)


def type_of(value: Any) -> Type | None:
    return value.type if type(value) in _DEVICE else None


def describe(value: Any) -> str:
    """A value's type as an error names it."""
    kind = type_of(value)
    if kind is not None:
        return str(kind)
    if isinstance(value, tuple):
        return f"({', '.join(describe(v) for v in value)})"  # pyright: ignore[reportUnknownVariableType]
    return (
        f"the compile-time {type(value).__name__} {value!r}"
        if is_number(value) or isinstance(value, str)
        else f"a compile-time {type(value).__name__}"
    )
