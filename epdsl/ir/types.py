"""Types of the language: scalars, vectors, pointers, peers, arrays and structs. No MLIR here."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

Space = Literal["global", "shared"]


@dataclass(frozen=True)
class ScalarType:
    """kind: "b" bool, "i" signed, "u" unsigned, "f" float."""

    name: str
    kind: Literal["b", "i", "u", "f"]
    bits: int

    def __hash__(self) -> int:
        return hash(self.name)

    @property
    def nbytes(self) -> int:
        return max(1, self.bits // 8)

    @property
    def align(self) -> int:
        return self.nbytes

    @property
    def is_int(self) -> bool:
        return self.kind in "iu"

    @property
    def is_float(self) -> bool:
        return self.kind == "f"

    @property
    def min(self) -> int:
        return -(1 << (self.bits - 1)) if self.kind == "i" else 0

    @property
    def max(self) -> int:
        return (1 << (self.bits - 1)) - 1 if self.kind == "i" else (1 << self.bits) - 1

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class VecType:
    elem: ScalarType
    n: int

    @property
    def nbytes(self) -> int:
        return self.elem.nbytes * self.n

    @property
    def align(self) -> int:
        return self.nbytes

    def __str__(self) -> str:
        return f"vec({self.elem}, {self.n})"


@dataclass(frozen=True)
class PtrType:
    """`peer`: the memory may belong to another rank."""

    elem: Type
    space: Space = "global"
    peer: bool = False

    nbytes = 8
    align = 8

    def __str__(self) -> str:
        where = "shared " if self.space == "shared" else "peer " if self.peer else ""
        return f"{where}Ptr[{self.elem}]"


@dataclass(frozen=True)
class PeersType:
    elem: Type

    nbytes = 16
    align = 8

    def __str__(self) -> str:
        return f"Peers[{self.elem}]"


@dataclass(frozen=True)
class ArrayType:
    elem: Type
    n: int

    @property
    def nbytes(self) -> int:
        return self.elem.nbytes * self.n

    @property
    def align(self) -> int:
        return self.elem.align

    def __str__(self) -> str:
        return f"Array[{self.elem}, {self.n}]"


@dataclass(frozen=True, eq=False)
class StructType:
    """Fields lie in memory as in C. Two struct types are equal only when they are the same class."""

    name: str
    fields: tuple[tuple[str, Type], ...]
    cls: Any = field(repr=False)

    @property
    def offsets(self) -> dict[str, int]:
        offsets: dict[str, int] = {}
        at = 0
        for name, kind in self.fields:
            at = -(-at // kind.align) * kind.align
            offsets[name] = at
            at += kind.nbytes
        return offsets

    @property
    def align(self) -> int:
        return max((kind.align for _, kind in self.fields), default=1)

    @property
    def nbytes(self) -> int:
        if not self.fields:
            return 0
        last, kind = self.fields[-1]
        end = self.offsets[last] + kind.nbytes
        return -(-end // self.align) * self.align

    def field_type(self, name: str) -> Type | None:
        return dict(self.fields).get(name)

    def __str__(self) -> str:
        return self.name


Type: TypeAlias = ScalarType | VecType | PtrType | PeersType | ArrayType | StructType

I1 = ScalarType("i1", "b", 1)
I8 = ScalarType("i8", "i", 8)
I16 = ScalarType("i16", "i", 16)
I32 = ScalarType("i32", "i", 32)
I64 = ScalarType("i64", "i", 64)
U8 = ScalarType("u8", "u", 8)
U16 = ScalarType("u16", "u", 16)
U32 = ScalarType("u32", "u", 32)
U64 = ScalarType("u64", "u", 64)
F16 = ScalarType("f16", "f", 16)
BF16 = ScalarType("bf16", "f", 16)
F32 = ScalarType("f32", "f", 32)
F64 = ScalarType("f64", "f", 64)
F8E4M3 = ScalarType("f8e4m3", "f", 8)
F8E5M2 = ScalarType("f8e5m2", "f", 8)

SCALARS = {t.name: t for t in (I1, I8, I16, I32, I64, U8, U16, U32, U64, F16, BF16, F32, F64, F8E4M3, F8E5M2)}
SMALL_FLOATS = (F8E4M3, F8E5M2)


def promote(a: ScalarType, b: ScalarType) -> ScalarType | None:
    """The type of `a op b` by NumPy's rules, or None where the author must convert.

    None: an integer with a float, 64-bit signed with unsigned (NumPy would take f64), f16 with bf16, anything with an 8-bit float.
    """
    if a == b:
        return None if a in SMALL_FLOATS else a
    if a in SMALL_FLOATS or b in SMALL_FLOATS or a.is_float != b.is_float:
        return None
    if a.is_float:
        return None if a.bits == b.bits else (a if a.bits > b.bits else b)
    if a.kind == "b":
        return b
    if b.kind == "b":
        return a
    if a.kind == b.kind:
        return a if a.bits > b.bits else b
    signed, unsigned = (a, b) if a.kind == "i" else (b, a)
    if signed.bits > unsigned.bits:
        return signed
    return next((t for t in (I16, I32, I64) if t.bits > unsigned.bits), None)


def accepts(kind: ScalarType, number: bool | int | float) -> bool:
    """Whether a Python number may become `kind` without losing its value's meaning."""
    if isinstance(number, bool):
        return kind.kind == "b" or kind.is_int
    if isinstance(number, int):
        if kind.is_float:
            return True
        return kind.is_int and kind.min <= number <= kind.max
    return kind.is_float


def default_type(number: bool | int | float) -> ScalarType | None:
    """What a Python number becomes when nothing else decides."""
    if isinstance(number, bool):
        return I1
    if isinstance(number, float):
        return F32
    return next((t for t in (I32, I64, U64) if accepts(t, number)), None)


def known_multiple(number: int) -> int:
    """The largest power of two, at most 2**12, that divides `number`: what alignment reasoning keeps of an integer."""
    return math.gcd(number, 1 << 12) if number else 1 << 12
