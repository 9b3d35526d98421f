"""Waits that go on: what threads of a GPU say of them in the context block (`epdsl.lang.context.write_wait`), and how the host reads it.

A thread that has waited for two ticks of 67 ms says so, and again and again until its wait ends. What it waits for, a place in the
source and an address, has a slot: threads that wait for the same share it. Where the slot's stamp is an older tick, a thread compares and
exchanges it for the present one; the first to do so has the slot for that tick. It fences, writes the words, and writes the tick once
more, behind them, with a release. The others go on waiting.

So the words are of one writer where the tick behind them is the stamp, if the host reads that tick first and the stamp last: had the next
writer changed a word already, the host would see its stamp, which the fence puts before its words. Each word is read whole, whoever writes.
(A writer that is held up over the end of its tick may mix its words with the next one's; both wait for the same, or their slots coincide.)

Nobody takes a record back, so that a wait that ends has nothing to do. A wait goes on where its stamp does: the host looks twice, several
ticks apart, and counts the slots whose stamp has changed.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from . import context_layout as layout

if TYPE_CHECKING:
    from numpy.typing import NDArray

APART_SECONDS = 0.35
_TRIES = 8
_TICK_SECONDS = (1 << layout.WAIT_TICK_BITS) / 1e9
_HALVES = 2 * layout.WAIT_WORDS
_BASE = 2 * layout.WAIT_BASE


@dataclass(frozen=True)
class Wait:
    """What one slot says.

    site      tag and number of the place (see `artifact.site_tag`)
    block     number of the block in the grid, x fastest; `thread` of the thread in the block, likewise: one of those that wait
    address   device address waited on
    expected  the word compared with, 0 when it is compared with none
    last      the last value seen
    seconds   how long that thread had waited, to a tick
    """

    site: int
    block: int
    thread: int
    address: int
    expected: int
    last: int
    seconds: float


class Waits:
    """Looks at one context block. Remembers the slots whose waits have ended, so that they cost a later look nothing."""

    def __init__(self) -> None:
        self._ended = np.zeros(layout.WAIT_CAPACITY, np.uint32)

    def going_on(self, words: NDArray[np.uint64]) -> list[Wait]:
        """The waits that go on now, the longest first. Takes APART_SECONDS where there may be any, and nothing else.

        words  the context block (context_layout.CONTEXT_WORDS words of u64)
        """
        before = _stamps(words)
        if not (before != self._ended).any():
            return []
        time.sleep(APART_SECONDS)
        after = _stamps(words)
        changed = before != after
        self._ended = np.where(changed, 0, after).astype(np.uint32)
        found = [read(words, int(slot)) for slot in changed.nonzero()[0]]
        return sorted((wait for wait in found if wait is not None), key=lambda wait: -wait.seconds)


def _stamps(words: NDArray[np.uint64]) -> NDArray[np.uint32]:
    return words.view(np.uint32)[_BASE + layout.WAIT_STAMP : _BASE + layout.WAIT_CAPACITY * _HALVES : _HALVES].copy()


def read(words: NDArray[np.uint64], slot: int) -> Wait | None:
    """What a slot says; None for one that nobody has written, or whose writer is at work each time we look."""
    halves = words.view(np.uint32)[_BASE + slot * _HALVES :]

    def word(at: int) -> int:
        return int(halves[at]) | int(halves[at + 1]) << 32

    for _ in range(_TRIES):
        # In this order, a statement each: a processor moves a load past a few others, not past the interpreter's.
        end = int(halves[layout.WAIT_END])
        site, address, expected = word(layout.WAIT_SITE), word(layout.WAIT_ADDRESS), word(layout.WAIT_EXPECTED)
        last, since, thread = word(layout.WAIT_LAST), word(layout.WAIT_SINCE), int(halves[layout.WAIT_THREAD])
        if end and end == int(halves[layout.WAIT_STAMP]):
            ticks = end - (since >> layout.WAIT_TICK_BITS) & layout.WAIT_TICK_MASK
            return Wait(site, *divmod(thread, 1 << layout.WAIT_THREAD_BITS), address, expected, last, ticks * _TICK_SECONDS)
    return None
