"""What the engine's kernels share: words, clocks, findings. All of it is inlined."""

from __future__ import annotations

from typing import Any

import epdsl as ep
from epdsl.ir.types import U64, PtrType
from epdsl.lang.arithmetic import convert, materialize
from epdsl.lang.intrinsic import intrinsic
from epdsl.lang.tracer import Tracer
from epdsl.lang.values import Value
from epdsl.sim.scheduler import host_call

from .layout import (
    F_ADDRESS,
    F_COUNT,
    F_FIRST,
    F_FIRST_LAUNCH,
    F_FIRST_SITE,
    F_FLAGS,
    F_KIND,
    F_SECOND,
    F_SECOND_LAUNCH,
    F_SECOND_SITE,
    F_SIZE,
    F_STEP,
    FINDING_WORDS,
    FLAG_ASYNC,
    INFO_FLAGS,
    K_END,
    K_FINDING_CAPACITY,
    K_FINDINGS,
    K_FORGIVEN,
    K_FOUND,
    K_FULL,
    K_INSPECT,
    K_JOIN,
    K_LAST_NUMBER,
    K_LAST_PAGE,
    K_NEXT,
    K_P0,
    K_P1,
    K_P2,
    K_P3,
    K_PAGE_MASK,
    K_PAGES,
    K_STEPS,
    PAGE_WORDS,
    SCOPE_DEVICE,
    SCOPE_SYSTEM,
    X_BLOCK,
    X_CLOCK,
    X_EPOCH,
    X_RANK,
    X_SEQUENCE,
    X_SITES,
    X_TID,
)

Words = ep.Ptr[ep.u64]
EPOCH_MASK = (1 << 40) - 1
LOW = 0xFFFF_FFFF


@intrinsic
def pointer(t: Tracer, word: Any) -> Any:
    """The words at an address."""
    return Value(PtrType(U64), t.b.op("llvm.inttoptr", [t.b.ptr_global], [convert(t.b, materialize(t.b, word), U64).ir]))


@ep.func
def at(base: Words, index):
    """The words that word `index` points to."""
    return pointer(base[index])


@ep.func
def alloc(k: Words, words: ep.u64):
    """Zeroed words. When there are no more the engine is full: it stops checking and Python raises."""
    found = k[K_NEXT]
    after = found + words * 8
    if after > k[K_END]:
        k[K_FULL] = 1
        found = k[K_END]
        after = k[K_NEXT]
    k[K_NEXT] = after
    return pointer(found)


@ep.func
def join_into(k: Words, holder: Words, clock: ep.u64):
    """Makes the clock that `holder` holds (clock, owned) cover `clock` too."""
    if holder[0] != clock and clock != 0:
        k[K_P0] = ep.u64(holder)
        k[K_P1] = clock
        k[K_P2] = 0
        k[K_P3] = ep.u64(k)
        host_call(k[K_JOIN], ep.u64(k + K_P0), 0)


@ep.func
def learn(k: Words, holder: Words, packed: ep.u64):
    """Makes the clock that `holder` holds cover one lane up to an epoch."""
    k[K_P0] = ep.u64(holder)
    k[K_P1] = 0
    k[K_P2] = packed
    k[K_P3] = ep.u64(k)
    host_call(k[K_JOIN], ep.u64(k + K_P0), 0)


@ep.func
def seen(clock: Words, column: ep.u64, lane: ep.u64):
    """The epoch of a lane up to which `clock` covers it."""
    epoch = ep.u64(0)
    if column < clock[0]:
        entry = clock + 2 + column * 2
        epoch = entry[0]
        if entry[1] != 0:
            epoch = ep.max(epoch, at(entry, 1)[lane])
    return epoch


@ep.func
def ordered(x: Words, packed: ep.u64):
    """Whether an operation of lane and epoch `packed` happens before what the thread does now."""
    result = True
    if packed >> 40 != x[X_TID]:
        result = seen(at(x, X_CLOCK), packed >> 48, (packed >> 40) & 0xFF) >= (packed & EPOCH_MASK)
    return result


