"""Checks of a built kernel that need its whole control flow: barriers that not every thread of a block reaches."""

from __future__ import annotations

import re
from typing import Any

from epdsl.lang.errors import CompileError, Place

_THREAD_DEPENDENT = ("thread_idx.x", "thread_idx.y", "thread_idx.z", "lane_id", "warp_id")
_FILE = re.compile(r'"(?P<file>[^"]+)":(?P<line>\d+):(?P<column>\d+)')


def verify(module: Any) -> None:
    """Raises CompileError for a block barrier under a condition that differs by thread."""
    for function in module.body.operations[0].regions[0].blocks[0].operations:
        if function.operation.name == "gpu.func":
            _barriers(function.operation)


class _Graph:
    """A kernel's blocks, without the ways out of failed waits and asserts."""

    def __init__(self, function: Any) -> None:
        self.blocks = list(function.regions[0].blocks)
        self.number = {hash(block): i for i, block in enumerate(self.blocks)}
        self.terminators = [block.operations[len(block.operations) - 1].operation for block in self.blocks]
        self.successors = [self._next(t) for t in self.terminators]

    def _next(self, terminator: Any) -> list[int]:
        found = [self.number[hash(block)] for block in terminator.successors]
        return found[1:] if "ep.fault" in terminator.attributes else found

    def post_dominators(self) -> list[set[int]]:
        """For each block, the blocks every path from it to the end passes."""
        count = len(self.blocks)
        everything = set(range(count))
        found = [everything if following else {i} for i, following in enumerate(self.successors)]
        changed = True
        while changed:
            changed = False
            for i in range(count - 1, -1, -1):
                if not self.successors[i]:
                    continue
                common = set.intersection(*(found[s] for s in self.successors[i])) | {i}
                if common != found[i]:
                    found[i] = common
                    changed = True
        return found


def _barriers(function: Any) -> None:
    graph = _Graph(function)
    barriers = [(i, op.operation) for i, block in enumerate(graph.blocks) for op in block.operations if op.operation.name == "ep.barrier"]
    if not barriers:
        return
    post = graph.post_dominators()
    # Blocks that run or not depending on the branch at the end of block i.
    controls: dict[int, set[int]] = {}
    for i, following in enumerate(graph.successors):
        if len(following) > 1:
            controls[i] = {b for s in following for b in post[s]} - (post[i] - {i})
    varying = _varying(graph, controls)
    for block, barrier in barriers:
        for i, dependent in controls.items():
            if block in dependent and graph.terminators[i].operands[0] in varying:
                raise _error(barrier, graph.terminators[i])


def _varying(graph: _Graph, controls: dict[int, set[int]]) -> set[Any]:
    """Values that may differ between the threads of a block."""
    varying: set[Any] = set()
    divergent: set[int] = set()
    work = True
    while work:
        before = len(varying), len(divergent)
        for i, block in enumerate(graph.blocks):
            for op in block.operations:
                operation = op.operation
                if not operation.results:
                    continue
                if _is_source(operation) or (operation.name != "ep.poll" and any(v in varying for v in operation.operands)):
                    varying.update(operation.results)
            terminator = graph.terminators[i]
            if i in controls and terminator.operands[0] in varying:
                divergent |= controls[i]
            if terminator.name == "cf.br":
                target = terminator.successors[0]
                number = graph.number[hash(target)]
                for argument, value in zip(target.arguments, terminator.operands, strict=True):
                    if value in varying or (i in divergent and _differs(graph, number, argument, value)):
                        varying.add(argument)
        work = (len(varying), len(divergent)) != before
    return varying


def _differs(graph: _Graph, target: int, argument: Any, value: Any) -> bool:
    """Whether another way into the block brings another value."""
    position = argument.arg_number
    for i, terminator in enumerate(graph.terminators):
        if terminator.name == "cf.br" and target in graph.successors[i] and terminator.operands[position] != value:
            return True
    return False


def _is_source(operation: Any) -> bool:
    if operation.name == "ep.special":
        return operation.attributes["name"].value in _THREAD_DEPENDENT
    return operation.name in ("ep.atomic_rmw", "ep.atomic_cas", "ep.elect")


def _error(barrier: Any, branch: Any) -> CompileError:
    places = _places(barrier)
    error = CompileError(
        "a block barrier under a condition that differs by thread: some threads of the block would never arrive",
        "the barrier outside the condition, or ep.group_barrier for a class of warps",
        tuple(("the condition is here", place) for place in _places(branch)[-1:]),
    )
    return error.at(places)


def _places(operation: Any) -> tuple[Place, ...]:
    """The source lines of an operation, the kernel's own first."""
    import linecache

    found: list[Place] = []
    for match in _FILE.finditer(str(operation.location)):
        line, column = int(match["line"]), int(match["column"]) - 1
        text = linecache.getline(match["file"], line).rstrip("\n")
        found.append(Place(match["file"], line, column, len(text), "the kernel", text))
    return tuple(reversed(found))
