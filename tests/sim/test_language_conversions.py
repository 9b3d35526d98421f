"""`ep.T(x)` between all scalar types against NumPy and ml_dtypes, bit for bit; 16- and 8-bit floats over every code."""

from __future__ import annotations

import functools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from language_run import rng, run

import epdsl as ep

# Values outside a type's range are converted on purpose; what has no value is not compared.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered", "ignore:overflow encountered")

TYPES: dict[str, tuple[Any, Any]] = {
    "i1": (ep.i1, np.bool_), "i8": (ep.i8, np.int8), "i16": (ep.i16, np.int16), "i32": (ep.i32, np.int32), "i64": (ep.i64, np.int64),
    "u8": (ep.u8, np.uint8), "u16": (ep.u16, np.uint16), "u32": (ep.u32, np.uint32), "u64": (ep.u64, np.uint64),
    "f16": (ep.f16, np.float16), "bf16": (ep.bf16, ml_dtypes.bfloat16), "f32": (ep.f32, np.float32), "f64": (ep.f64, np.float64),
    "f8e4m3": (ep.f8e4m3, ml_dtypes.float8_e4m3fn), "f8e5m2": (ep.f8e5m2, ml_dtypes.float8_e5m2),
}  # fmt: skip
SMALL = ("f16", "bf16", "f8e4m3", "f8e5m2")
FLOATS = (*SMALL, "f32", "f64")
SEED = 20261130


@functools.cache
def kernel(name: str) -> Any:
    """Converts each value to every type."""
    S = TYPES[name][0]

    @ep.kernel
    def converts(
        source: ep.Ptr[S], n: ep.i32,
        b: ep.Ptr[ep.i1], i8: ep.Ptr[ep.i8], i16: ep.Ptr[ep.i16], i32: ep.Ptr[ep.i32], i64: ep.Ptr[ep.i64],
        u8: ep.Ptr[ep.u8], u16: ep.Ptr[ep.u16], u32: ep.Ptr[ep.u32], u64: ep.Ptr[ep.u64],
        f16: ep.Ptr[ep.f16], bf16: ep.Ptr[ep.bf16], f32: ep.Ptr[ep.f32], f64: ep.Ptr[ep.f64],
        f8e4m3: ep.Ptr[ep.f8e4m3], f8e5m2: ep.Ptr[ep.f8e5m2],
    ):  # fmt: skip
        for i in range(ep.thread_idx.x, n, ep.block_dim.x):
            x = source[i]
            b[i] = ep.i1(ep.f32(x) if name in ("f8e4m3", "f8e5m2") else x)
            i8[i], i16[i], i32[i], i64[i] = ep.i8(x), ep.i16(x), ep.i32(x), ep.i64(x)
            u8[i], u16[i], u32[i], u64[i] = ep.u8(x), ep.u16(x), ep.u32(x), ep.u64(x)
            f16[i], bf16[i], f32[i], f64[i] = ep.f16(x), ep.bf16(x), ep.f32(x), ep.f64(x)
            f8e4m3[i], f8e5m2[i] = ep.f8e4m3(x), ep.f8e5m2(x)

    return converts


def sources(name: str) -> np.ndarray:
    dtype = np.dtype(TYPES[name][1])
    if name == "i1":
        return np.array([False, True])
    if dtype.itemsize <= 2:
        codes = np.arange(1 << 8 * dtype.itemsize, dtype=np.uint32).astype(f"u{dtype.itemsize}")
        return codes.view(dtype)
    g = rng(SEED)
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        small = np.arange(-300 if info.min else 0, 300)
        near = [info.min, info.min + 1, info.max - 1, info.max, 2**24 + 1, 2**25 + 3, 65519, 65520, 2**31 - 1]
        return np.concatenate([small, near, g.integers(info.min, info.max, 600, dtype, endpoint=True)]).astype(dtype)
    bits = g.integers(0, 256, 3000 * dtype.itemsize, np.uint8).view(dtype)
    mid = (g.standard_normal(3000) * np.exp2(g.integers(-30, 40, 3000))).astype(dtype)
    # Halfway between two values of each narrower type, and a little to either side.
    halves = np.concatenate([_midpoints(n) for n in SMALL]).astype(dtype)
    beside = [halves, np.nextafter(halves, dtype.type(np.inf)), np.nextafter(halves, dtype.type(-np.inf))]
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 448, 464, 480, 57344, 61440, 65504, 65519, 65520, 2**-149, 2**-126], dtype)
    return np.concatenate([bits, mid, *beside, special])


def _midpoints(name: str) -> np.ndarray:
    dtype = TYPES[name][1]
    codes = np.arange(1 << 8 * np.dtype(dtype).itemsize, dtype=np.uint32).astype(f"u{np.dtype(dtype).itemsize}").view(dtype)
    values = codes.astype(np.float64)
    values = np.unique(values[np.isfinite(values)])
    middle = (values[1:] + values[:-1]) / 2
    return middle[rng(SEED).permutation(len(middle))[:400]]


