"""The checker on every configuration of the seeds: silent, except on the original's ordering, whose fault it names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from epdsl.cli import app

SCENARIOS = Path(__file__).with_name("seeds_scenarios.py")
SILENT = [
    "elected_expert",
    "every_release",
    "final_layout",
    "reserved_split_joined",
    "quantised_with_shared_expert",
    "padded_fp8",
    "staged_by_parts",
    "within_a_device",
    "within_a_device_by_rank",
]


def check(name: str, device: str) -> tuple[int, dict[str, Any]]:
    result = CliRunner().invoke(app, ["check", f"{SCENARIOS}:{name}", "--device", device, "--seeds", "1", "--json"])
    return result.exit_code, json.loads(result.stdout)["scenarios"][0]


@pytest.mark.parametrize("name", SILENT)
def test_nothing_is_found_in_our_ordering(device_name: str, name: str) -> None:
    if not device_name.startswith("sim"):
        pytest.skip("the checker runs on the simulator")
    code, report = check(name, device_name)
    assert code == 0 and report["findings"] == [], report


@pytest.mark.parametrize("name", ["seed_ordering", "seed_ordering_combine"])
def test_the_seeds_ordering_is_found_racy(name: str) -> None:
    code, report = check(name, "sim:nvidia")
    assert code == 1
    text = json.dumps(report["findings"])
    # The relaxed election, which publishes nothing of the other producers' payload; and the plain count words, which race with the polling.
    assert "RELAXED at DEVICE: it publishes nothing and acquires nothing" in text
    assert "signal.py" in text and "word[0] = signal" in text
