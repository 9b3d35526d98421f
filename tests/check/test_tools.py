"""The command line, JSON, SARIF, the pytest plugin, mutants, and that unchecked kernels are left alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from check_cases import HERE, load_case
from typer.testing import CliRunner

import epdsl as ep
from epdsl.check.engine import Options
from epdsl.check.explore import explore
from epdsl.check.mutants import mutants_of
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


def test_every_mutant_of_the_election_is_caught() -> None:
    case = load_case(ELECTION)
    rows = mutants_of(case.scenario.function, case.scenario.ranks, Options(), range(6))
    assert len(rows) == 10
    assert not [row["change"] for row in rows if not row["caught"]]


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
