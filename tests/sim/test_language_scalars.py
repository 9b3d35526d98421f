"""Scalar arithmetic against NumPy: every type, edge values, wrapping, floor division, promotion, what is refused."""

from __future__ import annotations

import functools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from language_run import built, rng, run

import epdsl as ep

INTEGERS = {
    "i8": (ep.i8, np.int8), "i16": (ep.i16, np.int16), "i32": (ep.i32, np.int32), "i64": (ep.i64, np.int64),
    "u8": (ep.u8, np.uint8), "u16": (ep.u16, np.uint16), "u32": (ep.u32, np.uint32), "u64": (ep.u64, np.uint64),
}  # fmt: skip
FLOATS = {"f16": (ep.f16, np.float16), "bf16": (ep.bf16, ml_dtypes.bfloat16), "f32": (ep.f32, np.float32), "f64": (ep.f64, np.float64)}
TYPES: dict[str, tuple[Any, Any]] = {**INTEGERS, **FLOATS}
INTEGER_OPS = ("+", "-", "*", "//", "%", "&", "|", "^", "min", "max", "neg", "invert", "abs")
FLOAT_OPS = ("+", "-", "*", "/", "min", "max", "neg", "abs")
COMPARISONS = ("==", "!=", "<", "<=", ">", ">=")
SEED = 20261130


@functools.cache
def integer_kernel(T: Any) -> Any:
    @ep.kernel
    def integers(a: ep.Ptr[T], b: ep.Ptr[T], out: ep.Ptr[T], compared: ep.Ptr[ep.i1], n: ep.i32):
        for i in range(ep.thread_idx.x, n, ep.block_dim.x):
            x, y = a[i], b[i]
            at = out + i * 13
            at[0] = x + y
            at[1] = x - y
            at[2] = x * y
            at[3] = x // y
            at[4] = x % y
            at[5] = x & y
            at[6] = x | y
            at[7] = x ^ y
            at[8] = min(x, y)
            at[9] = ep.max(x, y)
            at[10] = -x
            at[11] = ~x
            at[12] = abs(x)
            is_so = compared + i * 6
            is_so[0] = x == y
            is_so[1] = x != y
            is_so[2] = x < y
            is_so[3] = x <= y
            is_so[4] = x > y
            is_so[5] = x >= y

    return integers


@functools.cache
def float_kernel(T: Any) -> Any:
    @ep.kernel
    def floats(a: ep.Ptr[T], b: ep.Ptr[T], out: ep.Ptr[T], compared: ep.Ptr[ep.i1], n: ep.i32):
        for i in range(ep.thread_idx.x, n, ep.block_dim.x):
            x, y = a[i], b[i]
            at = out + i * 8
            at[0] = x + y
            at[1] = x - y
            at[2] = x * y
            at[3] = x / y
            at[4] = min(x, y)
            at[5] = max(x, y)
            at[6] = -x
            at[7] = abs(x)
            is_so = compared + i * 6
            is_so[0] = x == y
            is_so[1] = x != y
            is_so[2] = x < y
            is_so[3] = x <= y
            is_so[4] = x > y
            is_so[5] = x >= y

    return floats


