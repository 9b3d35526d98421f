"""The engine's entry for everything but plain accesses, and the copy engine."""

from __future__ import annotations

import epdsl as ep

from .access import fenced
from .layout import (
    BULK_GROUPS,
    C_ASYNC,
    CELL_SYNC,
    CELL_WORDS,
    FIRST_WRITES,
    FLAG_ASYNC,
    FLAG_CHANGED,
    FLAG_GLOBAL,
    FOUND_PROXY,
    FOUND_RACE,
    FOUND_UNINITIALISED,
    INFO_FLAGS,
    INFO_SITE,
    INFO_SIZE,
    K_ACCESS,
    K_FULL,
    K_HASH,
    K_PROXIES,
    K_STEPS,
    KIND_ATOMIC_LOAD,
    KIND_ATOMIC_STORE,
    KIND_BARRIER_ARRIVE,
    KIND_BARRIER_LEAVE,
    KIND_BULK_COMMIT,
    KIND_BULK_LOAD,
    KIND_BULK_STORE,
    KIND_BULK_WAIT,
    KIND_CAS,
    KIND_EXIT,
    KIND_FENCE,
    KIND_LOAD,
    KIND_NAMED_ARRIVE,
    KIND_NAMED_LEAVE,
    KIND_PHASE,
    KIND_PHASE_MAKE,
    KIND_PHASE_TEST,
    KIND_PROBE,
    KIND_PROXY_FENCE,
    KIND_RMW,
    KIND_START,
    KIND_STORE,
    KIND_WARP_ARRIVE,
    KIND_WARP_LEAVE,
    LOAD_READS,
    LOAD_WRITES,
    PHASE_WORDS,
    Q_CLOCK,
    Q_DONE,
    Q_MADE,
    Q_MADE_INFO,
    Q_OWNED,
    STORE_READS,
    STORE_WRITES,
    X_ADDRESS,
    X_BARRIER,
    X_BULK,
    X_CLOCK,
    X_COLUMN,
    X_COMMITTED,
    X_ENGINE,
    X_EPOCH,
    X_LANE,
    X_LAUNCH,
    X_OLD,
    X_OWNED,
    X_PROXIES,
    X_RESULT,
    X_SELF,
    X_SITES,
    X_TID,
)
from .meet import arrive, finish, leave, start, warp_arrive, warp_leave
from .messages import effective, note_trace, tick, watched
from .order import atomic, fence, probe, settle, word_at
from .words import Words, alloc, at, host_call, join_into, learn, now, ordered, page_of, place, pointer, report


@ep.func
def copied(k: Words, x: Words, info: ep.u64, address: ep.u64, kind: int, nbytes: ep.u64, space: int):
    """Checks one side of a bulk copy. Whether it may be made. `space`: FLAG_GLOBAL or 0."""
    x[1] = address
    x[2] = (info >> 40 << 40) | ((FLAG_ASYNC | space) << INFO_FLAGS) | kind
    x[3] = nbytes
    host_call(k[K_ACCESS], x[X_SELF], 0)
    return x[X_RESULT] == address


@ep.func
def engine_lane(x: Words, part: int):
    """The copy engine's lane for one side of this thread's copies, at the thread's epoch."""
    column = x[X_COLUMN] + at(x, X_LAUNCH)[C_ASYNC] * part
    return (column << 48) | (x[X_LANE] << 40) | x[X_EPOCH]


@ep.func
def phases_of(k: Words, address: ep.u64):
    """What the engine knows of a barrier in shared memory."""
    cell = pointer(page_of(k, address >> 12, 1)) + ((address & 0xFFF) >> 2) * CELL_WORDS
    if cell[CELL_SYNC] == 0:
        cell[CELL_SYNC] = ep.u64(alloc(k, PHASE_WORDS))
    return at(cell, CELL_SYNC)


@ep.func
def made(k: Words, x: Words, phases: Words, info: ep.u64, address: ep.u64, engine: bool):
    """A use of a barrier in shared memory, by the thread or by the copy engine: it comes after the barrier was made."""
    maker = phases[Q_MADE]
    if maker == 0:
        report(k, x, FOUND_UNINITIALISED, 0, 0, info, address, 8, 0)
    elif not ordered(x, maker):
        report(k, x, FOUND_RACE, maker, phases[Q_MADE_INFO], info, address, 8, FIRST_WRITES)
    elif engine:
        if not fenced(k, x, maker, ep.u64(0)):
            report(k, x, FOUND_PROXY, maker, phases[Q_MADE_INFO], info, address, 8, FIRST_WRITES)


@ep.func
def bulk(k: Words, x: Words, info: ep.u64, nbytes: ep.u64, to_shared: bool):
    """A bulk copy: its accesses are the copy engine's, unordered with the thread until it waits for them."""
    target, source, barrier = x[X_ADDRESS], x[X_OLD], x[X_BARRIER]
    good = copied(k, x, info, source, KIND_LOAD, nbytes, FLAG_GLOBAL if to_shared else 0)
    good = copied(k, x, info, target, KIND_STORE, nbytes, 0 if to_shared else FLAG_GLOBAL) and good
    x[X_RESULT] = nbytes if good else ep.u64(0)
    if to_shared:
        phases = phases_of(k, barrier)
        made(k, x, phases, info, barrier, True)
        join_into(k, phases, x[X_CLOCK])
        x[X_OWNED] = 0
        learn(k, phases, engine_lane(x, LOAD_READS))
        learn(k, phases, engine_lane(x, LOAD_WRITES))
        tick(x)


