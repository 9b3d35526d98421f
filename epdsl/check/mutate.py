"""Mutants: a kernel with operations taken out, compiled again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from epdsl_runtime.artifact import Artifact

if TYPE_CHECKING:
    from epdsl.compiler import CompileRequest

# (kernel, target, its constants)
Identity = tuple[str, str, tuple[tuple[str, str], ...]]

_requests: dict[Identity, CompileRequest] = {}


def identity(artifact: Artifact) -> Identity:
    """What tells a compiled kernel from every other one, in every process."""
    return (artifact.name, artifact.target, tuple(sorted(artifact.constants.items())))


def remember(request: CompileRequest) -> None:
    """Keeps how a checked kernel was compiled, so that it can be compiled again with a change."""
    _requests[request.name, request.target.name, tuple(sorted(request.constant_texts.items()))] = request


def erase(artifact: Artifact, numbers: Sequence[int]) -> Artifact:
    """The kernel without its operations `numbers` (see `AccessSite`), which have no result.

    Raises LookupError when the artifact was not compiled for checking in this process.
    """
    from epdsl.compiler import compile_kernel

    request = _requests.get(identity(artifact))
    if request is None:
        raise LookupError(f"{artifact.name} for {artifact.target} was not compiled in this process, so it cannot be compiled with a change")

    def change(module: Any) -> None:
        function = module.body.operations[0].operation.regions[0].blocks[0].operations[0].operation
        operations = [view.operation for block in function.regions[0].blocks for view in block.operations]
        for number in numbers:
            operations[number].erase()

    return compile_kernel(request, change)
