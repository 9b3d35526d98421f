"""EPDSL_VERIFY=1: an operation that MLIR refuses is found where it is made."""

from __future__ import annotations

from typing import Any

import pytest
from mlir.ir import MLIRError  # pyright: ignore[reportAttributeAccessIssue]

import epdsl as ep
from epdsl.build import build
from epdsl.lang.intrinsic import intrinsic
from epdsl.lang.tracer import Tracer

HERE = __file__


@intrinsic
def store_without_a_cache(t: Tracer, p: Any, value: Any) -> None:
    """As a fault of the front end would make it."""
    t.b.op("ep.store", [], [value.ir, p.ir], {"order": t.b.string("plain"), "scope": t.b.string("none")})


@ep.kernel
def wrong(p: ep.Ptr[ep.i32], n: ep.i32):
    p[0] = n
    if n > 3:
        store_without_a_cache(p, n)  # wrong
    p[1] = n


@ep.kernel
def right(p: ep.Ptr[ep.i32], n: ep.i32):
    for i in range(ep.thread_idx.x, n, ep.block_dim.x):
        if i % 2 == 0:
            p[i] = ep.shfl_xor(i, 1)
    ep.barrier()
    ep.wait(p, until=lambda v: v == 1, order=ep.ACQUIRE, scope=ep.SYSTEM, timeout_ns=10)
    breakpoint()


def test_a_wrong_operation_is_found_at_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPDSL_VERIFY", "1")
    with pytest.raises(MLIRError) as caught:
        build(wrong.request("sm_90"))
    with open(HERE) as file:
        line = next(i for i, text in enumerate(file, 1) if text.endswith("# wrong\n"))
    assert f"""error: "{HERE}":{line}:9: 'ep.store' op attribute "cache" is expected but not provided""" in str(caught.value)
    (note,) = caught.value.__notes__
    assert note.endswith(f'  File "{HERE}", line {line}, in wrong\n    store_without_a_cache(p, n)  # wrong\n    {"^" * 27}')


@pytest.mark.parametrize("target", ["sim:nvidia", "sim:amd"])
def test_what_is_right_passes_and_is_the_same(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    without = build(right.request(target)).text
    monkeypatch.setenv("EPDSL_VERIFY", "1")
    assert build(right.request(target)).text == without
