"""What a kernel writes into its context block for the host: faults and log records (see epdsl_runtime.context_layout)."""

from __future__ import annotations

from typing import Any

from epdsl_runtime import context_layout as layout

from .function import func
from .library import flat_block, flat_thread
from .loops import Unroll as unroll
from .memory import DEVICE, RELAXED, RELEASE, SYSTEM, atomic_add, store
from .types import Ptr, u64


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