@ep.func
def bulk_wait(k: Words, x: Words, pending: ep.u64, full: ep.u64):
    if x[X_BULK] > pending:
        epoch = x[X_COMMITTED + (x[X_BULK] - pending - 1) % BULK_GROUPS]
        learn(k, x + X_CLOCK, (engine_lane(x, STORE_READS) >> 40 << 40) | epoch)
        if full != 0:
            learn(k, x + X_CLOCK, (engine_lane(x, STORE_WRITES) >> 40 << 40) | epoch)


@ep.func
def phase(k: Words, x: Words, info: ep.u64, address: ep.u64, arrives: ep.u64, flipped: ep.u64, parity: ep.u64):
    """An arrival, or bytes that came. `flipped`: it completed the phase of `parity`."""
    phases = phases_of(k, address)
    if arrives != 0:
        made(k, x, phases, info, address, False)
        join_into(k, phases, x[X_CLOCK])
        x[X_OWNED] = 0
        learn(k, phases, now(x))
        tick(x)
    if flipped != 0:
        phases[Q_DONE + parity] = phases[Q_CLOCK]
        phases[Q_CLOCK] = 0
        phases[Q_OWNED] = 0


@ep.kernel
def sync(x: Words, address: ep.u64, info: ep.u64, value: ep.u64):
    """One event of one thread; see `layout` for the kinds."""
    k = at(x, X_ENGINE)
    x[X_RESULT] = address
    kind = info & 0xFF
    if k[K_FULL] != 0:
        if kind == KIND_ATOMIC_LOAD:
            x[X_RESULT] = word_at(address, (info >> INFO_SIZE) & 0xFF)
    elif kind == KIND_START:
        start(k, x)
    else:
        k[K_STEPS] = k[K_STEPS] + 1
        k[K_HASH] = (k[K_HASH] ^ (x[X_TID] << 24) ^ info) * 0x9E37_79B9_7F4A_7C15
        settle(k, x)
        reads = kind == KIND_ATOMIC_LOAD or kind == KIND_RMW or kind == KIND_CAS
        writes = kind == KIND_ATOMIC_STORE or kind == KIND_RMW or (kind == KIND_CAS and (info >> INFO_FLAGS) & FLAG_CHANGED != 0)
        if reads or writes:
            atomic(k, x, info, value, reads, writes)
        elif kind == KIND_PROBE:
            probe(k, x, info, True)
        elif kind == KIND_FENCE:
            order, scope, dropped = effective(k, x, info)
            if not dropped:
                fence(k, x, order, scope, info)
        elif kind == KIND_BARRIER_ARRIVE:
            arrive(k, x, info, 0, 0)
        elif kind == KIND_BARRIER_LEAVE:
            leave(k, x, info, 0)
        elif kind == KIND_NAMED_ARRIVE:
            arrive(k, x, info, address & 15, value)
        elif kind == KIND_NAMED_LEAVE:
            leave(k, x, info, address & 15)
        elif kind == KIND_WARP_ARRIVE:
            warp_arrive(k, x, info, value)
        elif kind == KIND_WARP_LEAVE:
            warp_leave(k, x, info)
        elif kind == KIND_EXIT:
            finish(k, x, info)
        elif kind == KIND_BULK_LOAD:
            bulk(k, x, info, value, True)
        elif kind == KIND_BULK_STORE:
            bulk(k, x, info, value, False)
        elif kind == KIND_BULK_COMMIT:
            x[X_COMMITTED + x[X_BULK] % BULK_GROUPS] = x[X_EPOCH]
            x[X_BULK] = x[X_BULK] + 1
            tick(x)
        elif kind == KIND_BULK_WAIT:
            bulk_wait(k, x, address, value)
        elif kind == KIND_PROXY_FENCE:
            # `value` is the space: 0 shared, 1 global.
            made_before = at(k, K_PROXIES) + ((x[X_TID] >> 8 << 6 | (x[X_TID] & 63)) * 2 + value)
            node = alloc(k, 2)
            node[0] = made_before[0]
            node[1] = x[X_EPOCH]
            made_before[0] = ep.u64(node)
            x[X_PROXIES + value] = x[X_CLOCK]
            x[X_OWNED] = 0
            tick(x)
        elif kind == KIND_PHASE:
            phase(k, x, info, address, value & 1, (value >> 1) & 1, (value >> 2) & 1)
        elif kind == KIND_PHASE_TEST:
            phases = phases_of(k, address)
            made(k, x, phases, info, address, False)
            before = watched(k, x)
            join_into(k, x + X_CLOCK, phases[Q_DONE + (value & 1)])
            note_trace(k, x, before, x[X_SITES] + (info >> INFO_SITE), ep.u64(0), info)
        elif kind == KIND_PHASE_MAKE:
            phases = phases_of(k, address)
            phases[Q_MADE] = now(x)
            phases[Q_MADE_INFO] = place(x, info)
            tick(x)