def edges(dtype: Any) -> np.ndarray:
    if np.dtype(dtype).kind in "iu":
        info = np.iinfo(dtype)
        small = [v for v in (-7, -4, -3, -2, -1, 0, 1, 2, 3, 4, 7, 100) if info.min <= v <= info.max]
        return np.array([info.min, info.min + 1, info.max // 2, info.max - 1, info.max, *small], dtype)
    info = ml_dtypes.finfo(dtype)
    values = [0.0, 1.0, 1.5, 3.0, 1 / 3, 100.0, float(info.max), float(info.tiny), float(info.smallest_subnormal), float(info.eps), np.inf]
    return np.array([*values, *(-v for v in values), np.nan], np.float64).astype(dtype)


def pairs(dtype: Any, count: int = 400) -> tuple[np.ndarray, np.ndarray]:
    """Every pair of edge values, then random bits."""
    e = edges(dtype)
    random = rng(SEED).integers(0, 256, (2, count * np.dtype(dtype).itemsize), np.uint8).view(dtype)
    return np.concatenate([np.repeat(e, len(e)), random[0]]), np.concatenate([np.tile(e, len(e)), random[1]])


def integer_reference(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    with np.errstate(all="ignore"):
        out = [a + b, a - b, a * b, a // b, a % b, a & b, a | b, a ^ b, np.minimum(a, b), np.maximum(a, b), -a, ~a, np.abs(a)]
    return np.stack(out, 1), np.stack([a == b, a != b, a < b, a <= b, a > b, a >= b], 1)


def float_reference(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """min(x, y) is y where y < x, as in Python: the first of two that do not compare."""
    with np.errstate(all="ignore"):
        out = [a + b, a - b, a * b, a / b, np.where(b < a, b, a), np.where(b > a, b, a), -a, np.abs(a)]
        return np.stack(out, 1), np.stack([a == b, a != b, a < b, a <= b, a > b, a >= b], 1)


def same_floats(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Bit for bit, but any NaN for a NaN."""
    bits = f"u{got.dtype.itemsize}"
    with np.errstate(all="ignore"):
        return (got.view(bits) == want.view(bits)) | (np.isnan(got.astype(np.float64)) & np.isnan(want.astype(np.float64)))


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_wrap_floor_and_compare_as_numpy(device_name: str, name: str) -> None:
    kind, dtype = INTEGERS[name]
    a, b = pairs(dtype)
    blank = np.zeros((len(a), 13), dtype), np.zeros((len(a), 6), bool)
    _, _, got, compared = run(device_name, integer_kernel(kind), a, b, *blank, len(a))
    want, want_compared = integer_reference(a, b)
    for column, op in enumerate(INTEGER_OPS):
        wrong = np.flatnonzero(got[:, column] != want[:, column])
        assert not len(wrong), f"{name} {a[wrong[0]]} {op} {b[wrong[0]]}: {got[wrong[0], column]}, NumPy has {want[wrong[0], column]}"
    np.testing.assert_array_equal(compared, want_compared)


@pytest.mark.parametrize("name", FLOATS)
def test_floats_round_once_as_numpy(device_name: str, name: str) -> None:
    kind, dtype = FLOATS[name]
    a, b = pairs(dtype)
    blank = np.zeros((len(a), 8), dtype), np.zeros((len(a), 6), bool)
    _, _, got, compared = run(device_name, float_kernel(kind), a, b, *blank, len(a))
    want, want_compared = float_reference(a, b)
    for column, op in enumerate(FLOAT_OPS):
        wrong = np.flatnonzero(~same_floats(got[:, column].copy(), want[:, column].astype(dtype)))
        assert not len(wrong), f"{name} {a[wrong[0]]} {op} {b[wrong[0]]}: {got[wrong[0], column]}, NumPy has {want[wrong[0], column]}"
    np.testing.assert_array_equal(compared, want_compared)


@pytest.mark.parametrize("name", ["i32", "u32", "i64", "u64", "i8", "u16"])
@given(data=st.data())
@settings(max_examples=15, deadline=None, print_blob=True, suppress_health_check=list(HealthCheck))
def test_integers_on_values_hypothesis_looks_for(device_name: str, name: str, data: st.DataObject) -> None:
    kind, dtype = INTEGERS[name]
    info = np.iinfo(dtype)
    found = data.draw(st.lists(st.tuples(st.integers(info.min, info.max), st.integers(info.min, info.max)), min_size=1, max_size=40))
    a, b = (np.array(side, dtype) for side in zip(*found, strict=True))
    blank = np.zeros((len(a), 13), dtype), np.zeros((len(a), 6), bool)
    _, _, got, compared = run(device_name, integer_kernel(kind), a, b, *blank, len(a))
    want, want_compared = integer_reference(a, b)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(compared, want_compared)


@functools.cache
def shift_kernel(T: Any) -> Any:
    @ep.kernel
    def shifts(a: ep.Ptr[T], b: ep.Ptr[T], out: ep.Ptr[T], n: ep.i32):
        for i in range(ep.thread_idx.x, n, ep.block_dim.x):
            x, y = a[i], b[i]
            out[i * 4] = x << y
            out[i * 4 + 1] = x >> y
            out[i * 4 + 2] = x >> 3
            out[i * 4 + 3] = 1 << y

    return shifts


@pytest.mark.parametrize("name", INTEGERS)
def test_shifts_follow_the_sign(device_name: str, name: str) -> None:
    kind, dtype = INTEGERS[name]
    bits = np.dtype(dtype).itemsize * 8
    e = edges(dtype)
    a = np.repeat(e, bits)
    b = np.tile(np.arange(bits), len(e)).astype(dtype)
    _, _, got = run(device_name, shift_kernel(kind), a, b, np.zeros((len(a), 4), dtype), len(a))
    np.testing.assert_array_equal(got, np.stack([a << b, a >> b, a >> dtype(3), dtype(1) << b], 1))


@functools.cache
def constant_division_kernel(T: Any, divisor: int) -> Any:
    @ep.kernel
    def divides(a: ep.Ptr[T], out: ep.Ptr[T], n: ep.i32):
        for i in range(ep.thread_idx.x, n, ep.block_dim.x):
            out[i * 2] = a[i] // divisor
            out[i * 2 + 1] = a[i] % divisor

    return divides


DIVISORS = [(n, d) for n in ("i8", "i32", "i64", "u32", "u64") for d in (1, 2, 8, 64, 3, 7, 100, -1, -2, -3) if d > 0 or n[0] == "i"]


@pytest.mark.parametrize(("name", "divisor"), DIVISORS)
def test_division_by_a_constant(device_name: str, name: str, divisor: int) -> None:
    kind, dtype = INTEGERS[name]
    a = np.concatenate([edges(dtype), rng(SEED).integers(0, 256, 64 * np.dtype(dtype).itemsize, np.uint8).view(dtype)])
    _, got = run(device_name, constant_division_kernel(kind, divisor), a, np.zeros((len(a), 2), dtype), len(a))
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(got, np.stack([a // dtype(divisor), a % dtype(divisor)], 1))


# ---- which type an operation has


def operation_kernel(A: Any, B: Any, R: Any) -> Any:
    """A kernel that is refused unless `A + B` is an R."""

    @ep.kernel
    def adds(a: ep.Ptr[A], b: ep.Ptr[B], out: ep.Ptr[R]):
        total = a[0] + b[0]
        out[0] = total
        out[1] = ep.bitcast(R, total)

    return adds


# Where NumPy would leave the integers or invent a type, the author converts.
REFUSED_PAIRS = {frozenset(p) for p in (("i64", "u64"), ("i32", "u64"), ("i16", "u64"), ("i8", "u64"), ("f16", "bf16"))}


@pytest.mark.parametrize("left", TYPES)
def test_mixed_arithmetic_is_numpys_or_refused(left: str) -> None:
    for right in TYPES:
        mixed = (left in INTEGERS) != (right in INTEGERS)
        if mixed or frozenset((left, right)) in REFUSED_PAIRS:
            with pytest.raises(ep.CompileError, match=rf"^EP024: {left} \+ {right} has no common type without losing values"):
                built(operation_kernel(TYPES[left][0], TYPES[right][0], ep.f64))
            continue
        wanted = np.result_type(TYPES[left][1], TYPES[right][1])
        name = next(n for n, (_, dtype) in TYPES.items() if np.dtype(dtype) == wanted)
        built(operation_kernel(TYPES[left][0], TYPES[right][0], TYPES[name][0]))


@ep.kernel
def mixes(a: ep.Ptr[ep.i32], b: ep.Ptr[ep.u32], c: ep.Ptr[ep.i8], sums: ep.Ptr[ep.i64], small: ep.Ptr[ep.i32], n: ep.i32):
    for i in range(ep.thread_idx.x, n, ep.block_dim.x):
        sums[i * 3] = a[i] + b[i]
        sums[i * 3 + 1] = a[i] * b[i]
        sums[i * 3 + 2] = b[i] // a[i]
        small[i] = a[i] + c[i]


def test_mixed_signs_meet_in_the_wider_type(device_name: str) -> None:
    g = rng(SEED)
    a, b, c = g.integers(-(2**31), 2**31, 100, np.int32), g.integers(0, 2**32, 100, np.uint32), g.integers(-128, 128, 100, np.int8)
    *_, sums, small = run(device_name, mixes, a, b, c, np.zeros((100, 3), np.int64), np.zeros(100, np.int32), 100)
    np.testing.assert_array_equal(sums, np.stack([a + b, a * b, b // a], 1))
    np.testing.assert_array_equal(small, a + c)


@functools.cache
def weak_kernel(T: Any) -> Any:
    @ep.kernel
    def weak(a: ep.Ptr[T], out: ep.Ptr[T]):
        x = a[0]
        out[0] = x + 1
        out[1] = 3 - x
        out[2] = x * 2 if x > 2 else 100 * x

    return weak


@pytest.mark.parametrize("name", TYPES)
def test_python_numbers_take_the_other_sides_type(device_name: str, name: str) -> None:
    kind, dtype = TYPES[name]
    _, got = run(device_name, weak_kernel(kind), np.array([1], dtype), np.zeros(3, dtype))
    assert [int(v) for v in got] == [2, 2, 100]


THREE = np.int64(3)
LONG = np.uint64(2**40)


@ep.kernel
def numpy_scalars(a: ep.Ptr[ep.i32], b: ep.Ptr[ep.u32], out: ep.Ptr[ep.i64], wide: ep.Ptr[ep.u64]):
    out[0] = a[0] * THREE
    wide[0] = b[0] + LONG


def test_numpy_scalars_are_as_strong_as_device_values(device_name: str) -> None:
    big, one = np.array([2**31 - 1], np.int32), np.array([1], np.uint32)
    _, _, out, wide = run(device_name, numpy_scalars, big, one, np.zeros(1, np.int64), np.zeros(1, np.uint64))
    assert out[0] == (2**31 - 1) * 3
    assert wide[0] == 2**40 + 1


@ep.kernel
def booleans(a: ep.Ptr[ep.i1], b: ep.Ptr[ep.i1], out: ep.Ptr[ep.i1], counts: ep.Ptr[ep.i32]):
    i = ep.thread_idx.x
    if i < 4:
        x, y = a[i], b[i]
        at = out + i * 6
        at[0] = x & y
        at[1] = x | y
        at[2] = x ^ y
        at[3] = ~x
        at[4] = not x
        at[5] = x == y
        counts[i] = x + y + True


def test_booleans_are_bytes_in_memory(device_name: str) -> None:
    a, b = np.array([0, 0, 1, 1], bool), np.array([0, 1, 0, 1], bool)
    *_, out, counts = run(device_name, booleans, a, b, np.zeros((4, 6), bool), np.zeros(4, np.int32))
    np.testing.assert_array_equal(out, np.stack([a & b, a | b, a ^ b, ~a, ~a, a == b], 1))
    assert counts.tolist() == [1, 2, 2, 3]


def test_any_byte_but_zero_is_true(device_name: str) -> None:
    @ep.kernel
    def reads(flags: ep.Ptr[ep.i1], out: ep.Ptr[ep.i32]):
        out[ep.thread_idx.x] = 1 if flags[ep.thread_idx.x] else 0

    size = 32 if device_name != "sim:amd" else 64
    raw = np.arange(size, dtype=np.uint8)
    _, got = run(device_name, reads, raw.view(bool), np.zeros(size, np.int32))
    np.testing.assert_array_equal(got, (raw != 0).astype(np.int32))


@ep.kernel
def bits(a: ep.Ptr[ep.u32], b: ep.Ptr[ep.u64], out: ep.Ptr[ep.u32], wide: ep.Ptr[ep.u64], n: ep.i32):
    for i in range(ep.thread_idx.x, n, ep.block_dim.x):
        out[i * 2] = ep.popcount(a[i])
        out[i * 2 + 1] = ep.count_trailing_zeros(a[i])
        wide[i * 2] = ep.popcount(b[i])
        wide[i * 2 + 1] = ep.count_trailing_zeros(b[i])


def test_bit_counts(device_name: str) -> None:
    a = np.concatenate([np.array([0, 1, 2, 2**31, 2**32 - 1]), rng(SEED).integers(0, 2**32, 27)]).astype(np.uint32)
    b = (a.astype(np.uint64) << np.uint64(32)) | np.uint64(8) * (a % 2)
    *_, out, wide = run(device_name, bits, a, b, np.zeros((32, 2), np.uint32), np.zeros((32, 2), np.uint64), 32)
    assert out.tolist() == [[v.bit_count(), (v & -v).bit_length() - 1 if v else 32] for v in a.tolist()]
    assert wide.tolist() == [[v.bit_count(), (v & -v).bit_length() - 1 if v else 64] for v in b.tolist()]


@ep.kernel
def roots(a: ep.Ptr[ep.f32], b: ep.Ptr[ep.f64], out: ep.Ptr[ep.f32], wide: ep.Ptr[ep.f64], n: ep.i32):
    for i in range(ep.thread_idx.x, n, ep.block_dim.x):
        out[i * 3] = ep.sqrt(a[i])
        out[i * 3 + 1] = ep.floor(a[i])
        out[i * 3 + 2] = ep.fabs(-a[i])
        wide[i] = ep.sqrt(b[i])


def test_square_roots_are_rounded_correctly(device_name: str) -> None:
    a = np.concatenate([[0.0, 1.0, 2.0, np.inf, 1e-40], rng(SEED).random(59) * 1e6]).astype(np.float32)
    *_, out, wide = run(device_name, roots, a, a.astype(np.float64), np.zeros((64, 3), np.float32), np.zeros(64), 64)
    np.testing.assert_array_equal(out, np.stack([np.sqrt(a), np.floor(a), a], 1))
    np.testing.assert_array_equal(wide, np.sqrt(a.astype(np.float64)))
