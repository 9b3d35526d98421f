"""Checks of a built kernel that need its whole control flow: barriers that not every thread of a block reaches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mlir import ir

from .errors import CompileError, Place
from .graph import Graph, members

Origins = Callable[[Any], tuple[Place, ...]]

_THREAD_DEPENDENT = ("thread_idx.x", "thread_idx.y", "thread_idx.z", "lane_id", "warp_id")
_SOURCES = ("ep.atomic_rmw", "ep.atomic_cas", "ep.elect")


def verify(function: Any, barriers: Sequence[Any], origins: Origins) -> None:
    """Raises CompileError for a block barrier under a condition that differs by thread.

    barriers  the function's `ep.barrier` operations
    origins   the source lines of a barrier or a branch, the kernel's own first
    """
    if not barriers:
        return
    graph = Graph(function)
    control = _Control(graph)
    for block, barrier in sorted(((graph.number(each.block), each) for each in barriers), key=lambda pair: pair[0]):
        # The innermost of the conditions is the last in the order of the text.
        branch = next((i for i in sorted(control.over(block), reverse=True) if control.differs(i)), None)
        if branch is not None:
            raise CompileError(
                "EP060",
                "a block barrier under a condition that differs by thread: some threads of the block would never arrive",
                "the barrier outside the condition, or ep.group_barrier for a class of warps",
                tuple(("the condition is here", place) for place in origins(graph.terminators[branch])[-1:]),
            ).at(origins(barrier))


class _Control:
    """Which branches decide whether a block runs, and whether threads of a block of threads may differ about them."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        post = graph.post_dominators()
        # For each block, the branches it runs or not depending on, without those that decide about them in turn.
        self._direct: list[list[int]] = [[] for _ in graph.blocks]
        for i, following in enumerate(graph.successors):
            if len(following) > 1:
                for dependent in members(_union(post[s] for s in following) & ~(post[i] & ~(1 << i))):
                    self._direct[dependent].append(i)
        self._uniform: set[Any] = set()
        self._varying: set[Any] = set()

    def over(self, block: int) -> set[int]:
        """The branches a block runs or not depending on, also through one another."""
        found: set[int] = set()
        work = [block]
        while work:
            new = [i for i in self._direct[work.pop()] if i not in found]
            found.update(new)
            work += new
        return found

    def differs(self, branch: int) -> bool:
        """Whether the condition of a branch may differ between the threads of a block."""
        start = self._condition(branch)
        seen = {start}
        work = [start]
        while work:
            value = work.pop()
            causes = None if value in self._varying else self._causes(value)
            if causes is None:
                self._varying.add(start)
                return True
            for cause in causes:
                if cause not in seen and cause not in self._uniform:
                    seen.add(cause)
                    work.append(cause)
        self._uniform |= seen
        return False

    def _condition(self, branch: int) -> Any:
        return self._graph.terminators[branch].operands[0]

    def _causes(self, value: Any) -> Iterable[Any] | None:
        """The values without which this one cannot differ between threads; None for one that differs by itself."""
        if not isinstance(value, ir.BlockArgument):
            operation = value.owner
            if _is_source(operation):
                return None
            return () if operation.name == "ep.poll" else operation.operands
        block = self._graph.number(value.owner)
        before = self._graph.predecessors[block]
        given = {self._graph.terminators[i].operands[value.arg_number] for i in before if self._graph.terminators[i].name == "cf.br"}
        # Threads that come from different sides bring different values.
        branches = {branch for i in before for branch in self._direct[i]} if len(given) > 1 else ()
        return [*given, *map(self._condition, branches)]


def _union(sets: Iterable[int]) -> int:
    found = 0
    for each in sets:
        found |= each
    return found


def _is_source(operation: Any) -> bool:
    if operation.name == "ep.special":
        return operation.attributes["name"].value in _THREAD_DEPENDENT
    return operation.name in _SOURCES
