"""Blockwise FP8 as it travels in a dispatch: 128 elements share one f32 scale. Device functions on 8 elements a thread.

A scale is max(absmax, 1e-4) / 448, an element x becomes e4m3 of x / scale, rounded to nearest even (DeepSeek-V3, section 3.3).
"""

from __future__ import annotations

from typing import Any

import epdsl as ep

from .rounding import e4m3_pair, floats_of

GROUP = 128
LANES = GROUP // 8
LARGEST = 448.0
SMALLEST = 1e-4


@ep.func
def quantise(v: ep.vec(ep.u32, 4)):  # pyright: ignore[reportInvalidTypeForm]
    """Eight bf16 as eight e4m3 (two words) and the scale of the 128-element group the thread's half warp holds."""
    largest = ep.f32(SMALLEST)
    for i in ep.unroll(range(4)):
        low, high = floats_of(v[i])
        largest = ep.max(largest, ep.max(ep.fabs(low), ep.fabs(high)))
    for step in (8, 4, 2, 1):
        largest = ep.max(largest, ep.shfl_xor(largest, step))
    scale = largest * (1.0 / LARGEST)
    inverse = LARGEST / largest
    words: tuple[Any, ...] = ()
    for i in ep.unroll(range(2)):
        a, b = floats_of(v[2 * i])
        c, d = floats_of(v[2 * i + 1])
        words = (*words, ep.u32(e4m3_pair(a * inverse, b * inverse)) | (ep.u32(e4m3_pair(c * inverse, d * inverse)) << 16))
    return ep.vec(ep.u32, 2)(words[0], words[1]), scale
