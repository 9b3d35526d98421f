"""Names of element types and their NumPy dtypes. `ml_dtypes` is loaded when a type of it is first asked for."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

NBYTES: dict[str, int] = {
    "i1": 1,
    "i8": 1,
    "i16": 2,
    "i32": 4,
    "i64": 8,
    "u8": 1,
    "u16": 2,
    "u32": 4,
    "u64": 8,
    "f16": 2,
    "bf16": 2,
    "f32": 4,
    "f64": 8,
    "f8e4m3": 1,
    "f8e5m2": 1,
}

_NUMPY_NAMES: dict[str, str] = {
    "i1": "bool",
    "i8": "int8",
    "i16": "int16",
    "i32": "int32",
    "i64": "int64",
    "u8": "uint8",
    "u16": "uint16",
    "u32": "uint32",
    "u64": "uint64",
    "f16": "float16",
    "f32": "float32",
    "f64": "float64",
}
_ML_NAMES: dict[str, str] = {"bf16": "bfloat16", "f8e4m3": "float8_e4m3fn", "f8e5m2": "float8_e5m2"}
TEXTS: dict[str, str] = {text: name for table in (_NUMPY_NAMES, _ML_NAMES) for name, text in table.items()}
"""Type names by what NumPy, ml_dtypes and torch call them."""

INTEGERS = frozenset(("i1", "i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64"))
FLOATS = frozenset(("f16", "bf16", "f32", "f64", "f8e4m3", "f8e5m2"))


@dataclass(frozen=True)
class Element:
    """The type of an array's elements: a scalar type, or a struct (`numpy` is None) of `nbytes` bytes."""

    name: str
    nbytes: int
    numpy: np.dtype[Any] | None


@cache
def numpy_dtype(name: str) -> np.dtype[Any]:
    """The NumPy dtype of a scalar type's name ("bf16" -> ml_dtypes.bfloat16).

    Raises TypeError naming the known types.
    """
    if name in _NUMPY_NAMES:
        return np.dtype(_NUMPY_NAMES[name])
    if name in _ML_NAMES:
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, _ML_NAMES[name]))
    raise TypeError(f"unknown element type {name!r}; known are {', '.join(NBYTES)}")


def dtype_name(dtype: Any) -> str:
    """The type name of a NumPy dtype (np.float32 -> "f32").

    Raises TypeError when kernels have no such type, or for a byte order that is not the machine's.
    """
    found = np.dtype(dtype)
    name = TEXTS.get(found.name)
    if name is None or not found.isnative:
        raise TypeError(
            f"a kernel cannot hold elements of NumPy dtype {found!r}; known are {', '.join(sorted(TEXTS))}, in native byte order"
        )
    return name


def element(spec: Any) -> Element:
    """Reads an element type given as a type of the language (`ep.f32`, a struct), a name ("f32") or a NumPy dtype.

    Raises TypeError when it is none of these.
    """
    if isinstance(spec, Element):
        return spec
    if isinstance(spec, str):
        return Element(spec, NBYTES.get(spec, 0), numpy_dtype(spec))
    if spec is None:
        raise TypeError("no element type was given")
    name = getattr(spec, "name", None)
    if isinstance(name, str) and not isinstance(spec, np.dtype):
        if name in NBYTES:
            return Element(name, NBYTES[name], numpy_dtype(name))
        nbytes = getattr(spec, "nbytes", None)
        if isinstance(nbytes, int) and nbytes > 0:
            return Element(name, nbytes, None)
    try:
        name = dtype_name(spec)
    except TypeError as error:
        raise TypeError(
            f"{spec!r} is no element type: give a type of the language, a name such as 'f32', or a NumPy dtype ({error})"
        ) from None
    return Element(name, NBYTES[name], numpy_dtype(name))


def decode_word(word: int, name: str) -> int | float | bool:
    """The value of a scalar of type `name` in the 64-bit word a kernel reports it in.

    Integers are extended to the word and floats of any size are f64 bits there; what is no scalar (a pointer) is the word itself.
    """
    if name in FLOATS:
        return float(np.uint64(word).view(np.float64))
    if name not in INTEGERS:
        return word
    bits = 8 * NBYTES[name]
    value = word & ((1 << bits) - 1)
    if name == "i1":
        return bool(value & 1)
    return value - (1 << bits) if name.startswith("i") and value >> (bits - 1) else value
