"""Every mode at more ranks than the other tests have: 4, 8 and 16 of both vendors, and as many as one NVLink domain has."""

from __future__ import annotations

import pytest

import epdsl as ep
from epdsl import demo
from epdsl.bench_job import Job, Settings
from epdsl.bench_modes import LAYERS, PHASES, Case
from epdsl.bench_routing import parse_routing

# Selections: some tokens go to one rank, some to four, and some experts get nothing.
SETTINGS = {"hidden": 512, "top_k": 4, "routing": parse_routing("zipf:1.2")}


def check_mode(rank: ep.Rank, mode: str, experts: int, tokens: int, fp8: bool) -> int:
    """Dispatches and combines twice, each compared with NumPy. Returns the rows that came here."""
    settings = Settings(experts=experts, **SETTINGS)
    case = Case(mode, tokens, fp8, 3 if mode == "expert-major" else 2, (1, 1))
    job = Job(rank, tokens, settings)
    for _ in PHASES[mode](rank, settings, LAYERS[mode](rank, settings, case), job):
        rank.synchronize()
    return len(job.selected[0])


@pytest.mark.slow
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(
    ("mode", "ranks"),
    [(mode, n) for mode in ("latency", "throughput", "expert-major") for n in (4, 8, 16) if (mode, n) != ("throughput", 16)],
)
def test_modes(device_name: str, mode: str, ranks: int, fp8: bool) -> None:
    if not device_name.startswith("sim"):
        pytest.skip("more ranks than GPUs")
    found = ep.spawn(check_mode, ranks, device=device_name, args=(mode, 32, 3, fp8))
    assert sum(found) == ranks * 3 * 4


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [4, 8, 16])
def test_the_base_layer(device_name: str, ranks: int) -> None:
    if not device_name.startswith("sim"):
        pytest.skip("more ranks than GPUs")
    config = demo.RunConfig(ranks=ranks, tokens=3, hidden=64, experts=32, topk=4, launches=2, blocks=2, threads=64)
    results = ep.spawn(demo.run_rank, ranks, device=device_name, args=(config,))
    assert not any(result.problems for result in results)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["latency", "expert-major"])
def test_a_whole_domain(mode: str) -> None:
    """72 ranks, one expert each: the loops over ranks are loops, not code for each."""
    found = ep.spawn(check_mode, 72, device="sim", args=(mode, 72, 1, True))
    assert sum(found) == 72 * 4
