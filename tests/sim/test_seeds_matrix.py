"""The parameters that interact, every pair of their values, on both vendors: three launches each, bit for bit against NumPy."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from epdsl_runtime.spawn import spawn
from seeds_jobs import Job, run_job

AXES: dict[str, list[Any]] = {
    "completion": ["rank", "expert", "every", "seed"],
    "layout": ["staged", "final", "reserve"],
    "split": [False, True],
    "join": [False, True],
    "token_format": ["bf16", "fp8", "mxfp8", "mxfp4", "nvfp4"],
    "shared": [False, True],
    "skip_a2a": [False, True],
    "combine": ["legacy", "balanced", "unreduced"],
    "sm_schedule": ["round_robin", "proportional"],
    "fused": [True, False],
}


def allowed(row: dict[str, Any]) -> bool:
    return not (row["shared"] and row["combine"] == "unreduced")


def pairwise() -> list[dict[str, Any]]:
    """Rows that together hold every allowed pair of values; greedy, the same every time."""
    names = list(AXES)
    left = {(a, x, b, y) for a, b in itertools.combinations(names, 2) for x in AXES[a] for y in AXES[b]}
    left = {(a, x, b, y) for a, x, b, y in left if allowed({"shared": False, "combine": "legacy", a: x, b: y})}
    order = sorted(left, key=repr)
    rows: list[dict[str, Any]] = []
    while order:
        a, x, b, y = order[0]
        row = {a: x, b: y}
        for name in names:
            if name in row:
                continue

            def gain(value: Any, name: str = name, row: dict[str, Any] = row, left: set[Any] = left) -> int:
                full = {"shared": False, "combine": "legacy", **row, name: value}
                if not allowed(full):
                    return -1
                pairs = {(p, row[p], name, value) for p in row} | {(name, value, p, row[p]) for p in row}
                return len(pairs & left)

            row[name] = max(AXES[name], key=gain)
        rows.append(row)
        covered = {(p, row[p], q, row[q]) for p, q in itertools.combinations(names, 2)}
        left -= covered
        order = [pair for pair in order if pair in left]
    return rows


def job_of(row: dict[str, Any], number: int) -> Job:
    layer: dict[str, Any] = {
        "completion": "expert" if row["completion"] == "seed" else row["completion"],
        "ordering": "seed" if row["completion"] == "seed" else "acq_rel",
        "ep_final_layout": row["layout"] != "staged",
        "ep_prod_reserve": row["layout"] == "reserve",
        "ep_copy_role_split": row["split"],
        "ep_send_join_named": row["join"],
        "token_format": row["token_format"],
        "fused_shared_expert": row["shared"],
        "skip_a2a": row["skip_a2a"],
        "combine_schedule": "legacy" if row["combine"] == "unreduced" else row["combine"],
        "unreduced": row["combine"] == "unreduced",
        "sm_schedule": row["sm_schedule"],
        # More than four warps of 64, so that the role split takes effect.
        "num_threads": 384 if row["split"] else 128,
        "n_sms": 4,
    }
    tokens = [(5, 3), (7, 0), (1, 9), (4, 4)][number % 4]
    return Job(tokens=tokens, layer=layer, fused=row["fused"])


ROWS = pairwise()


def text_of(row: dict[str, Any]) -> str:
    return ",".join(f"{v}" if isinstance(v, str) else f"{k}={int(v)}" for k, v in row.items())


def test_the_rows_hold_every_pair() -> None:
    seen = {(a, row[a], b, row[b]) for row in ROWS for a, b in itertools.combinations(AXES, 2)}
    every = {(a, x, b, y) for a, b in itertools.combinations(AXES, 2) for x in AXES[a] for y in AXES[b]}
    assert every - seen == {("shared", True, "combine", "unreduced")}


@pytest.mark.parametrize("number", range(len(ROWS)), ids=lambda i: text_of(ROWS[i]))
def test_every_pair_of_parameters(device_name: str, number: int) -> None:
    job = job_of(ROWS[number], number)
    if not device_name.startswith("sim"):
        job = replace(job, layer={**job.layer, "n_sms": None, "num_threads": None})
    assert spawn(run_job, job.ranks, device=device_name, args=(job,)) == [[] for _ in job.tokens], job
