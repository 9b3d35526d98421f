"""What `epdsl bench` does around a timed launch: every mode set up, checked and counted. Times on the simulator mean nothing."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from typer.testing import CliRunner

import epdsl as ep
from epdsl import bench
from epdsl.bench_job import Job, Settings
from epdsl.bench_modes import Case, bench_rank
from epdsl.bench_routing import parse_routing
from epdsl.cli import app
from epdsl.cli_tools import Failure

SMALL = {"hidden": 512, "experts": 8, "top_k": 3, "repetitions": 1, "flush_bytes": 1 << 16}
MODES = [("latency", 2), ("throughput", 2), ("expert-major", 3)]


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("routing", [pytest.param("zipf:1.2", marks=pytest.mark.slow), "one-rank"])
def test_every_mode_is_checked_and_counted(device_name: str, routing: str, fp8: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "WARM_UP", 0)
    settings = Settings(routing=parse_routing(routing), **SMALL)
    cases = [Case(mode, 5, fp8, blocks, (1, 1)) for mode, blocks in MODES]
    rows = ep.spawn(bench_rank, 2, device=device_name, args=(settings, cases))[0]
    json.dumps(rows)
    assert rows[0]["name"] == "empty kernel" and {"link_gb_s", "memory_gb_s"} <= rows[1].keys()
    made = [(row["mode"], row["phase"], row["format"], row["blocks"], row["send_blocks"]) for row in rows[2:]]
    kind = "fp8" if fp8 else "bf16"
    expected = [
        ("latency", "dispatch", kind, 2, 0),
        ("latency", "combine", "bf16", 2, 0),
        ("throughput", "dispatch", kind, 2, 0),
        *([] if fp8 else [("throughput", "combine", "bf16", 2, 1)]),
        ("expert-major", "dispatch", kind, 3, 1),
        *([] if fp8 else [("expert-major", "combine", "bf16", 3, 1)]),
    ]
    assert made == expected
    if routing == "one-rank":
        # Rank 1 sends its five tokens to rank 0, and gets five sums.
        row_bytes = {"bf16": 1024, "fp8": 512 + 16}
        for row in rows[2:]:
            assert row["link_floor_us"] * rows[1]["link_gb_s"] * 1e3 == pytest.approx(5 * row_bytes[row["format"]])


class Lone:
    """A rank to make a job for, without a device."""

    index, size = 1, 2


def job() -> Job:
    return Job(Lone(), 6, Settings(routing=parse_routing("uniform"), **SMALL))  # pyright: ignore[reportArgumentType]


class Rows:
    """A NumPy array in a device array's place."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __getitem__(self, part: slice) -> Rows:
        return Rows(self.array[part])

    def numpy(self) -> np.ndarray:
        return self.array


def test_the_checks_see_a_wrong_row_and_a_wrong_sum() -> None:
    made = job()
    token, _ = made.expert_major(own_first=False)
    rows = made.tokens[token].copy()
    made.check_rows("elements", Rows(rows), made.tokens, token)
    rows.view(np.uint16)[-1, -1] ^= 1
    with pytest.raises(AssertionError, match="rank 1: elements of rows 0 to"):
        made.check_rows("elements", Rows(rows), made.tokens, token)
    out = np.zeros((6, 512))
    for t in range(6):
        for k in range(3):
            expert = made.ids[6 + t, k]
            factor = [1.0, 1.5, 0.75][expert % 4 % 3]
            answered = (made.tokens[6 + t].astype(np.float32) * np.float32(factor)).astype(ml_dtypes.bfloat16)
            out[t] += answered.astype(np.float64) * made.weights[6 + t, k]
    sums = out.astype(ml_dtypes.bfloat16)
    made.check_sums(Rows(sums))
    sums[3, 7] = np.nan
    with pytest.raises(AssertionError, match="combine differs for 1 tokens of 6"):
        made.check_sums(Rows(sums))


