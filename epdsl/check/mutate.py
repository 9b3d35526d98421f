"""Mutants: a kernel with one operation taken out, compiled again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from epdsl_runtime.artifact import Artifact

if TYPE_CHECKING:
    from epdsl.compiler import CompileRequest

_requests: dict[tuple[str, str, tuple[tuple[str, str], ...]], CompileRequest] = {}


def remember(request: CompileRequest) -> None:
    """Keeps how a checked kernel was compiled, so that it can be compiled again with a change."""
    _requests[request.name, request.target.name, tuple(sorted(request.constant_texts.items()))] = request


def erase(artifact: Artifact, number: int) -> Artifact:
    """The kernel without its operation `number` (see `AccessSite`), which has no result.

    Raises KeyError when the artifact was not compiled for checking in this process.
    """
    from epdsl.compiler import compile_kernel

    request = _requests[artifact.name, artifact.target, tuple(sorted(artifact.constants.items()))]

    def change(module: Any) -> None:
        function = module.body.operations[0].operation.regions[0].blocks[0].operations[0].operation
        operations = [view.operation for block in function.regions[0].blocks for view in block.operations]
        operations[number].erase()

    return compile_kernel(request, change)
