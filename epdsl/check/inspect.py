"""What else is known when two accesses turn out not to be ordered: whether a block barrier would have ordered them."""

from __future__ import annotations

import epdsl as ep

from .layout import (
    C_ASYNC,
    C_CLOCK,
    C_COLUMN,
    C_WARPS,
    F_FIRST,
    F_FIRST_LAUNCH,
    F_FLAGS,
    FIRST_BLOCK_KNOWN,
    K_LANES,
    K_LAUNCHES,
    SAME_BLOCK,
    SECOND_BLOCK_KNOWS,
    THREAD_WORDS,
    X_CLOCK,
    X_COLUMN,
    X_INDEX,
    X_LANE,
    X_LAUNCH,
    X_SEQUENCE,
)
from .words import EPOCH_MASK, Words, at, pointer, seen


@ep.kernel
def inspect(k: Words, x: Words, entry: Words):
    """Adds FIRST_BLOCK_KNOWN, SECOND_BLOCK_KNOWS and SAME_BLOCK to a finding."""
    packed, sequence = entry[F_FIRST], entry[F_FIRST_LAUNCH]
    lanes = k[K_LANES]
    flags = entry[F_FLAGS]
    if sequence != 0:
        c = pointer(at(k, K_LAUNCHES)[sequence])
        column = packed >> 48
        warps = c[C_WARPS]
        offset = column - c[C_COLUMN]
        if c[C_ASYNC] != 0:
            offset = offset % c[C_ASYNC]
        base = c[C_COLUMN] + offset // warps * warps
        mine = at(x, X_CLOCK)
        start = at(c, C_CLOCK)
        for w in range(0, warps):
            level = ep.u64(0)
            if base + w < start[0]:
                level = start[2 + 2 * (base + w)]
            for i in range(0, lanes):
                if seen(mine, base + w, i) > level:
                    flags = flags | FIRST_BLOCK_KNOWN
        if x[X_SEQUENCE] == sequence and base == x[X_COLUMN] - x[X_INDEX]:
            flags = flags | SAME_BLOCK
    if x[X_SEQUENCE] != 0:
        # The threads of a block lie one after the other.
        own = at(x, X_LAUNCH)
        first = x - ep.i64((x[X_INDEX] * lanes + x[X_LANE]) * THREAD_WORDS)
        for t in range(0, own[C_WARPS] * lanes):
            other = first + t * THREAD_WORDS
            if other != x and other[X_CLOCK] != 0:
                if seen(at(other, X_CLOCK), packed >> 48, (packed >> 40) & 0xFF) >= (packed & EPOCH_MASK):
                    flags = flags | SECOND_BLOCK_KNOWS
    entry[F_FLAGS] = flags
