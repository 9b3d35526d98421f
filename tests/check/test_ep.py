"""The shipped expert-parallel kernels are clean: both vendors, both models, strong and weak memory."""

from __future__ import annotations

from typing import Any

import ep_scenarios
import pytest

from epdsl.check.engine import Options
from epdsl.check.explore import explore
from epdsl.scenarios import Scenario

SCENARIOS = [v for v in vars(ep_scenarios).values() if isinstance(v, Scenario)]


def _clean(scenario: Any, vendor: str, model: str, seeds: int) -> None:
    report = explore(scenario.function, scenario.ranks, range(seeds), Options(vendor, model), weak=(0.0, 0.3), explain=False)
    assert report.ok, report.render()


@pytest.mark.parametrize(("vendor", "model"), [("nvidia", "ptx"), ("amd", "amdgpu")])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.name)
def test_family_is_clean(scenario: Scenario, vendor: str, model: str, request: pytest.FixtureRequest) -> None:
    _clean(scenario, vendor, model, request.config.getoption("--check-seeds") or 4)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["ptx", "amdgpu"])
@pytest.mark.parametrize("vendor", ["nvidia", "amd"])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.name)
def test_family_is_clean_over_200_seeds(scenario: Scenario, vendor: str, model: str) -> None:
    _clean(scenario, vendor, model, 200)
