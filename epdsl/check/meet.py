"""Where threads meet: block, named and warp barriers, and the beginning and end of threads."""

from __future__ import annotations

from epdsl_runtime import sim_layout as sim

import epdsl as ep

from .layout import (
    B_EXITED,
    B_EXITED_WARPS,
    BLOCK_MEETINGS,
    BLOCK_WARPS,
    BLOCK_WORDS,
    C_BLOCKS,
    C_CLOCK,
    C_COLUMN,
    C_END,
    C_RANK,
    C_SEQUENCE,
    C_SHARED,
    C_SITES,
    C_WARPS,
    FLAG_ARRIVE,
    FOUND_BARRIER_COUNT,
    FOUND_DIVERGENT_BARRIER,
    INFO_FLAGS,
    INFO_SITE,
    K_ACCESS,
    K_LANES,
    K_OVERRIDES,
    KIND_ALLOCATE,
    M_CLOCK,
    M_COUNT,
    M_DONE,
    M_EPOCH,
    M_GENERATION,
    M_OWNED,
    M_SITE,
    M_WANTED,
    M_WARPS,
    MEETING_WORDS,
    OVERRIDE_DROP,
    S_CLOCK,
    S_EPOCH,
    S_LEFT,
    S_MASK,
    S_OWNED,
    S_STATE,
    SLOT_WORDS,
    STATE_FREE,
    STATE_LEAVING,
    STATE_MEETING,
    WARP_SLOTS,
    X_BLOCK,
    X_BULK,
    X_CLOCK,
    X_COLUMN,
    X_EPOCH,
    X_INDEX,
    X_LANE,
    X_LAUNCH,
    X_OVERFLOW,
    X_OWNED,
    X_PENDING,
    X_PROXIES,
    X_RANK,
    X_RELEASE,
    X_SELF,
    X_SEQUENCE,
    X_SITES,
    X_SLOT,
    X_STALE_ADDRESS,
    X_STALE_COUNT,
    X_THREAD,
    X_TID,
    X_WAIT_OBJECT,
)
from .messages import note_trace, watched
from .words import Words, alloc, at, host_call, join_into, learn, now, pointer, report


@ep.func
def block_of(x: Words):
    """What the engine knows of the thread's block."""
    launch = at(x, X_LAUNCH)
    return pointer(at(launch, C_BLOCKS)[(x[X_BLOCK] & 0xFFFFF) - 1])


@ep.func
def start(k: Words, x: Words):
    """A thread begins: ordered after everything its launch is ordered after."""
    thread = at(x, X_THREAD)
    block = at(thread, sim.T_BLOCK)
    launch = at(thread, sim.T_LAUNCH)
    c = at(x, X_LAUNCH)
    index = block[sim.B_X] + launch[sim.L_GX] * (block[sim.B_Y] + launch[sim.L_GY] * block[sim.B_Z])
    warp, lane = thread[sim.T_WARP], thread[sim.T_LANE]
    column = c[C_COLUMN] + index * c[C_WARPS] + warp
    x[X_COLUMN] = column
    x[X_LANE] = lane
    x[X_TID] = (column << 8) | lane
    x[X_INDEX] = warp
    x[X_CLOCK] = c[C_CLOCK]
    x[X_OWNED] = 0
    clock = at(c, C_CLOCK)
    level = ep.u64(0)
    if column < clock[0]:
        level = clock[2 + 2 * column]
    x[X_EPOCH] = level + 1
    x[X_RANK] = c[C_RANK]
    x[X_SEQUENCE] = c[C_SEQUENCE]
    x[X_SITES] = c[C_SITES]
    x[X_BLOCK] = (c[C_SEQUENCE] << 20) | (index + 1)
    x[X_PENDING] = 0
    x[X_WAIT_OBJECT] = 0
    x[X_OVERFLOW] = 0
    x[X_BULK] = 0
    x[X_STALE_ADDRESS] = 0
    x[X_STALE_COUNT] = 0
    for i in range(6):
        x[X_RELEASE + i] = 0
    for i in range(2):
        x[X_PROXIES + i] = 0
    table = at(c, C_BLOCKS)
    if table[index] == 0:
        table[index] = ep.u64(alloc(k, BLOCK_WORDS))
        if c[C_SHARED] != 0:
            x[1] = block[sim.B_SHARED]
            x[2] = KIND_ALLOCATE
            x[3] = c[C_SHARED]
            host_call(k[K_ACCESS], x[X_SELF], 0)


