"""Sums of a token's rows, eight elements (16 bytes of bf16) a thread. Device functions shared by the combines."""

from __future__ import annotations

from typing import Any

import epdsl as ep

from .rounding import eight_floats

EIGHT = tuple(range(8))


@ep.func
def zeros8():
    return tuple(ep.f32(0.0) for _ in EIGHT)


@ep.func
def plus8(a, b):
    return tuple(a[i] + b[i] for i in EIGHT)


@ep.func
def weighted_sum(y: ep.Ptr[ep.u32], rows, weights, vectors: int, v: ep.i32):
    """Sum over k of weights[k] * y[rows[k]], eight f32 of piece `v`, in order of k; a row below 0 counts nothing."""
    # All loads first, so that they are in flight together.
    pieces: tuple[Any, ...] = ()
    for row in rows:
        piece = ep.vec(ep.u32, 4)(ep.u32(0))
        if row >= 0:
            piece = ep.load(y + (ep.i64(row) * vectors + v) * 4, width=4)
        pieces = (*pieces, piece)
    total = zeros8()
    for k in ep.unroll(range(len(rows))):
        values = eight_floats(pieces[k])
        total = tuple(total[i] + weights[k] * values[i] for i in EIGHT)
    return total


@ep.func
def as_bf16(total):
    """Eight f32 as eight bf16 in four words."""
    words: tuple[Any, ...] = ()
    for i in ep.unroll(range(4)):
        low = ep.bitcast(ep.u16, ep.bf16(total[2 * i]))
        high = ep.bitcast(ep.u16, ep.bf16(total[2 * i + 1]))
        words = (*words, ep.u32(low) | (ep.u32(high) << 16))
    return ep.vec(ep.u32, 4)(words[0], words[1], words[2], words[3])
