"""The finding of a wrong kernel names the line that is wrong, and the repair as it is printed makes the kernel clean."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from check_cases import HERE, load_case

import epdsl as ep
from epdsl.check.engine import Options
from epdsl.check.explore import Report, explore

POOL = (HERE / "legal" / "pool.py").read_text()
RESET = "            ep.store(cursor[me], 0, order=ep.RELAXED, scope=ep.SYSTEM)\n"
CREDIT = "ep.store(freed[r] + me, launch, order=ep.RELEASE, scope=ep.SYSTEM)\n"
ADD_ARRIVED = "ep.atomic_add(arrived[r], 1, order=ep.RELAXED"
USED = "ep.atomic_add(used, 1, order=ep.ACQ_REL"
ARRIVED = "ep.wait(arrived[me], "


def edited(*changes: tuple[str, str]) -> str:
    text = POOL
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def line_of(text: str, part: str) -> int:
    [number] = [n for n, line in enumerate(text.splitlines(), 1) if part in line]
    return number


@pytest.fixture
def checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Report]:
    """Explores a text as `pool.py` of the current directory."""
    monkeypatch.chdir(tmp_path)

    def check(text: str, seeds: int = 20) -> Report:
        path = tmp_path / "pool.py"
        path.write_text(text)
        scenario: Any = load_case(path).scenario
        return explore(scenario.function, scenario.ranks, range(seeds), Options("nvidia", "ptx"))

    return check


# What is wrong; a part of the line to be named; what is missing and the repair, of that line.
ORDERS = {
    "fence too narrow": (
        edited(("order=ep.RELEASE, scope=ep.SYSTEM)\n            for", "order=ep.RELEASE, scope=ep.DEVICE)\n            for")),
        "ep.fence(",
        "the fence at {} is RELEASE at DEVICE: scope DEVICE does not include the other thread",
        "make the fence at {} RELEASE at SYSTEM: ep.fence(order=ep.RELEASE, scope=ep.SYSTEM)",
    ),
    "fence acquires": (
        edited(("ep.fence(order=ep.RELEASE", "ep.fence(order=ep.ACQUIRE")),
        ADD_ARRIVED,
        "the atomic_add at {} is RELAXED at SYSTEM: it publishes nothing",
        "make the atomic_add at {} RELEASE at SYSTEM: ep.atomic_add(arrived[r], 1, order=ep.RELEASE, scope=ep.SYSTEM)",
    ),
    "election releases only": (
        edited((USED, USED.replace("ACQ_REL", "RELEASE"))),
        "ep.atomic_add(used, 1",
        "the atomic_add at {} is RELEASE at DEVICE: it acquires nothing",
        "make the atomic_add at {} ACQ_REL at DEVICE: if ep.atomic_add(used, 1, order=ep.ACQ_REL, scope=ep.DEVICE) == BLOCKS - 1:",
    ),
    "credit relaxed": (
        edited((CREDIT, CREDIT.replace("RELEASE", "RELAXED"))),
        "ep.store(freed[r]",
        "the store at {} is RELAXED at SYSTEM: it publishes nothing",
        "make the store at {} RELEASE at SYSTEM: ep.store(freed[r] + me, launch, order=ep.RELEASE, scope=ep.SYSTEM)",
    ),
}


@pytest.mark.parametrize("case", ORDERS)
def test_an_order_or_scope_is_named_and_its_repair_is_clean(case: str, checked: Callable[..., Report]) -> None:
    text, part, missing, repair = ORDERS[case]
    line = line_of(text, part)
    [finding] = checked(text).findings
    assert finding.kind == "race"
    assert finding.missing == missing.format(f"pool.py:{line}")
    assert finding.repair == repair.format(f"pool.py:{line}")
    lines = text.splitlines(keepends=True)
    lines[line - 1] = re.match(r" *", lines[line - 1])[0] + finding.repair.split(": ", 1)[1] + "\n"  # type: ignore[index]
    repaired = checked("".join(lines))
    assert repaired.ok, repaired.render()


def test_two_weak_places_are_both_named(checked: Callable[..., Report]) -> None:
    """Release and acquire of one word: neither alone orders anything."""
    text = edited(
        (CREDIT, CREDIT.replace("RELEASE", "RELAXED")), ("v == launch - 1, order=ep.ACQUIRE", "v == launch - 1, order=ep.RELAXED")
    )
    store, wait = line_of(text, "ep.store(freed[r]"), line_of(text, "ep.wait(freed[me]")
    [finding] = checked(text, 4).findings
    parts = [
        f"the store at pool.py:{store} is RELAXED at SYSTEM: it publishes nothing",
        f"the wait at pool.py:{wait} is RELAXED at SYSTEM: it acquires nothing",
    ]
    assert sorted(finding.missing.split("; ")) == parts


def test_a_barrier_after_the_wait_is_named(checked: Callable[..., Report]) -> None:
    text = edited(("timeout_ns=10**9)\n    ep.barrier()\n    n = ", "timeout_ns=10**9)\n    n = "))
    wait, reads = line_of(text, ARRIVED), line_of(text, "= rows[me][i]")
    [finding] = checked(text).findings
    assert finding.kind == "race"
    assert finding.missing == (
        f"the wait at pool.py:{wait} by thread 0 acquired it; another thread of the same block reads at pool.py:{reads} "
        "without a barrier of the block after it"
    )
    assert finding.repair == f"ep.barrier() after pool.py:{wait}, before pool.py:{reads}"
    assert finding.reached[-2:] == (f"wait ACQUIRE SYSTEM (pool.py:{wait})", "stops here")


def test_a_word_set_back_too_late_is_named(checked: Callable[..., Report]) -> None:
    """No order helps: a rank that has its credit adds to the cursor before it is set back, and two get the same slot."""
    text = edited((RESET, ""), (CREDIT, CREDIT + RESET))
    add, credit, reset = (line_of(text, part) for part in ("ep.atomic_add(cursor", "ep.store(freed[r]", "ep.store(cursor[me]"))
    wait = line_of(text, "ep.wait(freed[me]")
    [finding] = checked(text).findings
    assert finding.kind == "race"
    assert (
        f"went on when the wait at pool.py:{wait} saw what pool.py:{credit} stored; the store at pool.py:{reset} overwrites"
        in finding.missing
    )
    assert f"what the update at pool.py:{add} left in cursor (u32 [1]) of rank" in finding.missing
    assert finding.repair == f"make the store at pool.py:{reset} before the release that lets another thread come to pool.py:{add}"


def test_a_word_that_was_not_set_back_comes_before_what_it_causes(checked: Callable[..., Report]) -> None:
    text = edited(("            used[0] = 0\n", ""))
    report = checked(text, 3)
    assert [finding.kind for finding in report.findings] == ["control-not-restored", "lost-signal"]
    lost = report.findings[1].message
    assert lost.endswith("wait until v == launch - 1 (compared with 2); the word holds 1, and nothing that could change it runs"), lost


@ep.kernel
def wait_alone(flag: ep.Ptr[ep.u32]):
    if ep.thread_idx.x == 0:
        ep.wait(flag, until=lambda v: v == 7, order=ep.ACQUIRE, scope=ep.SYSTEM, timeout_ns=10**9)


@ep.kernel
def write_behind(p: ep.Ptr[ep.u32], n: ep.i32):
    if ep.thread_idx.x == 0:
        p[n] = 1


@ep.kernel
def one_word_of_all(p: ep.Ptr[ep.u32]):
    word = ep.shared(ep.u32, 1)
    word[0] = ep.u32(ep.thread_idx.x)
    p[ep.thread_idx.x] = 1


def explored(main: Callable[[Any], None]) -> Report:
    return explore(main, 1, range(2))


def test_one_thread_that_waits() -> None:
    def main(rank: Any) -> None:
        wait_alone.launch(rank, grid=1, block=32, args=(rank.zeros("u32", 1),))
        rank.synchronize()

    finding = next(f for f in explored(main).findings if f.kind == "lost-signal")
    assert finding.message == "1 thread waits until v == 7 (compared with 7); the word holds 0, and nothing that could change it runs"


def test_an_access_right_behind_the_end() -> None:
    def main(rank: Any) -> None:
        write_behind.launch(rank, grid=1, block=32, args=(rank.zeros("u32", 4), 4))
        rank.synchronize()

    [finding] = explored(main).findings
    assert (finding.kind, finding.where) == ("out-of-bounds", "byte 16 of p of rank 0, which has 16 bytes")
    assert finding.message == "an access of 4 bytes"


def test_two_threads_at_one_line() -> None:
    def main(rank: Any) -> None:
        one_word_of_all.launch(rank, grid=1, block=32, args=(rank.zeros("u32", 32),))
        rank.synchronize()

    finding = next(f for f in explored(main).findings if f.kind == "race")
    assert finding.first is not None
    at = f"tests/check/test_causes.py:{finding.first.line}"
    assert finding.missing.endswith("with no barrier of the block between") and at in finding.missing
    assert finding.repair.endswith(f"between one time that {at} is reached and the next, or bytes of its own for each thread")


def test_a_bare_assert_has_no_colon() -> None:
    def main(rank: Any) -> None:
        raise AssertionError

    [finding] = explored(main).findings
    assert (finding.kind, finding.message) == ("failed", "AssertionError")
