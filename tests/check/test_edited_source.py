"""A kernel's file edited while a check of it runs: what Python runs is what is compiled, changed and reported."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
from check_cases import HERE, load_case
from typer.testing import CliRunner

from epdsl.check import proof
from epdsl.check.engine import Options
from epdsl.check.explore import explore
from epdsl.check.mutants import Verdict, baseline
from epdsl.cli import app
from epdsl.cli_check import load_scenarios
from epdsl.cli_tools import Failure

RELAXED = (HERE / "bugs" / "relaxed_election.py").read_text()
ELECTION = (HERE / "legal" / "election.py").read_text()
# Every name of the kernels is another one in the edited file, and every line is further down.
EDITS: dict[str, Callable[[str], str]] = {
    "emptied": lambda text: "",
    "moved and renamed": lambda text: "# a new line\n" * 7 + text.replace("epoch", "number").replace("old", "ticket"),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_a_finding_has_the_lines_that_ran(tmp_path: Path, edit: Callable[[str], str]) -> None:
    path = tmp_path / "edited_election.py"
    path.write_text(RELAXED)
    case = load_case(path)
    path.write_text(edit(RELAXED))
    report = explore(case.scenario.function, case.scenario.ranks, range(2), Options("nvidia", "ptx"))
    [race] = [finding for finding in report.findings if finding.kind == "race"]
    (first,), (second,), (repair,) = (case.lines[mark] for mark in ("first", "second", "repair"))
    assert race.first is not None and race.second is not None
    assert (race.first.line, race.first.text) == (first, "data[1][i] = epoch * 1000 + ep.u32(i)")
    assert (race.second.line, race.second.text) == (second, "out[i] = data[i]")
    assert race.repair.endswith(
        f"edited_election.py:{repair} ACQ_REL at DEVICE: old = ep.atomic_add(counter, 1, order=ep.ACQ_REL, scope=ep.DEVICE)"
    )


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_mutants_are_of_the_source_that_ran(tmp_path: Path, edit: Callable[[str], str]) -> None:
    """A barrier is taken out of the kernel as it was, not as its file is."""
    path = tmp_path / "mutated_election.py"
    path.write_text(ELECTION)
    case = load_case(path)
    known = baseline(case.scenario.function, case.scenario.ranks, Options("nvidia", "ptx"))
    path.write_text(edit(ELECTION))
    line = ELECTION.splitlines().index("    ep.barrier()") + 1
    [key] = [key for key in known.mutants if key[0] == "produce" and key[1].startswith("barrier at")]
    assert key[1].endswith(f"mutated_election.py:{line}: removed")
    assert known.judge(key, range(6)).caught


def test_a_process_that_read_another_file_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is edited after the mutants are known; a process that begins later reads other lines."""
    path = tmp_path / "late_election.py"
    path.write_text(ELECTION)
    judge = proof._judge

    def edited_before(index: int, keys: Sequence[tuple[str, str]]) -> list[Verdict]:
        path.write_text(EDITS["moved and renamed"](ELECTION))
        assert proof._worker is not None
        proof._start(partial(load_scenarios, str(path)), proof._worker.options, proof._worker.seeds)
        return judge(index, keys)

    monkeypatch.setattr(proof, "_judge", edited_before)
    with pytest.raises(
        Failure, match=r"late_election\.py:main has no mutant of .*: its files were edited while the proof ran; start it again"
    ):
        CliRunner().invoke(app, ["check", str(path), "--mutate", "--jobs", "1"], catch_exceptions=False)