def in_range(source: np.ndarray, target: str) -> np.ndarray:
    """Whether a conversion has a value: a float outside an integer's range has none."""
    dtype = np.dtype(TYPES[target][1])
    if dtype.kind not in "iu" or source.dtype.kind in "iub":
        return np.ones(len(source), bool)
    wide = np.trunc(source.astype(np.float64))
    info = np.iinfo(dtype)
    return np.isfinite(wide) & (wide >= float(info.min)) & (wide < float(info.max) + 1)


def reference(source: np.ndarray, target: str) -> np.ndarray:
    dtype = np.dtype(TYPES[target][1])
    with np.errstate(all="ignore"):
        if source.dtype.kind in "iu" and target in SMALL:
            # Through f32, as NumPy and ml_dtypes do.
            return source.astype(np.float32).astype(dtype)
        if target == "i1":
            return source.astype(np.float64) != 0
        return source.astype(dtype)


@pytest.mark.parametrize("name", TYPES)
def test_conversions(device_name: str, name: str) -> None:
    source = sources(name)
    blanks = [np.zeros(len(source), dtype) for _, dtype in TYPES.values()]
    _, *results = run(device_name, kernel(name), source, len(source), *blanks, block=128)
    for target, got in zip(TYPES, results, strict=True):
        want = reference(source, target)
        if target in FLOATS:
            bits = f"u{got.dtype.itemsize}"
            with np.errstate(all="ignore"):
                equal = (got.view(bits) == want.view(bits)) | (np.isnan(got.astype(np.float64)) & np.isnan(want.astype(np.float64)))
        else:
            equal = (got == want) | ~in_range(source, target)
        wrong = np.flatnonzero(~equal)
        shown = [(source[i], got[i], want[i]) for i in wrong[:3]]
        assert not len(wrong), f"{name} to {target}: {len(wrong)} of {len(source)} differ, (source, got, NumPy's): {shown}"


@ep.kernel
def constants(a: ep.Ptr[ep.f8e4m3], b: ep.Ptr[ep.bf16], c: ep.Ptr[ep.f16], d: ep.Ptr[ep.f8e5m2], e: ep.Ptr[ep.u8]):
    a[0], a[1] = 1.5, ep.f8e4m3(-448)
    b[0], b[1] = 1.00390625, ep.bf16(3)
    c[0], c[1] = 0.1, ep.f16(65519)
    d[0], d[1] = 0.1, ep.f8e5m2(ep.f32(1e9))
    e[0], e[1] = ep.u8(3.99), 255


def test_constants_become_the_type_asked_for(device_name: str) -> None:
    dtypes = ("f8e4m3", "bf16", "f16", "f8e5m2", "u8")
    a, b, c, d, e = run(device_name, constants, *(np.zeros(2, TYPES[n][1]) for n in dtypes))
    assert a.view(np.uint8).tolist() == [0x3C, 0xFE]
    assert b.view(np.uint16).tolist() == [0x3F80, 0x4040]
    assert c.view(np.uint16).tolist() == [0x2E66, 0x7BFF]
    assert d.view(np.uint8).tolist() == [0x2E, 0x7C]
    assert e.tolist() == [3, 255]


@ep.kernel
def casts(a: ep.Ptr[ep.u32], b: ep.Ptr[ep.u64], f: ep.Ptr[ep.f32], d: ep.Ptr[ep.f64], h: ep.Ptr[ep.bf16], s: ep.Ptr[ep.i32], n: ep.i32):
    for i in range(ep.thread_idx.x, n, ep.block_dim.x):
        f[i] = ep.bitcast(ep.f32, a[i])
        s[i] = ep.bitcast(ep.i32, a[i])
        d[i] = ep.bitcast(ep.f64, b[i])
        h[i] = ep.bitcast(ep.bf16, ep.u16(a[i]))
        a[i] = ep.bitcast(ep.u32, ep.bitcast(ep.f32, a[i])) ^ 1


def test_bitcasts_keep_every_bit(device_name: str) -> None:
    a, b = rng(SEED).integers(0, 2**32, 64).astype(np.uint32), rng(SEED).integers(0, 2**63, 64).astype(np.uint64)
    blanks = np.zeros(64, np.float32), np.zeros(64), np.zeros(64, ml_dtypes.bfloat16), np.zeros(64, np.int32)
    flipped, _, f, d, h, s = run(device_name, casts, a, b, *blanks, 64)
    np.testing.assert_array_equal(flipped, a ^ 1)
    np.testing.assert_array_equal(f.view(np.uint32), a)
    np.testing.assert_array_equal(d.view(np.uint64), b)
    np.testing.assert_array_equal(h.view(np.uint16), a.astype(np.uint16))
    np.testing.assert_array_equal(s.view(np.uint32), a)
