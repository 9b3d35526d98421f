"""Errors a kernel author sees. They are raised below too, so they are defined in `epdsl.ir.errors`."""

from __future__ import annotations

from epdsl.ir.errors import CompileError, Place

__all__ = ["CompileError", "Place"]
