"""Joining clocks: the one operation everything that orders threads is made of."""

from __future__ import annotations

import epdsl as ep

from .layout import K_COLUMNS, K_LANES
from .words import EPOCH_MASK, Words, alloc, at, pointer


@ep.func
def adds(k: Words, level: ep.u64, mine: ep.u64, theirs: ep.u64, own: Words, other: Words):
    """Whether a column of another clock covers a lane further than ours."""
    more = False
    if theirs != 0 and theirs != mine:
        for i in range(0, k[K_LANES]):
            have = level
            if mine != 0:
                have = ep.max(level, own[i])
            if other[i] > have:
                more = True
                break
    return more


@ep.func
def owned(k: Words, holder: Words):
    """The holder's clock as one that may be changed, with room for every column."""
    clock = at(holder, 0)
    if holder[1] == 0 or clock[0] < k[K_COLUMNS]:
        size = k[K_COLUMNS]
        made = alloc(k, 2 + 2 * size)
        made[0] = size
        if holder[0] != 0:
            for i in range(0, 2 * clock[0]):
                made[2 + i] = clock[2 + i]
        holder[0] = ep.u64(made)
        holder[1] = 1
        clock = made
    return clock


@ep.kernel
def join(holder: Words, source: ep.u64, packed: ep.u64, k: Words):
    """Makes the held clock cover `source`, or one lane at one epoch (`packed`)."""
    lanes = k[K_LANES]
    if source != 0:
        if holder[0] == 0:
            holder[0] = source
            holder[1] = 0
        else:
            theirs = pointer(source)
            count = theirs[0]
            mine = at(holder, 0)
            have = mine[0]
            first = ep.u64(0)
            # Nothing is copied where nothing is new.
            while first < count:
                s = theirs + 2 + first * 2
                if first >= have:
                    if s[0] != 0 or s[1] != 0:
                        break
                else:
                    d = mine + 2 + first * 2
                    if s[0] > d[0] or adds(k, d[0], d[1], s[1], at(d, 1), at(s, 1)):
                        break
                first += 1
            if first < count:
                clock = owned(k, holder)
                for c in range(first, count):
                    s = theirs + 2 + c * 2
                    d = clock + 2 + c * 2
                    level = ep.max(s[0], d[0])
                    if s[1] != d[1]:
                        if d[1] == 0:
                            if adds(k, level, ep.u64(0), s[1], at(d, 1), at(s, 1)):
                                d[1] = s[1]
                        elif adds(k, level, d[1], s[1], at(d, 1), at(s, 1)):
                            made = alloc(k, lanes)
                            a, b = at(d, 1), at(s, 1)
                            for i in range(0, lanes):
                                made[i] = ep.max(a[i], b[i])
                            d[1] = ep.u64(made)
                    if level > d[0]:
                        d[0] = level
                        if d[1] != 0 and not adds(k, level, ep.u64(0), d[1], at(d, 1), at(d, 1)):
                            d[1] = 0
    if packed != 0:
        column, lane, epoch = packed >> 48, (packed >> 40) & 0xFF, packed & EPOCH_MASK
        clock = owned(k, holder)
        d = clock + 2 + column * 2
        if d[0] < epoch:
            behind = True
            if d[1] != 0:
                behind = at(d, 1)[lane] < epoch
            if behind:
                made = alloc(k, lanes)
                if d[1] != 0:
                    a = at(d, 1)
                    for i in range(0, lanes):
                        made[i] = a[i]
                made[lane] = epoch
                d[1] = ep.u64(made)