@ep.func
def reaches(scope: ep.u64, rank: ep.u64, block: ep.u64, other_rank: ep.u64, other_block: ep.u64):
    """Whether the instance of `scope` around one thread contains another."""
    return scope == SCOPE_SYSTEM or (scope == SCOPE_DEVICE and rank == other_rank) or block == other_block


@ep.func
def inclusive(x: Words, scope: ep.u64, other_scope: ep.u64, other_rank: ep.u64, other_block: ep.u64):
    """Whether each of two operations is in the scope of the other; the first is the thread's."""
    rank, block = x[X_RANK], x[X_BLOCK]
    return reaches(scope, rank, block, other_rank, other_block) and reaches(other_scope, other_rank, other_block, rank, block)


@ep.func
def now(x: Words):
    """The thread's lane and epoch, packed."""
    return (x[X_TID] << 40) | x[X_EPOCH]


@ep.func
def place(x: Words, info: ep.u64):
    """The launch and the global site of what the thread does, packed."""
    return (x[X_SEQUENCE] << 32) | (x[X_SITES] + (info >> 40))


@ep.func
def is_async(info: ep.u64):
    return (info >> INFO_FLAGS) & FLAG_ASYNC != 0


@ep.func
def report(k: Words, x: Words, kind: int, first: ep.u64, first_info: ep.u64, info: ep.u64, address: ep.u64, size: ep.u64, flags: ep.u64):
    """Notes a finding, once for each pair of sites."""
    second_info = place(x, info)
    first_site, second_site = first_info & LOW, second_info & LOW
    entry = at(k, K_FINDINGS)
    found = False
    for _ in range(0, k[K_FOUND]):
        if entry[F_KIND] == kind and entry[F_FIRST_SITE] == first_site and entry[F_SECOND_SITE] == second_site:
            entry[F_COUNT] = entry[F_COUNT] + 1
            found = True
            break
        entry = entry + FINDING_WORDS
    if not found and k[K_FOUND] < k[K_FINDING_CAPACITY]:
        k[K_FOUND] = k[K_FOUND] + 1
        entry[F_KIND] = kind
        entry[F_FIRST] = first
        entry[F_FIRST_SITE] = first_site
        entry[F_FIRST_LAUNCH] = first_info >> 32
        entry[F_SECOND] = now(x)
        entry[F_SECOND_SITE] = second_site
        entry[F_SECOND_LAUNCH] = second_info >> 32
        entry[F_ADDRESS] = address
        entry[F_SIZE] = size
        entry[F_STEP] = k[K_STEPS]
        entry[F_COUNT] = 1
        entry[F_FLAGS] = flags
        if first != 0:
            k[K_P0] = ep.u64(k)
            k[K_P1] = ep.u64(x)
            k[K_P2] = ep.u64(entry)
            host_call(k[K_INSPECT], ep.u64(k + K_P0), 0)
    k[K_FORGIVEN] = k[K_FORGIVEN] + 1


@ep.func
def page_of(k: Words, number: ep.u64, make: int):
    """The shadow of one page of memory; 0 where there is none and `make` is not set."""
    result = k[K_LAST_PAGE]
    if k[K_LAST_NUMBER] != number + 1:
        mask = k[K_PAGE_MASK]
        slot = (number * 0x9E37_79B9_7F4A_7C15 >> 32) & mask
        table = at(k, K_PAGES)
        while table[2 * slot] != 0 and table[2 * slot] != number + 1:
            slot = (slot + 1) & mask
        result = table[2 * slot + 1]
        if make:
            if table[2 * slot] == 0:
                result = ep.u64(alloc(k, PAGE_WORDS))
                table[2 * slot] = number + 1
                table[2 * slot + 1] = result
        if result != 0:
            k[K_LAST_NUMBER] = number + 1
            k[K_LAST_PAGE] = result
    return result
