"""benchmarks/scaling.py against numbers worked out by hand."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def scaling() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "scaling.py"
    spec = importlib.util.spec_from_file_location("scaling", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["scaling"] = module
    spec.loader.exec_module(module)
    return module


def test_where_tokens_go(scaling: ModuleType) -> None:
    # One selection of four experts on four ranks: three times in four elsewhere.
    assert scaling.remote_ranks(4, 4, 1) == pytest.approx(0.75)
    # Two of four experts on two ranks: both at home in one draw of six.
    assert scaling.remote_ranks(2, 4, 2) == pytest.approx(5 / 6)
    assert [scaling.experts_for(n) for n in (2, 8, 72)] == [256, 256, 288]


def test_latency_at_two_ranks(scaling: ModuleType) -> None:
    dispatch, combine = scaling.latency(2)
    # Hidden 7168 as e4m3 and 56 scales: 7392 bytes. Two banks of 2 x 128 rows; 8 pairs of words a header; 128 counts a rank.
    # The combine's rows are 14336 bytes; u64 flags for 2 ranks and 128 blocks, two banks, of both.
    banks = 2 * 256
    assert dispatch.shared_bytes == banks * (7392 + 64 + 14336) + 2 * 2 * 128 * 4 + 2 * (2 * 2 * 128 * 8)
    assert (dispatch.releases, dispatch.polled, dispatch.pollers) == (128, 128, "2 threads of each block")
    # A token misses the other rank when its 8 experts are among 128 of 256: 1 in 282.
    assert 0.996 < combine.link_bytes / (128 * 14336) < 0.997
    # 128 rows of headers and 128 counts beside the payload.
    assert dispatch.link_bytes - round(combine.link_bytes / 14336 * 7392) == pytest.approx(128 * 64 + 128 * 4, abs=1)


def test_throughput_at_eight_ranks(scaling: ModuleType) -> None:
    dispatch, combine = scaling.throughput(8)
    # Two banks of 8 x 4096 rows: 14336 bytes, a word of scales, 8 selections and weights, a token; back 14336 bytes and a flag.
    rows = 2 * 8 * 4096
    assert dispatch.shared_bytes == rows * (14336 + 4 + 64 + 4 + 14336 + 4) + 8 * (2 * 8 * 132 + 2 * 64) + 8 * 4
    assert dispatch.releases == 7 * 132
    # 4.633 other ranks a token (8 of 256 experts without repetition).
    assert combine.releases == pytest.approx(4.633 * 4096, rel=1e-3)


def test_buffers_grow_with_ranks_and_tokens_alike(scaling: ModuleType) -> None:
    for costs in (scaling.throughput, scaling.expert_major):
        small, more_tokens, more_ranks = costs(2, 4096)[0], costs(2, 16384)[0], costs(8, 4096)[0]
        assert more_tokens.shared_bytes / small.shared_bytes == pytest.approx(4, rel=0.01)
        assert more_ranks.shared_bytes / small.shared_bytes == pytest.approx(4, rel=0.01)


def test_a_domain_of_72(scaling: ModuleType) -> None:
    rows = scaling.table([72])
    assert [row["mode"] for row in rows] == ["latency", "latency", "throughput", "expert-major", "expert-major"]
    assert "takes at most 8" in rows[2]["refused"]
    assert rows[0]["releases"] == 71 * 128 and rows[3]["releases"] == 71 * 4096
    # What peers write fits one GPU, and a flag's place fits an i32.
    assert all(row["shared_bytes"] + row["own_bytes"] < 40e9 for row in rows if "refused" not in row)
    assert 2 * 72 * 4096 < 2**31