def test_rows_are_listed_as_the_layers_order_them() -> None:
    made = job()
    found = {first: list(zip(*(part.tolist() for part in made.expert_major(own_first=first)), strict=True)) for first in (False, True)}
    for first, sources in ((False, (0, 1)), (True, (1, 0))):
        wanted = [(6 * s + t, e) for e in range(4) for s in sources for t in range(6) if 4 + e in made.ids[6 * s + t]]
        assert found[first] == wanted
    assert made.once_a_rank.tolist() == [t for t in range(12) if (made.ids[t] >= 4).any()]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--device", "sim"], "times on the simulator mean nothing"),
        (["--routing", "zipf"], "--routing 'zipf' is not known"),
        (["--out", "t.json"], "add --tune"),
        (["--tune", "--out", "nowhere/t.json"], "nowhere is no directory"),
    ],
)
def test_refusals_of_the_command(arguments: list[str], text: str) -> None:
    result: Any = CliRunner().invoke(app, ["bench", *arguments])
    assert result.exit_code != 0 and text in f"{result.exception}{result.output}"


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("cuda:0", "bench with 2 ranks on cuda:0: times of ranks that take turns on one GPU mean nothing; name the kind alone"),
        ("cuda", "bench with 2 ranks needs 2 GPUs, this machine has 1"),
        ("sim", "bench needs GPUs: times on the simulator mean nothing; use --device cuda"),
    ],
)
def test_where_times_mean_nothing_bench_is_refused(device: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("epdsl_runtime.devices.device_count", lambda kind: 1)
    result = CliRunner().invoke(app, ["bench", "--device", device])
    # `main` shows it and ends with 2.
    assert isinstance(result.exception, Failure) and str(result.exception) == message


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A machine of two devices named "A GPU", whose ranks measure two block counts of one work; the list says that they did."""
    done: list[str] = []
    opened = SimpleNamespace(info=SimpleNamespace(name="A GPU", num_sms=4), close=lambda: None)

    def spawn(main: Any, ranks: int, **options: Any) -> list[Any]:
        done.append(main.__name__)
        work = {"mode": "throughput", "case_format": "bf16", "format": "bf16", "tokens": 64, "send_blocks": 0}
        took = [("dispatch", 4, 9.0), ("combine", 4, 8.0), ("dispatch", 2, 19.0), ("combine", 2, 18.0)]
        times = [{**work, "phase": p, "blocks": b, "less_empty": us, "send_blocks": (p == "combine") * b // 2} for p, b, us in took]
        return [[{"name": "empty kernel"}, *times]] * ranks

    monkeypatch.setattr("epdsl_runtime.devices.device_count", lambda kind: 2)
    monkeypatch.setattr("epdsl_runtime.devices.open_spec", lambda spec: opened)
    monkeypatch.setattr("epdsl_runtime.spawn.spawn", spawn)
    return done


def test_what_tuning_writes_says_what_it_was_measured_with(two_gpus: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EPDSL_TUNED_DIR", str(tmp_path / "made" / "here"))
    result = CliRunner().invoke(app, ["bench", "--tune", "--json", "--seed", "7", "--repetitions", "11"])
    assert result.exit_code == 0, result.output
    shown = json.loads(result.output)
    written = json.loads((tmp_path / "made" / "here" / "a_gpu.json").read_text())
    assert (written["device"], written["seed"], written["repetitions"]) == ("A GPU", 7, 11)
    assert [(row["blocks"], row["dispatch_us"], row["combine_us"]) for row in written["rows"]] == [(4, 9.0, 8.0)]
    assert {key: value for key, value in shown.items() if key not in ("file", "measured")} == written
    assert len(shown["measured"]) == 5 and two_gpus == ["bench_rank"]


def test_a_table_that_cannot_be_written_is_refused_before_measuring(
    two_gpus: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EPDSL_TUNED_DIR", str(tmp_path / "file" / "tables"))
    result = CliRunner().invoke(app, ["bench", "--tune"])
    assert isinstance(result.exception, Failure) and "whose folder cannot be made" in str(result.exception)
    assert "name a file with --out" in str(result.exception) and two_gpus == []
