"""What a wait becomes: a loop that only looks, a second one that tells the host of a wait that lasts, and the report where time is up."""

from __future__ import annotations

import re

import pytest
from lower_harness import gcn_instructions, ptx_instructions

import epdsl as ep


@ep.kernel
def waits(word: ep.Ptr[ep.u32], out: ep.Ptr[ep.u32]):
    ep.wait(word, until=lambda v: v == 7, order=ep.ACQUIRE, scope=ep.SYSTEM, timeout_ns=10**9)
    out[0] = 1


def test_ptx() -> None:
    found = ptx_instructions(waits.compile("sm_90").text("ptx"))["waits"]
    assert [name for name in found if not name.startswith("mul")] == [
        # The first look, what follows the wait, and the loop that only looks.
        "ld.acquire.sys.global.b32",
        "st.global.b32",
        "ld.acquire.sys.global.b32",
        # A record of a wait that lasts: where the slots are, how old this one is, whose it is, and the record.
        "ld.relaxed.sys.global.b32",
        "ld.relaxed.sys.global.b32",
        "atom.relaxed.sys.global.cas.b32",
        "fence.acq_rel.sys",
        *["st.relaxed.sys.global.b32"] * 11,
        "st.release.sys.global.b32",
        # The loop behind it.
        "ld.acquire.sys.global.b32",
        "ld.acquire.sys.global.b32",
        # The report of a wait that ran out.
        "atom.relaxed.gpu.global.add.u64",
        *["st.global.b64"] * 7,
        "st.release.sys.global.b64",
    ]


# release, store and load of other memory
GCN = {
    "gfx90a": (["buffer_wbl2", "s_waitcnt vmcnt(0)"], "", "glc"),
    "gfx942": (["buffer_wbl2 sc0 sc1", "s_waitcnt vmcnt(0)"], " sc0 sc1", "sc0 sc1"),
}


@pytest.mark.parametrize("target", GCN)
def test_gcn(target: str) -> None:
    release, flags, load_flags = GCN[target]
    load = [f"global_load_dword {load_flags}", "s_waitcnt vmcnt(0)"]
    found = gcn_instructions(waits.compile(target).text("gcn"))["waits"]
    told = found.index(f"global_atomic_cmpswap {load_flags}")
    assert found[:told] == [*load, *load, *["s_memrealtime", "s_sleep"] * 2, *["s_memrealtime"] * 2, *load, *load]
    after = [
        *["s_waitcnt vmcnt(0)", *release],
        *[f"global_store_dword{flags}"] * 11,
        *[*release, f"global_store_dword{flags}"],
        *[*load, *load, "s_sleep", "s_memrealtime"],
    ]
    assert found[told + 1 :][: len(after)] == after
    assert found[told + 1 + len(after)].startswith("global_atomic_add_x2")


def test_a_look_that_fails_costs_a_load_and_a_counter() -> None:
    ptx = waits.compile("sm_90").text("ptx")
    lines = [line.strip() for line in ptx.splitlines() if not re.match(r"\s*(\.loc|//|\$L__tmp)", line)]
    second = [at for at, line in enumerate(lines) if line.startswith("ld.acquire")][1]
    names = [line.split()[-2 if line.startswith("@") else 0].rstrip(":") for line in lines[second : second + 9] if not line.startswith("$")]
    assert names == ["ld.acquire.sys.global.b32", "setp.ne.b32", "add.s32", "bra", "bra.uni", "and.b32", "setp.ne.b32", "bra"]
    target = lines[second + 3].split()[-1].rstrip(";")
    assert lines[second + 5] == f"{target}:" and lines[second + 8].split()[-1] == f"{lines[second - 1].rstrip(':')};"
