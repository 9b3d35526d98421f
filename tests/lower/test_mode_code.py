"""The code of the exchange modes: rows move 16 bytes at a time, and no register is spilled on sm_90 (where a ptxas is at hand)."""

from __future__ import annotations

import re
from typing import Any

import pytest

from epdsl import machine_code
from epdsl.kernels.expert_major import ExpertMajorExchange
from epdsl.kernels.low_latency import LowLatencyExchange
from epdsl.kernels.stamped import StampedExchange
from epdsl.kernels.throughput import ThroughputExchange
from epdsl.targets import parse_target


def kernels(n_ranks: int) -> dict[str, Any]:
    return {
        "latency bf16": LowLatencyExchange(7168, 256, n_ranks, 8, 128, 128, 896, fp8=False),
        "latency fp8": LowLatencyExchange(7168, 256, n_ranks, 8, 128, 128, 896),
        "stamps bf16": StampedExchange(7168, 256, n_ranks, 8, 32, 32, 896, fp8=False),
        "stamps fp8": StampedExchange(7168, 256, n_ranks, 8, 32, 32, 896),
        "throughput bf16": ThroughputExchange(7168, 256, n_ranks, 8, 4096, 132, send_blocks=71),
        "throughput fp8": ThroughputExchange(7168, 256, n_ranks, 8, 4096, 132, fp8=True, send_blocks=71),
        "expert-major bf16": ExpertMajorExchange(7168, 256, n_ranks, 8, 4096, 132, send_blocks=(86, 55), fp8=False),
        "expert-major fp8": ExpertMajorExchange(7168, 256, n_ranks, 8, 4096, 132, send_blocks=(104, 55)),
    }


CASES = [(name, phase) for name in kernels(2) for phase in ("dispatch", "combine")]
# A thread's part of the latency mode's e4m3 payload is eight bytes, as are a header's place and weight and the totals for two ranks.
NARROW = {
    ("latency fp8", "dispatch"): {"v2.b32", "v2.u32"},
    ("stamps fp8", "dispatch"): {"v2.b32"},
    ("throughput bf16", "dispatch"): {"v2.b32"},
    ("throughput fp8", "dispatch"): {"v2.b32"},
    ("expert-major bf16", "dispatch"): {"v2.b32"},
    ("expert-major fp8", "dispatch"): {"v2.b32"},
}


# Bytes a thread may keep on its stack: 128 registers are just too few where barriers look whether the warp is one.
SPILLED = {("expert-major fp8", "dispatch", 8): 96}


@pytest.mark.parametrize(("name", "phase"), CASES)
def test_rows_move_16_bytes_at_a_time(name: str, phase: str) -> None:
    kernel = getattr(kernels(2)[name], phase)
    ptx = kernel.compile("sm_90").text("ptx")
    gcn = kernel.compile("gfx942").text("gcn")
    wide = {op: len(re.findall(rf"\b{op}\.[\w.:]*v4\.\w+", ptx)) for op in ("ld", "st")}
    assert wide["ld"] > 0 and len(re.findall(r"(?:global|flat)_load_dwordx4", gcn)) > 0, wide
    if (name, phase) not in {("latency fp8", "dispatch"), ("stamps fp8", "dispatch")}:
        assert wide["st"] > 0 and len(re.findall(r"(?:global|flat)_store_dwordx4", gcn)) > 0, wide
    vectors = set(re.findall(r"\b(?:ld|st)\.[\w.:]*?(v\d\.\w+)", ptx))
    assert {vector for vector in vectors if not vector.startswith("v4.")} <= NARROW.get((name, phase), set()), vectors
    assert not re.findall(r"\b(?:ld|st)\.local", ptx)


@pytest.mark.parametrize(("name", "phase"), [case for case in CASES if case[0].startswith("stamps")])
def test_stamped_words_are_8_bytes_and_order_nothing(name: str, phase: str) -> None:
    kernel = getattr(kernels(2)[name], phase)
    ptx = kernel.compile("sm_90").text("ptx")
    gcn = kernel.compile("gfx942").text("gcn")
    for op in ("ld", "st"):
        assert len(re.findall(rf"\b{op}\.relaxed\.sys\.global\.b64", ptx)) > 1
    for op in ("load", "store"):
        assert len(re.findall(rf"(?:global|flat)_{op}_dwordx2 .* sc0 sc1", gcn)) > 1
    assert "ld.acquire" not in ptx and "buffer_inv" not in gcn


@pytest.mark.parametrize("n_ranks", [2, pytest.param(4, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("name", "phase"), CASES)
def test_nothing_is_spilled(name: str, phase: str, n_ranks: int) -> None:
    target = parse_target("sm_90")
    try:
        machine_code.find("the test", "ptxas")
    except machine_code.NoTool as error:
        pytest.skip(str(error))
    made = getattr(kernels(n_ranks)[name], phase).compile("sm_90")
    found = machine_code.resources(target, made.binary.rstrip(b"\0"), {}, made.shared_bytes, None)
    most = SPILLED.get((name, phase, n_ranks), 0)
    assert max(int(found[row]) for row in ("spill stores, bytes", "spill loads, bytes", "stack of a thread, bytes")) <= most, found
