"""A kernel's control-flow graph: dominators and post-dominators, as bit sets of block numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

FAULT = "ep.fault"


class Graph:
    """The blocks of one function, numbered in their order, without the ways out of failed waits and asserts.

    blocks       MLIR blocks
    terminators  the last operation of each
    successors   numbers of the blocks that may follow each
    predecessors numbers of the blocks each may follow
    """

    def __init__(self, function: Any) -> None:
        self.blocks = list(function.regions[0].blocks)
        self._number = {hash(block): i for i, block in enumerate(self.blocks)}
        self.terminators = [block.operations[len(block.operations) - 1].operation for block in self.blocks]
        self.successors = [self._next(t) for t in self.terminators]
        self.predecessors: list[list[int]] = [[] for _ in self.blocks]
        for i, following in enumerate(self.successors):
            for s in dict.fromkeys(following):
                self.predecessors[s].append(i)

    def number(self, block: Any) -> int:
        return self._number[hash(block)]

    def _next(self, terminator: Any) -> list[int]:
        found = [self.number(block) for block in terminator.successors]
        return found[1:] if FAULT in terminator.attributes else found

    def dominators(self) -> list[int]:
        """For each block, the blocks on every path from the entry to it, itself included. All blocks where there is no path."""
        return _fixed_point(range(len(self.blocks)), self.predecessors, {0})

    def post_dominators(self) -> list[int]:
        """For each block, the blocks on every path from it to an end, itself included. All blocks where there is no path."""
        ends = {i for i, following in enumerate(self.successors) if not following}
        return _fixed_point(range(len(self.blocks) - 1, -1, -1), self.successors, ends)


def fault_exits(function: Any) -> set[int]:
    """Numbers of the blocks in which the ways out of failed waits and asserts begin."""
    graph = Graph(function)
    return {graph.number(t.successors[0]) for t in graph.terminators if FAULT in t.attributes}


def _fixed_point(order: Sequence[int], neighbours: Sequence[Sequence[int]], roots: set[int]) -> list[int]:
    everything = (1 << len(neighbours)) - 1
    found = [1 << i if i in roots else everything for i in range(len(neighbours))]
    changed = True
    while changed:
        changed = False
        for i in order:
            if i in roots or not neighbours[i]:
                continue
            common = everything
            for n in neighbours[i]:
                common &= found[n]
            common |= 1 << i
            if common != found[i]:
                found[i] = common
                changed = True
    return found


def members(bits: int) -> list[int]:
    """The numbers in a bit set."""
    found: list[int] = []
    while bits:
        lowest = bits & -bits
        found.append(lowest.bit_length() - 1)
        bits ^= lowest
    return found