@ep.func
def finish(k: Words, x: Words, info: ep.u64):
    """A thread ends: the launch's end is ordered after it."""
    c = at(x, X_LAUNCH)
    join_into(k, c + C_END, x[X_CLOCK])
    learn(k, c + C_END, now(x))
    level = at(c, C_END) + 2 + 2 * x[X_COLUMN]
    level[0] = ep.max(level[0], x[X_EPOCH])
    block = block_of(x)
    block[B_EXITED] = block[B_EXITED] + 1
    block[B_EXITED_WARPS] = block[B_EXITED_WARPS] | (ep.u64(1) << x[X_INDEX])
    meeting = block + BLOCK_MEETINGS
    faulted = at(at(x, X_THREAD), sim.T_BLOCK)[sim.B_FAULTED]
    if meeting[M_COUNT] != 0 and faulted == 0:
        report(k, x, FOUND_DIVERGENT_BARRIER, 0, (x[X_SEQUENCE] << 32) | meeting[M_SITE], info, 0, 0, 1)


@ep.func
def complete(k: Words, x: Words, meeting: Words):
    """Everyone has come: their common clock covers all that each did."""
    base = x[X_COLUMN] - x[X_INDEX]
    epoch = meeting[M_EPOCH]
    exited = block_of(x)[B_EXITED_WARPS]
    warps = meeting[M_WARPS] & (exited ^ 0xFFFF_FFFF_FFFF_FFFF)
    if warps != 0:
        # Makes the clock one that may be changed.
        first = ep.count_trailing_zeros(warps)
        learn(k, meeting, ((base + first) << 48) | epoch)
        clock = at(meeting, M_CLOCK)
        for w in range(ep.u64(0), ep.u64(64)):
            if (warps >> w) & 1:
                entry = clock + 2 + 2 * (base + w)
                if meeting[M_OWNED] != 0:
                    entry[0] = ep.max(entry[0], epoch)
                    entry[1] = 0
    generation = meeting[M_GENERATION]
    done = meeting + M_DONE + 2 * (generation & 3)
    done[0] = meeting[M_CLOCK]
    done[1] = epoch
    meeting[M_GENERATION] = generation + 1
    meeting[M_CLOCK] = 0
    meeting[M_OWNED] = 0
    meeting[M_EPOCH] = 0
    meeting[M_COUNT] = 0
    meeting[M_WARPS] = 0


@ep.func
def dropped(k: Words, x: Words, info: ep.u64):
    return at(k, K_OVERRIDES)[x[X_SITES] + (info >> INFO_SITE)] & OVERRIDE_DROP != 0


@ep.func
def arrive(k: Words, x: Words, info: ep.u64, number: ep.u64, wanted: ep.u64):
    """A thread comes to a barrier. `wanted` is 0 for the block's own."""
    block = block_of(x)
    meeting = block + BLOCK_MEETINGS + number * MEETING_WORDS
    site = x[X_SITES] + (info >> INFO_SITE)
    if meeting[M_COUNT] == 0:
        meeting[M_SITE] = site
        meeting[M_WANTED] = wanted
    elif wanted != 0 and meeting[M_WANTED] != wanted:
        report(k, x, FOUND_BARRIER_COUNT, meeting[M_WANTED], (x[X_SEQUENCE] << 32) | meeting[M_SITE], info, number, wanted, 0)
    elif wanted == 0 and meeting[M_SITE] != site:
        report(k, x, FOUND_DIVERGENT_BARRIER, 0, (x[X_SEQUENCE] << 32) | meeting[M_SITE], info, 0, 0, 0)
    x[X_SLOT] = meeting[M_GENERATION]
    meeting[M_COUNT] = meeting[M_COUNT] + 1
    if not dropped(k, x, info):
        join_into(k, meeting, x[X_CLOCK])
        x[X_OWNED] = 0
        if (info >> INFO_FLAGS) & FLAG_ARRIVE != 0:
            # It goes on by itself, and may have ended when the others come.
            learn(k, meeting, now(x))
        else:
            if (block[B_EXITED_WARPS] >> x[X_INDEX]) & 1:
                learn(k, meeting, now(x))
            meeting[M_EPOCH] = ep.max(meeting[M_EPOCH], x[X_EPOCH])
            meeting[M_WARPS] = meeting[M_WARPS] | (ep.u64(1) << x[X_INDEX])
        x[X_EPOCH] = x[X_EPOCH] + 1
    if wanted != 0 and meeting[M_COUNT] == wanted:
        complete(k, x, meeting)


