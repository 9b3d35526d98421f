"""The context: one block of host-visible memory per rank, whose address every kernel gets as its hidden last parameter.

A kernel writes faults (a wait that timed out, an assert that failed), log records (printf) and what it waits for into it; the host reads
them. All fields are 64-bit words. `epdsl.lang.context` writes it, `epdsl_runtime.faults` and `epdsl_runtime.waits` read it.
"""

from __future__ import annotations

# Where in the block the slots of waits begin, in halves of words; 0: they are not to be written. First: its address is the block's own.
WAIT_TABLE = 0
FAULT_COUNT = 1
LOG_COUNT = 2
RANK = 3
HEADER_WORDS = 8

FAULT_CAPACITY = 64
FAULT_WORDS = 8
FAULT_BASE = HEADER_WORDS
FAULT_KIND, FAULT_SITE, FAULT_BLOCK, FAULT_THREAD, FAULT_ADDRESS, FAULT_EXPECTED, FAULT_LAST, FAULT_READY = range(FAULT_WORDS)

KIND_TIMEOUT = 1
KIND_ASSERT = 2

LOG_CAPACITY = 2048
LOG_WORDS = 12
LOG_BASE = FAULT_BASE + FAULT_CAPACITY * FAULT_WORDS
LOG_SITE, LOG_BLOCK, LOG_THREAD, LOG_READY = range(4)
LOG_VALUES = 4
LOG_MAX_VALUES = LOG_WORDS - LOG_VALUES

# Waits that last: what a place's threads wait for at an address is said in one slot (see `waits`).
WAIT_CAPACITY = 256
WAIT_WORDS = 8
WAIT_BASE = LOG_BASE + LOG_CAPACITY * LOG_WORDS
# In halves of words. Two make a word of 64 bits, but for the thread and for the ticks before and behind all.
WAIT_STAMP, WAIT_SITE, WAIT_ADDRESS, WAIT_EXPECTED, WAIT_LAST, WAIT_SINCE, WAIT_THREAD, WAIT_END = 0, 1, 3, 5, 7, 9, 11, 12
# A tick is 2**26 ns, 67 ms; the mask lasts for four years.
WAIT_TICK_BITS = 26
WAIT_TICK_MASK = (1 << 31) - 1
# block << bits | thread
WAIT_THREAD_BITS = 10

CONTEXT_WORDS = WAIT_BASE + WAIT_CAPACITY * WAIT_WORDS
CONTEXT_BYTES = CONTEXT_WORDS * 8
