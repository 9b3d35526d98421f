"""The shipped expert-parallel kernels are clean: both vendors, both models, strong and weak memory."""

from __future__ import annotations

from typing import Any

import ep_scenarios
import pytest

from epdsl.check.engine import Options
from epdsl.check.explore import explore
from epdsl.scenarios import Scenario

SCENARIOS = {name: value for name, value in vars(ep_scenarios).items() if isinstance(value, Scenario)}
VENDORS = (("nvidia", "ptx"), ("amd", "amdgpu"))
# One of each mode and option, each on one vendor: compiling is what takes the time. The others are slow.
FEW = (
    "fused_rank",
    "split_expert",
    "wrong_ids",
    "dispatches",
    "combines",
    "reserved",
    "final_layout",
    "staged",
    "shared_expert_in_tiles",
    "balanced_combines",
    "padded_unreduced",
    "within_a_device",
    "consumed_while_received_reserved",
    "all_reduce_by_a_group",
    "barriers_with_a_fence",
    "low_latency",
    "low_latency_uneven",
    "stamps",
    "stamps_combines_uneven",
    "throughput",
    "expert_major",
    "expert_major_of_16_bits",
)
CASES = [(name, *VENDORS[FEW.index(name) % 2]) for name in FEW]
OTHERS = [(name, *vendor) for name in SCENARIOS for vendor in VENDORS if (name, *vendor) not in CASES]


def _clean(name: str, vendor: str, model: str, seeds: int) -> None:
    scenario: Any = SCENARIOS[name]
    report = explore(scenario.function, scenario.ranks, range(seeds), Options(vendor, model), weak=(0.0, 0.3), explain=False)
    assert report.ok, report.render()


@pytest.mark.parametrize(("name", "vendor", "model"), [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHERS)])
def test_family_is_clean(name: str, vendor: str, model: str, request: pytest.FixtureRequest) -> None:
    _clean(name, vendor, model, request.config.getoption("--check-seeds") or 4)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["ptx", "amdgpu"])
@pytest.mark.parametrize("vendor", ["nvidia", "amd"])
@pytest.mark.parametrize("name", SCENARIOS)
def test_family_is_clean_over_200_seeds(name: str, vendor: str, model: str) -> None:
    _clean(name, vendor, model, 200)