@ep.func
def leave(k: Words, x: Words, info: ep.u64, number: ep.u64):
    """A thread goes on after a barrier, ordered after everyone's arrival."""
    meeting = block_of(x) + BLOCK_MEETINGS + number * MEETING_WORDS
    if meeting[M_GENERATION] == x[X_SLOT]:
        complete(k, x, meeting)
    done = meeting + M_DONE + 2 * (x[X_SLOT] & 3)
    if not dropped(k, x, info) and done[0] != 0:
        before = watched(k, x)
        x[X_CLOCK] = done[0]
        x[X_OWNED] = 0
        x[X_EPOCH] = done[1] + 1
        note_trace(k, x, before, x[X_SITES] + (info >> INFO_SITE), ep.u64(0), info)


@ep.func
def slots_of(x: Words):
    return block_of(x) + BLOCK_WARPS + x[X_INDEX] * (WARP_SLOTS * SLOT_WORDS)


@ep.func
def warp_arrive(k: Words, x: Words, info: ep.u64, mask: ep.u64):
    """A lane comes to a warp barrier of `mask`."""
    slots = slots_of(x)
    chosen = ep.u64(WARP_SLOTS)
    for i in ep.unroll(range(WARP_SLOTS)):
        slot = slots + i * SLOT_WORDS
        if slot[S_STATE] == STATE_MEETING and slot[S_MASK] == mask:
            chosen = ep.u64(i)
    if chosen == WARP_SLOTS:
        for i in ep.unroll(range(WARP_SLOTS)):
            if slots[i * SLOT_WORDS + S_STATE] == STATE_FREE:
                chosen = ep.u64(i)
    x[X_SLOT] = chosen
    if chosen < WARP_SLOTS:
        slot = slots + chosen * SLOT_WORDS
        if slot[S_STATE] == STATE_FREE:
            slot[S_STATE] = STATE_MEETING
            slot[S_MASK] = mask
            slot[S_CLOCK] = 0
            slot[S_OWNED] = 0
            slot[S_EPOCH] = 0
            slot[S_LEFT] = 0
        slot[S_LEFT] = slot[S_LEFT] + 1
        if not dropped(k, x, info):
            join_into(k, slot + S_CLOCK, x[X_CLOCK])
            x[X_OWNED] = 0
            slot[S_EPOCH] = ep.max(slot[S_EPOCH], x[X_EPOCH])


@ep.func
def warp_leave(k: Words, x: Words, info: ep.u64):
    """A lane goes on after a warp barrier, ordered after the other lanes' arrival."""
    if x[X_SLOT] < WARP_SLOTS:
        slot = slots_of(x) + x[X_SLOT] * SLOT_WORDS
        if slot[S_STATE] == STATE_MEETING:
            slot[S_STATE] = STATE_LEAVING
            mask, epoch = slot[S_MASK], slot[S_EPOCH]
            if epoch != 0:
                lanes = k[K_LANES]
                learn(k, slot + S_CLOCK, (x[X_COLUMN] << 48) | (x[X_LANE] << 40) | epoch)
                entry = at(slot, S_CLOCK) + 2 + 2 * x[X_COLUMN]
                if mask == 0xFFFF_FFFF_FFFF_FFFF >> (64 - lanes):
                    if slot[S_OWNED] != 0:
                        entry[0] = ep.max(entry[0], epoch)
                        entry[1] = 0
                else:
                    for i in range(0, lanes):
                        if (mask >> i) & 1:
                            learn(k, slot + S_CLOCK, (x[X_COLUMN] << 48) | (i << 40) | epoch)
        slot[S_LEFT] = slot[S_LEFT] - 1
        if not dropped(k, x, info) and slot[S_EPOCH] != 0:
            before = watched(k, x)
            x[X_CLOCK] = slot[S_CLOCK]
            x[X_OWNED] = 0
            x[X_EPOCH] = slot[S_EPOCH] + 1
            note_trace(k, x, before, x[X_SITES] + (info >> INFO_SITE), ep.u64(0), info)
        if slot[S_LEFT] == 0:
            slot[S_STATE] = STATE_FREE
