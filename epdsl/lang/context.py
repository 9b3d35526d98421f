"""What a kernel writes into its context block for the host: faults, log records, waits (see epdsl_runtime.context_layout)."""

from __future__ import annotations

from typing import Any

from epdsl_runtime import context_layout as layout

from .function import func
from .library import flat_block, flat_thread
from .loops import Unroll as unroll
from .memory import DEVICE, RELAXED, RELEASE, SYSTEM, atomic_add, atomic_cas, fence, load, store
from .types import Ptr, i32, u32, u64


@func
def write_fault(context: Ptr[u64], kind: int, site: int, address: u64, expected: u64, last: u64):
    # RELAXED: the slot number alone matters; the record is published by the RELEASE store of its READY word,
    # which pairs with the host's read after the kernel has ended.
    slot = atomic_add(context + layout.FAULT_COUNT, u64(1), order=RELAXED, scope=DEVICE)
    if slot < layout.FAULT_CAPACITY:
        record = context + (layout.FAULT_BASE + slot * layout.FAULT_WORDS)
        record[layout.FAULT_KIND] = kind
        record[layout.FAULT_SITE] = site
        record[layout.FAULT_BLOCK] = u64(flat_block())
        record[layout.FAULT_THREAD] = u64(flat_thread())
        record[layout.FAULT_ADDRESS] = address
        record[layout.FAULT_EXPECTED] = expected
        record[layout.FAULT_LAST] = last
        store(record + layout.FAULT_READY, u64(1), order=RELEASE, scope=SYSTEM)


@func
def write_log(context: Ptr[u64], site: int, values: Any):
    # The same pairing as in write_fault. Records past the capacity are only counted.
    slot = atomic_add(context + layout.LOG_COUNT, u64(1), order=RELAXED, scope=DEVICE)
    if slot < layout.LOG_CAPACITY:
        record = context + (layout.LOG_BASE + slot * layout.LOG_WORDS)
        record[layout.LOG_SITE] = site
        record[layout.LOG_BLOCK] = u64(flat_block())
        record[layout.LOG_THREAD] = u64(flat_thread())
        for i in unroll(range(len(values))):
            record[layout.LOG_VALUES + i] = values[i]
        store(record + layout.LOG_READY, u64(1), order=RELEASE, scope=SYSTEM)


@func
def write_wait(context: Ptr[u64], site: int, address: u64, expected: u64, last: u64, since: u64, now: i32):
    """Says that this thread waits, where the host wants to know, unless another has said so in the same slot since the last tick.

    site   tag and number of the place. Number and address choose the slot: neighbouring words have slots of their own, and those of the
           next place are 89 further.
    since  globaltimer when the wait began; `now` the same now, in ticks (see context_layout)
    """
    # RELAXED: alone. The host writes it before the first launch.
    table = load(context.cast(u32) + layout.WAIT_TABLE, order=RELAXED, scope=SYSTEM)
    if table != 0:
        # What follows is made of a value that was just read, or it would be computed, and kept in registers, ahead of the kernel's loops.
        at = u32(address) + table
        slot = ((at >> 2) ^ (at >> 10) ^ u32((site & 0xFFFF) * 89)) & (layout.WAIT_CAPACITY - 1)
        # In halves, so that each takes one register: kernels are compiled to the last one.
        record = context.cast(i32) + (table + slot * (2 * layout.WAIT_WORDS))
        # RELAXED: an old value makes the exchange below fail, nothing else. Pairs with that exchange in other threads.
        before = load(record + layout.WAIT_STAMP, order=RELAXED, scope=SYSTEM)
        if before < now:
            # RELAXED: the slot is ours until the next tick; the fence orders it. Pairs with the exchange of other threads, and with the
            # host's read of the stamp after the record (waits.read).
            if atomic_cas(record + layout.WAIT_STAMP, before, now, order=RELAXED, scope=SYSTEM) == before:
                # With the host's reads of the words below: who sees one of them sees the stamp.
                fence(order=RELEASE, scope=SYSTEM)
                words = (site, address, expected, last, since)
                for i in unroll(range(2 * len(words))):
                    # RELAXED, not plain: the host may be reading. Pairs with its read of the word.
                    store(record + (layout.WAIT_SITE + i), i32(u64(words[i // 2]) >> 32 * (i % 2)), order=RELAXED, scope=SYSTEM)
                thread = u32(flat_block()) << layout.WAIT_THREAD_BITS | u32(flat_thread())
                # The same.
                store(record + layout.WAIT_THREAD, i32(thread), order=RELAXED, scope=SYSTEM)
                # Pairs with the host's read of the word before the record (waits.read): who sees it sees the record.
                store(record + layout.WAIT_END, now, order=RELEASE, scope=SYSTEM)
