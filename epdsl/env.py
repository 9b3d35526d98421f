"""The environment variables of epdsl (the table is in `epdsl_runtime.env`, which a cluster image has without the compiler)."""

from __future__ import annotations

from epdsl_runtime.env import (
    ARCH,
    CACHE_DIR,
    DEBUG,
    DEVICE,
    DUMP,
    DUMP_DIR,
    OVERRIDE_DIR,
    PORT,
    TIMEOUT_NS,
    TUNED_DIR,
    VARIABLES,
    VERIFY,
    Row,
    Variable,
    describe,
)

__all__ = [
    "ARCH",
    "CACHE_DIR",
    "DEBUG",
    "DEVICE",
    "DUMP",
    "DUMP_DIR",
    "OVERRIDE_DIR",
    "PORT",
    "TIMEOUT_NS",
    "TUNED_DIR",
    "VARIABLES",
    "VERIFY",
    "Row",
    "Variable",
    "describe",
]
