"""Which block counts a layer takes: the shipped table's, a user's, or the rule's; and how `epdsl bench --tune` chooses them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from epdsl_runtime.protocol import DeviceInfo

from epdsl.bench_tune import candidates, choose
from epdsl.sm_budget import MODES, RULES, SHIPPED, Budget, Tuned, budget, document, file_name, read_table, sending

H200 = DeviceInfo("cuda", 0, "NVIDIA H200", "sm_90", "nvidia", 32, 132, 1024, 232448, 150 << 30)
OTHER = replace(H200, name="Some GPU", num_sms=60)
SIMULATED = replace(H200, name="simulated", kind="sim")


@pytest.fixture(autouse=True)
def no_tables_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("EPDSL_TUNED_DIR", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("mode", "fp8", "tokens", "expected"),
    [
        ("latency", True, 1, Budget(1, (0, 0))),
        ("latency", True, 7, Budget(7, (0, 0))),
        ("latency", True, 128, Budget(128, (0, 0))),
        ("latency", True, 512, Budget(128, (0, 0))),
        # Not in the table: at most a block a token.
        ("latency", False, 512, Budget(132, (0, 0))),
        ("throughput", False, 4096, Budget(132, (0, 71))),
        ("throughput", True, 16384, Budget(132, (0, 71))),
        ("expert-major", False, 4096, Budget(132, (86, 55))),
        ("expert-major", True, 64, Budget(132, (104, 55))),
    ],
)
def test_an_h200(mode: Any, fp8: bool, tokens: int, expected: Budget) -> None:
    assert budget(H200, mode, fp8, tokens) == expected


def test_the_callers_blocks_keep_the_shares() -> None:
    assert budget(H200, "throughput", False, 4096, n_blocks=24) == Budget(24, (0, 13))
    assert budget(H200, "expert-major", True, 4096, n_blocks=24) == Budget(24, (19, 10))
    assert budget(H200, "latency", True, 128, n_blocks=64) == Budget(64, (0, 0))


def test_a_device_without_a_table() -> None:
    assert budget(OTHER, "latency", True, 128) == Budget(60, (0, 0))
    assert budget(OTHER, "latency", True, 8) == Budget(8, (0, 0))
    assert budget(OTHER, "throughput", True, 4096) == Budget(60, (0, 32))
    assert budget(OTHER, "expert-major", False, 4096) == Budget(60, (39, 25))
    assert budget(OTHER, "expert-major", True, 4096) == Budget(60, (47, 25))
    assert budget(SIMULATED, "latency", True, 40) == Budget(8, (0, 0))


def test_both_roles_keep_a_block() -> None:
    assert [sending(0.05, 2), sending(0.95, 2), sending(0.5, 3), sending(0.0, 9)] == [1, 1, 2, 0]


def test_a_users_table_comes_first(no_tables_of_the_user: Path) -> None:
    rows = [Tuned("throughput", "bf16", 1024, 40, (0, 10)), Tuned("throughput", "bf16", 4096, 80, (0, 40))]
    (no_tables_of_the_user / "some_gpu.json").write_text(json.dumps(document("Some GPU", {"driver": "1"}, rows)))
    assert budget(OTHER, "throughput", False, 1000) == Budget(40, (0, 10))
    # No more blocks than the device has, with the share that was measured.
    assert budget(OTHER, "throughput", False, 2048) == Budget(60, (0, 30))
    assert budget(OTHER, "throughput", False, 9999) == Budget(60, (0, 30))
    # Rows of the other format are not taken.
    assert budget(OTHER, "throughput", True, 1000) == Budget(60, (0, 32))


GOOD: dict[str, Any] = {"mode": "throughput", "format": "bf16", "tokens": 1, "blocks": 4, "send_blocks": [0, 2]}


@pytest.mark.parametrize(
    "change",
    [
        {"mode": "fast"},
        {"format": "fp4"},
        {"tokens": 0},
        {"blocks": 0},
        {"blocks": 4.0},
        {"blocks": True},
        {"send_blocks": [0, 4]},
        {"send_blocks": [1, 2]},
        {"send_blocks": [0]},
        {"send_blocks": 2},
        {"surplus": 1},
    ],
)
def test_tables_that_are_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"device": "D", "rows": [GOOD]}))
    assert read_table(path, "D") == (Tuned("throughput", "bf16", 1, 4, (0, 2)),)
    path.write_text(json.dumps({"device": "D", "rows": [GOOD, {**GOOD, **change}]}))
    with pytest.raises(ValueError, match=r"t\.json: row 1 is .*make it again with epdsl bench --tune"):
        read_table(path, "D")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"device": "D"}'])
def test_files_that_are_no_tables(tmp_path: Path, text: str) -> None:
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(ValueError, match="is no table of block counts"):
        read_table(tmp_path / "t.json", "D")


def test_the_table_of_another_device(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(json.dumps({"device": "E", "rows": []}))
    with pytest.raises(ValueError, match="is the table of 'E', this device is 'D'"):
        read_table(tmp_path / "t.json", "D")


def test_every_shipped_table_is_right_and_says_where_it_is_from() -> None:
    paths = sorted(SHIPPED.glob("*.json"))
    assert [path.name for path in paths] == ["nvidia_h200.json"]
    for path in paths:
        about = json.loads(path.read_text())
        assert file_name(about["device"]) == path.name
        assert {"driver", "date", "ranks", "hidden", "routing"} <= about.keys()
        rows = read_table(path, about["device"])
        assert rows and {(row.mode, row.format) for row in rows} <= RULES.keys()
        assert all(row.dispatch_us for row in rows)


def measured(mode: str, kind: str, phase: str, blocks: int, sends: int, us: float, tokens: int = 64) -> dict[str, Any]:
    return {
        "mode": mode,
        "case_format": kind,
        "phase": phase,
        "tokens": tokens,
        "blocks": blocks,
        "send_blocks": sends,
        "less_empty": us,
    }


def test_the_least_sum_of_both_phases_wins() -> None:
    rows = [
        {"name": "empty kernel", "median_us": 4.0},
        measured("expert-major", "bf16", "dispatch", 132, 24, 210.0),
        measured("expert-major", "bf16", "dispatch", 132, 32, 205.0),
        measured("expert-major", "bf16", "combine", 132, 44, 200.0),
        measured("expert-major", "bf16", "combine", 132, 56, 203.0),
        measured("expert-major", "bf16", "dispatch", 99, 24, 190.0),
        measured("expert-major", "bf16", "combine", 99, 40, 240.0),
        # fp8 has no combine of its own: the other format's, with the same blocks.
        measured("expert-major", "fp8", "dispatch", 132, 40, 130.0),
        measured("expert-major", "fp8", "dispatch", 99, 30, 150.0),
    ]
    assert choose(rows) == [
        Tuned("expert-major", "bf16", 64, 132, (32, 44), 205.0, 200.0),
        Tuned("expert-major", "fp8", 64, 132, (40, 44), 130.0, None),
    ]


def test_fewer_blocks_win_within_the_tolerance() -> None:
    rows = [
        measured("throughput", "fp8", "dispatch", blocks, 0, us) for blocks, us in ((132, 100.0), (99, 101.9), (66, 102.1), (33, 150.0))
    ]
    # No combine anywhere: the rule's share of 99.
    assert choose(rows) == [Tuned("throughput", "fp8", 64, 99, (0, 53), 101.9, None)]


@pytest.mark.parametrize("num_sms", [2, 8, 60, 132])
def test_what_is_tried_can_be_made(num_sms: int) -> None:
    found = list(candidates(num_sms))
    assert {(case.mode, case.fp8) for case in found} == {(mode, fp8) for mode in MODES for fp8 in (False, True)}
    for case in found:
        assert case.blocks is not None and 1 <= case.blocks <= max(2, num_sms)
        if case.send_blocks is not None:
            shares = RULES[case.mode, "fp8" if case.fp8 else "bf16"]
            assert all(0 < count < case.blocks if share else count == 0 for count, share in zip(case.send_blocks, shares, strict=True))
    assert [case.tokens for case in candidates(num_sms, ("throughput",), [512])] == [512] * len(list(candidates(num_sms, ("throughput",))))
