"""What else is known when two accesses turn out not to be ordered: whether a block barrier would have ordered them."""

from __future__ import annotations

import epdsl as ep

from .layout import (
    B_WAITED,
    B_WAITED_INFO,
    B_WAITED_STORE,
    B_WAITED_WRITER,
    C_ASYNC,
    C_COLUMN,
    C_WARPS,
    F_FIRST,
    F_FIRST_LAUNCH,
    F_FLAGS,
    F_WAITED,
    F_WAITED_INFO,
    F_WAITED_STORE,
    F_WAITED_WRITER,
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
from .meet import block_of
from .words import EPOCH_MASK, Words, at, pointer, seen


@ep.kernel
def inspect(k: Words, x: Words, entry: Words):
    """Adds to a finding FIRST_BLOCK_KNOWN, SECOND_BLOCK_KNOWS, SAME_BLOCK and the latest wait of the second's block."""
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
        for w in range(0, warps):
            for i in range(0, lanes):
                # Threads of a block have the same epoch after a barrier, so an earlier one is from before the first access.
                if seen(mine, base + w, i) >= packed & EPOCH_MASK:
                    flags = flags | FIRST_BLOCK_KNOWN
        if x[X_SEQUENCE] == sequence and base == x[X_COLUMN] - x[X_INDEX]:
            flags = flags | SAME_BLOCK
    if x[X_SEQUENCE] != 0:
        block = block_of(x)
        entry[F_WAITED] = block[B_WAITED]
        entry[F_WAITED_INFO] = block[B_WAITED_INFO]
        entry[F_WAITED_WRITER] = block[B_WAITED_WRITER]
        entry[F_WAITED_STORE] = block[B_WAITED_STORE]
        # The threads of a block lie one after the other.
        own = at(x, X_LAUNCH)
        first = x - ep.i64((x[X_INDEX] * lanes + x[X_LANE]) * THREAD_WORDS)
        for t in range(0, own[C_WARPS] * lanes):
            other = first + t * THREAD_WORDS
            if other != x and other[X_CLOCK] != 0:
                if seen(at(other, X_CLOCK), packed >> 48, (packed >> 40) & 0xFF) >= (packed & EPOCH_MASK):
                    flags = flags | SECOND_BLOCK_KNOWS
    entry[F_FLAGS] = flags
