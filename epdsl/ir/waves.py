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
    depth   branches a lane may be in at once when it has passed this one, itself included
    """

    block: int
    join: int
    first: int
    depth: int


def partings(function: Any) -> list[Parting]:
    """The branches of a function whose sides wait."""
    graph = Graph(function)
    waits = [any(op.operation.name in _WAITING for op in block.operations) for block in graph.blocks]
    if not any(waits):
        return []
    post = graph.post_dominators()
    found: list[tuple[int, int, int, set[int]]] = []
    for i, following in enumerate(graph.successors):
        if len(following) < 2 or FAULT in graph.terminators[i].attributes:
            continue
        join = _nearest(post, i)
        if join is None:
            continue
        sides = [_until(graph, s, join) for s in following]
        waiting = [any(waits[b] for b in side) for side in sides]
        if any(waiting):
            found.append((i, join, 0 if waiting[0] else 1, set.union(*sides)))
    # A branch in a loop is among the blocks of its own sides, but a lane is in it once.
    return [
        Parting(i, join, first, len({other for _, other, _, inside in found if i in inside and other != join}) + 1)
        for i, join, first, _ in found
    ]


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
