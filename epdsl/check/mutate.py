"""Mutants: a kernel with one thing weakened."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from epdsl.compiler import CompileRequest

_requests: dict[tuple[str, str, tuple[tuple[str, str], ...]], CompileRequest] = {}


def remember(request: CompileRequest) -> None:
    """Keeps how a checked kernel was compiled, so that it can be compiled again with a change."""
    _requests[request.name, request.target.name, tuple(sorted(request.constant_texts.items()))] = request
