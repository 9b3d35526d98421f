"""Errors a kernel author sees. They are raised below too, so they are defined in `epdsl.ir.errors`."""

from __future__ import annotations

from epdsl.ir.errors import FAULT_OF_OURS, CompileError, Place

__all__ = ["FAULT_OF_OURS", "CompileError", "Place"]
