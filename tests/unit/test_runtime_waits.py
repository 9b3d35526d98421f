"""Records of waits written by hand as a kernel writes them, and what the host makes of them."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from epdsl_runtime import context_layout as layout
from epdsl_runtime import waits
from epdsl_runtime.artifact import Artifact, Site
from epdsl_runtime.faults import Diagnostics
from epdsl_runtime.waits import Wait, Waits, read

SITES = (
    Site("wait", "moe.py", 41, 4, "wait_for", "v == epoch", ("i32",)),
    Site("wait", "moe.py", 52, 4, "join", "v != 0", ("u64",)),
)
KERNEL = Artifact("dispatch", "sm_90", "nvidia", 32, (), 0, SITES, b"")
TICK = 1 << 26


def context(rank: int = 3) -> np.ndarray:
    words = np.zeros(layout.CONTEXT_WORDS, np.uint64)
    words[layout.RANK] = rank
    return words


def put(words: np.ndarray, slot: int, stamp: int, end: int | None = None, site: int = 0, **fields: int) -> None:
    """A record of 13 halves: stamp, site, address, expected, last, since (ns), block * 1024 + thread, end."""
    given = {"address": 0x7010, "expected": 9, "last": 8, "since": (stamp - 30) * TICK, "who": 5 * 1024 + 96} | fields
    half = [stamp]
    for word in (KERNEL.site_tag << 32 | site, given["address"], given["expected"], given["last"] & (1 << 64) - 1, given["since"]):
        half += [word & 0xFFFF_FFFF, word >> 32 & 0xFFFF_FFFF]
    half += [given["who"], stamp if end is None else end]
    at = (8 + 64 * 8 + 2048 * 12 + slot * 8) * 2
    words.view(np.uint32)[at : at + len(half)] = [x & 0xFFFF_FFFF for x in half]


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "APART_SECONDS", 0.08)


def later(act: object) -> threading.Thread:
    """Runs `act` between the two looks."""
    thread = threading.Timer(0.03, act)  # type: ignore[arg-type]
    thread.start()
    return thread


def test_a_record_is_read_whole() -> None:
    words = context()
    put(words, 7, 5000, last=-2)
    assert read(words, 7) == Wait(KERNEL.site_tag << 32, 5, 96, 0x7010, 9, (1 << 64) - 2, 30 * (TICK / 1e9))
    assert read(words, 6) is None


@pytest.mark.parametrize(("stamp", "end"), [(5001, 5000), (5000, 5001), (5000, 0), (0, 5000)])
def test_a_record_under_the_next_writers_hands_is_not_read(stamp: int, end: int) -> None:
    words = context()
    put(words, 0, stamp, end)
    assert read(words, 0) is None


def test_a_wait_over_the_end_of_the_clock_has_its_length() -> None:
    words = context()
    put(words, 0, 2, since=((1 << 31) - 3) * TICK)
    found = read(words, 0)
    assert found is not None and found.seconds == 5 * (TICK / 1e9)


def test_a_wait_that_goes_on_is_told_and_one_that_has_ended_is_not() -> None:
    words, looked = context(), Waits()
    put(words, 1, 5000)
    put(words, 2, 5000, address=0x7014)
    later(lambda: put(words, 2, 5002, address=0x7014))
    assert [wait.address for wait in looked.going_on(words)] == [0x7014]
    # The first has ended, and costs no second look.
    start = time.monotonic()
    later(lambda: put(words, 2, 5004, address=0x7014))
    assert [wait.address for wait in looked.going_on(words)] == [0x7014] and time.monotonic() - start > 0.07
    assert looked.going_on(words) == []
    start = time.monotonic()
    assert looked.going_on(words) == [] and time.monotonic() - start < 0.05
    # The slot is used again.
    put(words, 1, 9000)
    later(lambda: put(words, 1, 9002))
    assert [wait.address for wait in looked.going_on(words)] == [0x7010]


def test_nothing_is_waited_for_at_once() -> None:
    start = time.monotonic()
    assert Waits().going_on(context()) == [] and time.monotonic() - start < 0.05


def test_three_lines_say_who_waits_where_for_whom() -> None:
    words, diagnostics = context(), Diagnostics()
    diagnostics.register(KERNEL)
    diagnostics.name_buffer(0x7000, 256, "flags (i32 [64]) of rank 3", lambda offset: offset // 16)
    put(words, 0, 5000)

    def go_on() -> None:
        put(words, 0, 5002, last=-8)
        put(words, 1, 5001, address=0x7020)
        put(words, 2, 5001, site=1, address=0x9000, expected=0, last=0)

    later(go_on)
    assert diagnostics.peek(words) == [
        "rank 3 dispatch: waiting for memory at moe.py:41: v == epoch (compared with 9) for 2.0 s",
        "  block 5 thread 96; not yet from ranks 1, 2",
        "  address 0x7010 holds -8 (flags (i32 [64]) of rank 3 + 16 bytes); 2 words in all",
        "rank 3 dispatch: waiting for memory at moe.py:52: v != 0 for 2.0 s",
        "  block 5 thread 96",
        "  address 0x9000 holds 0",
    ]


def test_a_record_of_a_kernel_that_is_not_known_is_told_all_the_same() -> None:
    words = context()
    put(words, 0, 5000)
    later(lambda: put(words, 0, 5002))
    first, _, last = Diagnostics().peek(words)
    assert first.startswith("rank 3 unknown kernel: waiting for memory at an unknown place") and last == "  address 0x7010 holds 8"
