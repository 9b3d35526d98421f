"""Checks of a built kernel that need its whole control flow: barriers that not every thread of a block reaches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .errors import CompileError, Place
from .graph import Graph, members

Origins = Callable[[Any], tuple[Place, ...]]

_THREAD_DEPENDENT = ("thread_idx.x", "thread_idx.y", "thread_idx.z", "lane_id", "warp_id")
_SOURCES = ("ep.atomic_rmw", "ep.atomic_cas", "ep.elect")


def verify(function: Any, origins: Origins) -> None:
    """Raises CompileError for a block barrier under a condition that differs by thread.

    origins  the source lines of a barrier or a branch, the kernel's own first
    """
    blocks = list(function.regions[0].blocks)
    barriers = [(i, op.operation) for i, block in enumerate(blocks) for op in block.operations if op.operation.name == "ep.barrier"]
    if not barriers:
        return
    graph = Graph(function)
    post = graph.post_dominators()
    # Blocks that run or not depending on the branch at the end of block i.
    controls = {
        i: _union(post[s] for s in following) & ~(post[i] & ~(1 << i)) for i, following in enumerate(graph.successors) if len(following) > 1
    }
    varying = _varying(graph, controls)
    differing = [(i, _dependents(controls, i)) for i in controls if graph.terminators[i].operands[0] in varying]
    for block, barrier in barriers:
        # The innermost of the conditions is the last in the order of the text.
        branch = max((i for i, dependent in differing if dependent >> block & 1), default=None)
        if branch is not None:
            raise CompileError(
                "EP060",
                "a block barrier under a condition that differs by thread: some threads of the block would never arrive",
                "the barrier outside the condition, or ep.group_barrier for a class of warps",
                tuple(("the condition is here", place) for place in origins(graph.terminators[branch])[-1:]),
            ).at(origins(barrier))


def _dependents(controls: dict[int, int], branch: int) -> int:
    """Blocks that run or not depending on a branch, also through the branches among them."""
    found, work = 0, [branch]
    while work:
        new = controls.get(work.pop(), 0) & ~found
        found |= new
        work += members(new)
    return found


def _union(sets: Any) -> int:
    found = 0
    for each in sets:
        found |= each
    return found


def _varying(graph: Graph, controls: dict[int, int]) -> set[Any]:
    """Values that may differ between the threads of a block."""
    users: dict[Any, list[Any]] = {}
    varying: set[Any] = set()
    work: list[Any] = []

    def mark(value: Any) -> None:
        if value not in varying:
            varying.add(value)
            work.append(value)

    for block in graph.blocks:
        for op in block.operations:
            operation = op.operation
            for value in operation.operands:
                users.setdefault(value, []).append(operation)
            if _is_source(operation):
                mark(operation.results[0])
    branches = {graph.terminators[i]: dependent for i, dependent in controls.items()}
    while work:
        value = work.pop()
        for user in users.get(value, ()):
            if user in branches:
                for merge in members(_merges(graph, branches[user])):
                    for argument in _unequal_arguments(graph, merge):
                        mark(argument)
            elif user.name == "cf.br":
                for argument, passed in zip(user.successors[0].arguments, user.operands, strict=True):
                    if passed == value:
                        mark(argument)
            elif user.name != "ep.poll":
                for result in user.results:
                    mark(result)
    return varying


def _merges(graph: Graph, dependent: int) -> int:
    """Blocks that threads enter from different sides when they differ about running `dependent`."""
    return _union(1 << s for i in members(dependent) for s in graph.successors[i])


def _unequal_arguments(graph: Graph, target: int) -> list[Any]:
    """Arguments of a block that its predecessors give different values."""
    arguments = list(graph.blocks[target].arguments)
    given = [list(graph.terminators[i].operands) for i in graph.predecessors[target] if graph.terminators[i].name == "cf.br"]
    return [argument for k, argument in enumerate(arguments) if len({operands[k] for operands in given}) > 1]


def _is_source(operation: Any) -> bool:
    if operation.name == "ep.special":
        return operation.attributes["name"].value in _THREAD_DEPENDENT
    return operation.name in _SOURCES
