"""Where the lanes of an AMD wave part and meet again around code that waits: what the simulator needs to run a wave in lockstep."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .graph import FAULT, Graph, members

_WAITING = ("ep.poll", "ep.yield")


@dataclass(frozen=True)
class Parting:
    """A conditional branch with a wait on one of its sides. All are block numbers.

    block   the branch is this block's last operation
    join    every way on leads through this block: there the lanes meet again
    first   the side that runs first, 0 or 1: one that waits, so that a wait for a lane on the other side is a deadlock
    """

    block: int
    join: int
    first: int


def partings(function: Any) -> list[Parting]:
    """The branches of a function whose sides wait."""
    graph = Graph(function)
    waits = [any(op.operation.name in _WAITING for op in block.operations) for block in graph.blocks]
    if not any(waits):
        return []
    post = graph.post_dominators()
    found: list[Parting] = []
    for i, following in enumerate(graph.successors):
        if len(following) < 2 or FAULT in graph.terminators[i].attributes:
            continue
        join = _nearest(post, i)
        if join is None:
            continue
        sides = [any(waits[b] for b in _until(graph, s, join)) for s in following]
        if any(sides):
            found.append(Parting(i, join, 0 if sides[0] else 1))
    return found


def _nearest(post: list[int], block: int) -> int | None:
    """The immediate post-dominator: the one that all the other post-dominators of the block post-dominate."""
    candidates = [b for b in members(post[block]) if b != block]
    return max(candidates, key=lambda b: post[b].bit_count(), default=None)


def _until(graph: Graph, start: int, join: int) -> set[int]:
    """Blocks reached from `start` before `join`."""
    found: set[int] = set()
    work = [start]
    while work:
        block = work.pop()
        if block != join and block not in found:
            found.add(block)
            work += graph.successors[block]
    return found
