"""`ordering="seed"`, the racy election that the seeds describe: the checker says at which lines it is wrong and what is missing."""

from __future__ import annotations

from pathlib import Path

import pytest
from check_cases import HERE

from epdsl.check.engine import Options
from epdsl.check.explore import explore
from epdsl.check.findings import Finding
from epdsl.cli_check import load_scenarios

SCENARIOS = HERE.parent / "sim" / "seeds_scenarios.py"
KERNELS = HERE.parent.parent / "epdsl" / "kernels"
ELECTION = "ticket = ep.atomic_add(counter, 1, order=ep.RELAXED if ordering"


def line_of(file: str, text: str, after: str = "") -> int:
    """The line of a kernel's source that begins with `text`, below the one that begins with `after`."""
    lines = [line.strip() for line in (KERNELS / file).read_text().splitlines()]
    start = next(n for n, line in enumerate(lines) if line.startswith(after))
    return next(n for n, line in enumerate(lines[start:], start + 1) if line.startswith(text))


def findings(name: str, vendor: str, model: str) -> tuple[Finding, ...]:
    [(_, scenario)] = load_scenarios(f"{SCENARIOS}:{name}")
    made = explore(scenario.function, scenario.ranks, range(2), Options(vendor, model)).findings
    return tuple(each for finding in made for each in (finding, *finding.also))


def of_election(found: tuple[Finding, ...]) -> list[Finding]:
    where = f"the atomic_add at epdsl/kernels/signal.py:{line_of('signal.py', ELECTION)}"
    wanted = (f"{where} is RELAXED at DEVICE: it publishes nothing and acquires nothing", f"make {where} ACQ_REL at DEVICE: ")
    return [f for f in found if f.missing == wanted[0] and f.repair.startswith(wanted[1])]


def place(file: str, line: int) -> tuple[str, int]:
    return str(KERNELS / file), line


@pytest.mark.parametrize(
    ("name", "sends", "reads", "waits"),
    [
        ("seed_ordering", "dispatch_send.py", "dispatch_receive.py", ("dispatch_receive.py", "word = ep.wait(", "for pair in range(tid")),
        ("seed_ordering_combine", "combine_send.py", "combine.py", ("combine.py", "ep.wait(", "for word in range(tid")),
    ],
)
def test_payload_and_count_words_race_on_nvidia(
    monkeypatch: pytest.MonkeyPatch, name: str, sends: str, reads: str, waits: tuple[str, str, str]
) -> None:
    monkeypatch.chdir(HERE.parent.parent)
    found = findings(name, "nvidia", "ptx")
    assert {f.kind for f in found} == {"race"}
    # The payload: written by a sender's warp, read by the destination, and the relaxed election between them.
    payload = [f for f in of_election(found) if f.first and f.second and (f.first.action, f.second.action) == ("write", "read")]
    assert any(
        sends in {Path(p).name for p, _, _ in f.first.places} and reads in {Path(p).name for p, _, _ in f.second.places}
        for f in payload
        if f.first and f.second and f.first.rank != f.second.rank
    )
    # The words: a plain store, and the destination's polling.
    plain = line_of("signal.py", "word[0] = signal", ELECTION)
    polled = place(waits[0], line_of(*waits))
    words = [f for f in found if f.missing == f"the store at epdsl/kernels/signal.py:{plain} is plain, and another thread polls the word"]
    sides = [{(side.file, side.line) for side in (f.first, f.second) if side} for f in words]
    assert {place("signal.py", plain), polled} in sides
    assert all(f"RELEASE at SYSTEM (RELAXED if it publishes nothing else) at epdsl/kernels/signal.py:{plain}: " in f.repair for f in words)
    assert len(of_election(found)) + len(words) == len(found)


@pytest.mark.parametrize("name", ["seed_ordering", "seed_ordering_combine"])
def test_only_the_counter_races_on_amd(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """There every word is a release, so the payload is ordered; but the elected thread sets back a counter that the others still add to."""
    monkeypatch.chdir(HERE.parent.parent)
    [race] = findings(name, "amd", "amdgpu")
    assert race.kind == "race" and of_election((race,)) == [race]
    reset = line_of("signal.py", "counter[0] = 0", ELECTION)
    assert race.first and race.second
    assert {(race.first.file, race.first.line), (race.second.file, race.second.line)} == {
        place("signal.py", line_of("signal.py", ELECTION)),
        place("signal.py", reset),
    }
