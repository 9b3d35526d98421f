"""Blockwise FP8 as it travels in a dispatch: 128 elements share one f32 scale. Device functions on 8 elements a thread.

A scale is max(absmax, 1e-4) / 448, an element x becomes e4m3 of x / scale, rounded to nearest even (DeepSeek-V3, section 3.3).
"""

from __future__ import annotations

from typing import Any

import epdsl as ep

from .rounding import e4m3_pair, floats_of

GROUP = 128
LANES = GROUP // 8
WIDE_LANES = GROUP // 16
LARGEST = 448.0
SMALLEST = 1e-4


@ep.func
def quantise(v: ep.vec(ep.u32, 4)):  # pyright: ignore[reportInvalidTypeForm]
    """Eight bf16 as eight e4m3 (two words) and the scale of the 128-element group the thread's half warp holds."""
    largest = largest_of(v, ep.f32(SMALLEST))
    for step in (8, 4, 2, 1):
        largest = ep.max(largest, ep.shfl_xor(largest, step))
    words = codes_of(v, LARGEST / largest)
    return ep.vec(ep.u32, 2)(words[0], words[1]), largest * (1.0 / LARGEST)


@ep.func
def quantise_wide(v: ep.vec(ep.u32, 4), w: ep.vec(ep.u32, 4)):  # pyright: ignore[reportInvalidTypeForm]
    """Sixteen bf16 as sixteen e4m3 (four words) and the scale of the 128-element group that eight neighbouring threads hold."""
    largest = largest_of(w, largest_of(v, ep.f32(SMALLEST)))
    for step in (4, 2, 1):
        largest = ep.max(largest, ep.shfl_xor(largest, step))
    inverse = LARGEST / largest
    low, high = codes_of(v, inverse), codes_of(w, inverse)
    return ep.vec(ep.u32, 4)(low[0], low[1], high[0], high[1]), largest * (1.0 / LARGEST)


@ep.func
def largest_of(v: ep.vec(ep.u32, 4), floor: ep.f32):  # pyright: ignore[reportInvalidTypeForm]
    """The largest magnitude of eight bf16, at least `floor`."""
    largest = floor
    for i in ep.unroll(range(4)):
        low, high = floats_of(v[i])
        largest = ep.max(largest, ep.max(ep.fabs(low), ep.fabs(high)))
    return largest


@ep.func
def codes_of(v: ep.vec(ep.u32, 4), inverse: ep.f32):  # pyright: ignore[reportInvalidTypeForm]
    """Eight bf16 times `inverse` as e4m3, two words."""
    words: tuple[Any, ...] = ()
    for i in ep.unroll(range(2)):
        a, b = floats_of(v[2 * i])
        c, d = floats_of(v[2 * i + 1])
        words = (*words, ep.u32(e4m3_pair(a * inverse, b * inverse)) | (ep.u32(e4m3_pair(c * inverse, d * inverse)) << 16))
    return words
