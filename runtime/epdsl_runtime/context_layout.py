"""The context: one block of host-visible memory per rank, whose address every kernel gets as its hidden last parameter.

A kernel writes faults (a wait that timed out, an assert that failed) and log records (printf) into it; the host reads them.
All fields are 64-bit words. `epdsl.lang.context` writes it, `epdsl_runtime.faults` reads it.
"""

from __future__ import annotations

RANK = 0
FAULT_COUNT = 1
LOG_COUNT = 2
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

CONTEXT_WORDS = LOG_BASE + LOG_CAPACITY * LOG_WORDS
CONTEXT_BYTES = CONTEXT_WORDS * 8
