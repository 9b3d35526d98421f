"""Token formats in NumPy and ml_dtypes, element by element. Shares no code with the kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
E2M1 = np.dtype(ml_dtypes.float4_e2m1fn)
GROUPS = {"fp8": 128, "mxfp8": 32, "mxfp4": 32, "nvfp4": 16}
SCALE_ROUNDING = {"mxfp8": "ceil", "mxfp4": "even"}


@dataclass(frozen=True)
class Quantized:
    """Rows in a format.

    codes   u8 [n, bytes]: elements; two e2m1 a byte, the first in the lower half
    scales  [n, groups]: f32 for fp8, e8m0 or e4m3 codes in u8 otherwise; None for bf16
    """

    codes: NDArray[np.uint8]
    scales: NDArray[Any] | None


def e4m3_codes(x: NDArray[Any]) -> NDArray[np.uint8]:
    """f32 to e4m3: nearest even, saturating, NaN as 0x7F."""
    with np.errstate(invalid="ignore"):
        codes = np.clip(x.astype(np.float32), np.float32(-448), np.float32(448)).astype(E4M3).view(np.uint8)
    return np.where(np.isnan(x), np.uint8(0x7F), codes)


def e2m1_codes(x: NDArray[Any]) -> NDArray[np.uint8]:
    """f32 to e2m1: nearest even, saturating, NaN as 7 (6.0)."""
    with np.errstate(invalid="ignore"):
        codes = np.clip(x.astype(np.float32), np.float32(-6), np.float32(6)).astype(E2M1).view(np.uint8) & 15
    return np.where(np.isnan(x), np.uint8(7), codes)


def pack_nibbles(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return (codes[:, 0::2] | (codes[:, 1::2] << 4)).astype(np.uint8)


def unpack_nibbles(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(packed.shape[0], 2 * packed.shape[1]).astype(np.uint8)


def _largest(x: NDArray[Any], group: int) -> NDArray[np.float32]:
    """Largest magnitude of each group [n, groups]; NaN does not count."""
    grouped = np.abs(x.astype(np.float32)).reshape(x.shape[0], x.shape[1] // group, group)
    return np.max(np.where(np.isnan(grouped), np.float32(0), grouped), axis=2, initial=np.float32(0))


def _frexp_exponent(x: NDArray[Any]) -> NDArray[np.int64]:
    """floor(log2(x)) of positive finite numbers."""
    return np.frexp(x.astype(np.float64))[1].astype(np.int64) - 1


def e8m0_codes(largest: NDArray[np.float32], fmt: str, rounding: str) -> NDArray[np.uint8]:
    """Scales of groups with these largest magnitudes, as published for the rounding."""
    top, exponent, mantissa = {"mxfp8": (448.0, 8, 3), "mxfp4": (6.0, 2, 1)}[fmt]
    infinite = np.isinf(largest)
    if rounding == "ceil":
        value = (largest / np.float32(top)).astype(np.float64)
        fraction, power = np.frexp(np.where(infinite, 1.0, value))
        log = np.where(fraction == 0.5, power - 1, power)
        log = np.where(value == 0, -127, log)
        return np.where(infinite, 254, np.clip(log, -127, 127) + 127).astype(np.uint8)
    value = np.where(infinite, np.float32(2.0**127), largest)
    lowest = value < 2.0**-126
    log = _frexp_exponent(np.where(lowest, 1.0, value))
    if rounding == "even":
        # Half a unit of the element's last place, added to the significand, may carry into the exponent.
        significand = value / np.exp2(log.astype(np.float64))
        log = log + (significand + 2.0 ** (-mantissa - 1) >= 2)
        # Below the normal range the addition of a fixed bit pattern reaches it only from half a binade below the smallest normal.
        lowest = lowest & (value.astype(np.float64) + 2.0 ** (-126 - mantissa - 1) < 2.0**-126)
        log = np.where(value < 2.0**-126, -126, log)
    log = np.where(infinite, 128, log)
    return np.where(lowest, 0, np.clip(log - exponent, -127, 127) + 127).astype(np.uint8)


def e8m0_values(codes: NDArray[np.uint8]) -> NDArray[np.float32]:
    return np.ldexp(np.float32(1), codes.astype(np.int32) - 127).astype(np.float32)


def quantize(fmt: str, x: NDArray[Any], input_scale: float = 1.0, rounding: str | None = None) -> Quantized:
    """bf16 rows [n, H] in a format."""
    if fmt == "bf16":
        return Quantized(np.ascontiguousarray(x).view(np.uint8), None)
    group = GROUPS[fmt]
    single = x.astype(np.float32)
    largest = _largest(x, group)
    with np.errstate(all="ignore"):
        if fmt == "fp8":
            largest = np.maximum(largest, np.float32(1e-4))
            scales, factor = largest / np.float32(448), np.float32(448) / largest
        elif fmt == "nvfp4":
            overall = np.float32(input_scale)
            scales = e4m3_codes((overall * largest) / np.float32(6))
            wide = scales.view(E4M3).astype(np.float32)
            factor = np.where(scales == 0, np.float32(0), np.float32(1) / (wide / overall))
        else:
            scales = e8m0_codes(largest, fmt, rounding or SCALE_ROUNDING[fmt])
            factor = np.ldexp(np.float32(1), 127 - scales.astype(np.int32)).astype(np.float32)
        scaled = single * np.repeat(factor, group, axis=1)
    if fmt in ("fp8", "mxfp8"):
        return Quantized(e4m3_codes(scaled), scales)
    codes = e2m1_codes(scaled)
    if fmt == "nvfp4":
        codes = np.where(np.repeat(scales == 0, group, axis=1), np.uint8(0), codes)
    return Quantized(pack_nibbles(codes), scales)


def dequantize(fmt: str, rows: Quantized, input_scale: float = 1.0) -> NDArray[np.float32]:
    """Rows of a format as f32 [n, H]: element times scale, rounded once."""
    if fmt == "bf16":
        return rows.codes.view(ml_dtypes.bfloat16).astype(np.float32)
    assert rows.scales is not None
    if fmt in ("fp8", "mxfp8"):
        elements = rows.codes.view(E4M3).astype(np.float32)
    else:
        elements = unpack_nibbles(rows.codes).view(E2M1).astype(np.float32)
    if fmt == "fp8":
        scales = rows.scales
    elif fmt == "nvfp4":
        scales = rows.scales.view(E4M3).astype(np.float32) / np.float32(input_scale)
    else:
        scales = e8m0_values(rows.scales)
    return elements * np.repeat(scales, GROUPS[fmt], axis=1)


def gather_scales(fmt: str, scales: NDArray[Any], row_offsets: NDArray[Any], counts: NDArray[Any], tiled: bool) -> NDArray[Any]:
    """A dispatch's output scales back in order of output rows [row_offsets[-1], groups]; rows that are padding are 0.

    tiled  scales lie in tiles of 128 x 4, each expert's from the next free tile on: tiles of [32][4][4], row = 32 * i1 + i0
    """
    total = int(row_offsets[-1])
    if not tiled:
        return scales[:, :total].T if fmt == "fp8" else scales[:total]
    columns = scales.shape[1] * 4
    out = np.zeros((total, columns), scales.dtype)
    tile = 0
    for start, count in zip(row_offsets, counts, strict=False):
        for row in range(int(count)):
            block = scales[tile + row // 128]
            out[int(start) + row] = block[:, row % 32, row // 32 % 4, :].ravel()
        tile += -(-int(count) // 128)
    return out
