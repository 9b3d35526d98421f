"""A wait for several words: a look makes all loads before it uses one, and an acquire is one invalidation for all of them."""

from __future__ import annotations

import pytest
from lower_harness import gcn_instructions, ptx_instructions

import epdsl as ep


@ep.kernel
def relaxed(words: ep.Ptr[ep.u64], out: ep.Ptr[ep.u64]):
    a, b, c = ep.wait((words, words + 9, words + 20), until=lambda v: v > 7, order=ep.RELAXED, scope=ep.SYSTEM, timeout_ns=10**9)
    out[0] = a + b + c


@ep.kernel
def acquires(words: ep.Ptr[ep.u64], out: ep.Ptr[ep.u64]):
    a, b = ep.wait((words, words + 9), until=lambda v: v > 7, order=ep.ACQUIRE, scope=ep.SYSTEM, timeout_ns=10**9)
    out[0] = a + b


def test_ptx() -> None:
    found = ptx_instructions(relaxed.compile("sm_90").text("ptx"))["relaxed"]
    # The first look, what follows the wait, and the loop that only looks; two loads of what a wait that lasts writes come next.
    assert found[:7] == [*["ld.relaxed.sys.global.b64"] * 3, "st.global.b64", *["ld.relaxed.sys.global.b64"] * 3]
    assert found[7] == "ld.relaxed.sys.global.b32"
    found = ptx_instructions(acquires.compile("sm_90").text("ptx"))["acquires"]
    assert found[:5] == [*["ld.acquire.sys.global.b64"] * 2, "st.global.b64", *["ld.acquire.sys.global.b64"] * 2]


@pytest.mark.parametrize(
    ("target", "flags", "invalidate"), [("gfx90a", "glc", "buffer_invl2"), ("gfx942", "sc0 sc1", "buffer_inv sc0 sc1")]
)
def test_gcn(target: str, flags: str, invalidate: str) -> None:
    load = f"global_load_dwordx2 {flags}"
    found = gcn_instructions(relaxed.compile(target).text("gcn"))["relaxed"]
    assert found[:6] == [load, load, load, "s_waitcnt vmcnt(2)", "s_waitcnt vmcnt(1)", "s_waitcnt vmcnt(0)"]
    assert invalidate not in found
    found = gcn_instructions(acquires.compile(target).text("gcn"))["acquires"]
    assert found[:4] == [load, load, "s_waitcnt vmcnt(1)", "s_waitcnt vmcnt(0)"]
    assert found.count(invalidate) == 1
