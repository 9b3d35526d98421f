"""The command line, JSON, SARIF, the pytest plugin, mutants, and that unchecked kernels are left alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from check_cases import HERE, load_case
from typer.testing import CliRunner

import epdsl as ep
from epdsl.check import proof
from epdsl.check.engine import Options, Tuning
from epdsl.check.explore import check_once, explore
from epdsl.check.sarif import sarif
from epdsl.cli import app
from epdsl.cli_tools import Failure

pytest_plugins = ["pytester"]
ELECTION = HERE / "legal" / "election.py"
RELAXED = HERE / "bugs" / "relaxed_election.py"


@ep.kernel
def add_one(p: ep.Ptr[ep.u32]):
    p[ep.thread_idx.x] = p[ep.thread_idx.x] + 1
    ep.barrier()
    ep.reduce_add(p, 1, order=ep.RELAXED, scope=ep.DEVICE)


@ep.kernel
def count_on(p: ep.Ptr[ep.u32], kind: ep.Const[int]):
    for i in range(100_000):
        if kind == 0:
            ep.store(p, ep.u32(i), order=ep.RELAXED, scope=ep.DEVICE)
        elif kind == 1:
            ep.atomic_add(p, 1, order=ep.RELAXED, scope=ep.DEVICE)
        elif kind == 2:
            ep.atomic_cas(p, ep.u32(i), ep.u32(i + 1), order=ep.RELAXED, scope=ep.DEVICE)
        else:
            p[0] = ep.load(p, order=ep.RELAXED, scope=ep.DEVICE) + 1


@pytest.mark.parametrize("kind", [0, 1, 2, 3], ids=["store", "add", "cas", "load"])
def test_a_run_ends_at_its_most_events(kind: int) -> None:
    def main(rank: ep.Rank) -> None:
        count_on.launch(rank, grid=1, block=32, args=(rank.zeros("u32", 1), kind))
        rank.synchronize()

    _, found = check_once(main, 1, Options(), tuning=Tuning(most_events=5000))
    [livelock] = [finding for finding in found if finding.kind == "livelock"]
    assert "the run made more than 5,000 accesses" in livelock.message


def test_unchecked_kernels_have_no_events() -> None:
    """The object of the plain target is the same with and without the checker's, and names no site table."""
    before = add_one.compile("sim:nvidia")
    checked = add_one.compile("sim:nvidia:checked")
    add_one._compiled.clear()
    after = add_one.compile("sim:nvidia")
    assert before.binary == after.binary
    assert "sites" not in after.texts and "sites" in checked.texts
    assert len(checked.binary) > len(after.binary)


def test_command_reports_a_finding_and_exits_1() -> None:
    result = CliRunner().invoke(app, ["check", str(RELAXED), "--seeds", "3"])
    assert result.exit_code == 1
    assert "RACE  data (u32 [192]) of rank 1" in result.output
    line = next(n for n, text in enumerate(RELAXED.read_text().splitlines(), 1) if "expect: repair" in text)
    assert f"relaxed_election.py:{line} ACQ_REL at DEVICE" in result.output
    assert f"epdsl check {RELAXED}:main --device sim:nvidia --model ptx --sched uniform --seed 0" in result.output


def test_command_is_silent_on_a_clean_scenario() -> None:
    result = CliRunner().invoke(app, ["check", f"{ELECTION}:main", "--seeds", "3", "--device", "sim:amd"])
    assert result.exit_code == 0
    assert "no finding in 3 runs" in result.output


def test_command_refuses_what_is_no_scenario(tmp_path: Path) -> None:
    empty = tmp_path / "empty.py"
    empty.write_text("x = 1\n")
    with pytest.raises(Failure, match="has no scenario"):
        CliRunner().invoke(app, ["check", str(empty)], catch_exceptions=False)


def test_json_and_sarif(tmp_path: Path) -> None:
    log = tmp_path / "log.sarif"
    result = CliRunner().invoke(app, ["check", str(RELAXED), "--seeds", "2", "--json", "--sarif", str(log)])
    assert result.exit_code == 1
    report = json.loads(result.output)
    assert not report["ok"] and report["scenarios"][0]["findings"][0]["kind"] == "race"
    made = json.loads(log.read_text())
    assert made["version"] == "2.1.0"
    first = made["runs"][0]["results"][0]
    assert first["ruleId"] == "race"
    assert first["locations"][0]["physicalLocation"]["region"]["startLine"] > 0
    assert made["runs"][0]["tool"]["driver"]["rules"][first["ruleIndex"]]["id"] == "race"


def test_sarif_fits_its_published_model() -> None:
    models = pytest.importorskip("sarif_pydantic", reason="pip install sarif-pydantic")
    case = load_case(RELAXED)
    report = explore(case.scenario.function, case.scenario.ranks, [0])
    models.Sarif.model_validate(sarif(report.findings))


# Of legal/election.py: the barriers before the election and after the wait, each half and the scope of the election, the counter's reset,
# order and scope of the flag's release, acquire and scope of its wait.
ELECTION_MUTANTS = 10


def prove(*options: str) -> tuple[int, dict[str, Any]]:
    result = CliRunner().invoke(app, ["check", str(ELECTION), "--mutate", "--json", *options])
    return result.exit_code, json.loads(result.stdout)


def test_every_mutant_of_the_election_is_caught() -> None:
    code, made = prove("--seeds", "6", "--jobs", "1")
    assert code == 0 and made["mutants"] == ELECTION_MUTANTS == len(made["rows"]) and made["missed"] == 0
    assert [row["change"] for row in made["rows"] if not row["caught"]] == []


def test_the_number_of_processes_changes_nothing() -> None:
    assert prove("--seeds", "2", "--jobs", "1") == prove("--seeds", "2", "--jobs", "2")


def test_a_scenario_is_surveyed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    survey = proof._survey

    def counted(index: int) -> list[Any]:
        asked.append(index)
        return survey(index)

    monkeypatch.setattr(proof, "_survey", counted)
    prove("--seeds", "1", "--jobs", "1")
    assert asked == [0]


def test_jobs_are_for_mutants() -> None:
    with pytest.raises(Failure, match="--jobs 2 is for --mutate"):
        CliRunner().invoke(app, ["check", str(ELECTION), "--jobs", "2"], catch_exceptions=False)


def test_mutants_of_a_scenario_that_is_not_clean_prove_nothing() -> None:
    with pytest.raises(Failure, match=r"relaxed_election\.py:main is not clean, so its mutants prove nothing:\nRACE  data"):
        CliRunner().invoke(app, ["check", str(RELAXED), "--mutate", "--jobs", "1"], catch_exceptions=False)


def test_plugin_fails_a_scenario_with_a_finding(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(f"""
        import sys
        sys.path.insert(0, {str(HERE)!r})
        import pytest
        from check_cases import load_case
        from pathlib import Path

        @pytest.mark.epcheck(seeds=2, vendors=("nvidia",))
        def test_bad():
            return load_case(Path({str(RELAXED)!r})).scenario

        @pytest.mark.epcheck(seeds=2, vendors=("nvidia",), weak=0.3)
        def test_good():
            return load_case(Path({str(ELECTION)!r})).scenario
    """)
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*RACE  data*"])
