"""Every known bug is found, with the right kind and lines; every legal pattern is silent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from check_cases import BUGS, LEGAL, LEGAL_PTX, load_case

from epdsl.check.engine import Options
from epdsl.check.explore import check_once, explore
from epdsl.check.findings import Finding

MODELS = {"nvidia": "ptx", "amd": "amdgpu"}
SCHEDULES = ("uniform", "pct", "starve")
# Bugs of the copy engine, which AMD does not have.
NVIDIA_ONLY = ("bulk_without_proxy_fence", "bulk_load_without_proxy_fence", "mbarrier_without_proxy_fence", "bulk_load_over_reads")


def seeds_of(request: pytest.FixtureRequest, few: int) -> int:
    return request.config.getoption("--check-seeds") or few


def options_of(vendor: str, scenario: Any, seed: int = 0, weak: float = 0.0, model: str | None = None) -> Options:
    schedule = SCHEDULES[seed % len(SCHEDULES)]
    return Options(vendor, model or MODELS[vendor], seed, schedule, weak, scenario.num_sms)


def lines_of(finding: Finding) -> set[int]:
    return {side.line for side in (finding.first, finding.second) if side is not None}


@pytest.mark.parametrize("vendor", ["nvidia", "amd"])
@pytest.mark.parametrize("path", BUGS, ids=lambda p: p.stem)
def test_bug_is_found(path: Path, vendor: str, request: pytest.FixtureRequest) -> None:
    if vendor == "amd" and path.stem in NVIDIA_ONLY:
        pytest.skip("there are no proxies on AMD")
    case = load_case(path)
    runs = seeds_of(request, 8)
    wanted = case.lines.get("first", set()) | case.lines.get("second", set())
    expected = "race" if case.expected == "wait-without-acquire" else case.expected
    found = 0
    for seed in range(runs):
        for weak in (0.0, 0.5):
            _, findings = check_once(case.scenario.function, case.scenario.ranks, options_of(vendor, case.scenario, seed, weak))
            right = [f for f in findings if f.kind == expected and lines_of(f) <= wanted and lines_of(f)]
            found += bool(right)
    print(f"{path.stem} {vendor}: found in {found} of {2 * runs} runs")
    assert found >= 0.99 * 2 * runs


@pytest.mark.parametrize("path", BUGS, ids=lambda p: p.stem)
def test_bug_is_explained(path: Path) -> None:
    """The report of an exploration has the expected kind, and its repair names the marked line."""
    case = load_case(path)
    report = explore(case.scenario.function, case.scenario.ranks, range(3), options_of("nvidia", case.scenario), name=str(path))
    right = [f for f in report.findings if f.kind == case.expected]
    assert right, report.render()
    if repair := case.lines.get("repair"):
        assert any(f"{path.name}:{line}" in f.repair for f in right for line in repair), right[0].render()


@pytest.mark.parametrize("vendor", ["nvidia", "amd"])
@pytest.mark.parametrize("path", [*LEGAL, *LEGAL_PTX], ids=lambda p: p.stem)
def test_legal_pattern_is_silent(path: Path, vendor: str, request: pytest.FixtureRequest) -> None:
    case = load_case(path)
    models = ["ptx"] if path in LEGAL_PTX else ["ptx", "amdgpu"]
    runs = seeds_of(request, 8)
    for model in models:
        for seed in range(runs):
            for weak in (0.0, 0.5):
                options = options_of(vendor, case.scenario, seed, weak, model)
                _, findings = check_once(case.scenario.function, case.scenario.ranks, options)
                assert not findings, f"{options}\n{findings[0].render()}"


def test_llvm_has_no_observation_rule() -> None:
    case = load_case(LEGAL_PTX[0])
    _, findings = check_once(case.scenario.function, case.scenario.ranks, options_of("amd", case.scenario, model="amdgpu"))
    assert [f.kind for f in findings] == ["race"]


def test_a_seed_replays_its_schedule() -> None:
    case = load_case(LEGAL[0])
    hashes = {}
    for seed in (0, 1, 2, 0, 1, 2):
        report = explore(case.scenario.function, case.scenario.ranks, [seed], options_of("nvidia", case.scenario), ["uniform"])
        hashes.setdefault(seed, set()).add(report.hashes)
    assert all(len(found) == 1 for found in hashes.values())
    assert len({next(iter(found)) for found in hashes.values()}) == 3
