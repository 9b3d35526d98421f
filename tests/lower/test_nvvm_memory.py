"""Every (operation, order, scope, type, space) on NVIDIA against the PTX it must be."""

import itertools
import shutil
import subprocess

import pytest
from lower_harness import Row, compile_rows, differences, instructions, memory_row, ptx_instructions

TYPES = {
    "i8": ".b8",
    "i16": ".b16",
    "bf16": ".b16",
    "i32": ".b32",
    "f32": ".b32",
    "i64": ".b64",
    "f64": ".b64",
    "vector<2xf32>": ".b64",
    "vector<4xi32>": ".v4.b32",
    "vector<4xf32>": ".v4.b32",
    "vector<8xbf16>": ".v4.b32",
    "vector<16xi8>": ".v4.b32",
    "vector<2xi64>": ".v4.b32",
}
LOADS = {
    ("relaxed", "block"): ["ld.relaxed.cta"],
    ("relaxed", "device"): ["ld.relaxed.gpu"],
    ("relaxed", "system"): ["ld.relaxed.sys"],
    ("acquire", "block"): ["ld.acquire.cta"],
    ("acquire", "device"): ["ld.acquire.gpu"],
    ("acquire", "system"): ["ld.acquire.sys"],
    ("seq_cst", "block"): ["fence.sc.cta", "ld.acquire.cta"],
    ("seq_cst", "device"): ["fence.sc.gpu", "ld.acquire.gpu"],
    ("seq_cst", "system"): ["fence.sc.sys", "ld.acquire.sys"],
}
STORES = {
    ("relaxed", "block"): ["st.relaxed.cta"],
    ("relaxed", "device"): ["st.relaxed.gpu"],
    ("relaxed", "system"): ["st.relaxed.sys"],
    ("release", "block"): ["st.release.cta"],
    ("release", "device"): ["st.release.gpu"],
    ("release", "system"): ["st.release.sys"],
    ("seq_cst", "block"): ["fence.sc.cta", "st.release.cta"],
    ("seq_cst", "device"): ["fence.sc.gpu", "st.release.gpu"],
    ("seq_cst", "system"): ["fence.sc.sys", "st.release.sys"],
}
ATOMS = {
    ("relaxed", "block"): ["atom.relaxed.cta"],
    ("relaxed", "device"): ["atom.relaxed.gpu"],
    ("relaxed", "system"): ["atom.relaxed.sys"],
    ("acquire", "block"): ["atom.acquire.cta"],
    ("acquire", "device"): ["atom.acquire.gpu"],
    ("acquire", "system"): ["atom.acquire.sys"],
    ("release", "block"): ["atom.release.cta"],
    ("release", "device"): ["atom.release.gpu"],
    ("release", "system"): ["atom.release.sys"],
    ("acq_rel", "block"): ["atom.acq_rel.cta"],
    ("acq_rel", "device"): ["atom.acq_rel.gpu"],
    ("acq_rel", "system"): ["atom.acq_rel.sys"],
    ("seq_cst", "block"): ["fence.sc.cta", "atom.acq_rel.cta"],
    ("seq_cst", "device"): ["fence.sc.gpu", "atom.acq_rel.gpu"],
    ("seq_cst", "system"): ["fence.sc.sys", "atom.acq_rel.sys"],
}
# PTX has no red that acquires.
REDS = ATOMS | {
    ("relaxed", "block"): ["red.relaxed.cta"],
    ("relaxed", "device"): ["red.relaxed.gpu"],
    ("relaxed", "system"): ["red.relaxed.sys"],
    ("release", "block"): ["red.release.cta"],
    ("release", "device"): ["red.release.gpu"],
    ("release", "system"): ["red.release.sys"],
}
RMW = {
    ("add", "i32"): ".add.u32",
    ("add", "i64"): ".add.u64",
    ("sub", "i32"): ".add.u32",
    ("sub", "i64"): ".add.u64",
    ("min", "i32"): ".min.s32",
    ("min", "i64"): ".min.s64",
    ("max", "i32"): ".max.s32",
    ("max", "i64"): ".max.s64",
    ("umin", "i32"): ".min.u32",
    ("umin", "i64"): ".min.u64",
    ("umax", "i32"): ".max.u32",
    ("umax", "i64"): ".max.u64",
    ("and", "i32"): ".and.b32",
    ("and", "i64"): ".and.b64",
    ("or", "i32"): ".or.b32",
    ("or", "i64"): ".or.b64",
    ("xor", "i32"): ".xor.b32",
    ("xor", "i64"): ".xor.b64",
    ("xchg", "i32"): ".exch.b32",
    ("xchg", "i64"): ".exch.b64",
    ("xchg", "f32"): ".exch.b32",
    ("fadd", "f32"): ".add.f32",
    ("fadd", "f64"): ".add.f64",
}
NEGATION = {("sub", "i32"): ["neg.s32"], ("sub", "i64"): ["neg.s64"]}
CAS = {"i16": ".cas.b16", "bf16": ".cas.b16", "i32": ".cas.b32", "f32": ".cas.b32", "i64": ".cas.b64", "f64": ".cas.b64"}
FENCES = {
    ("acquire", "block"): "fence.acq_rel.cta",
    ("acquire", "device"): "fence.acq_rel.gpu",
    ("acquire", "system"): "fence.acq_rel.sys",
    ("release", "block"): "fence.acq_rel.cta",
    ("release", "device"): "fence.acq_rel.gpu",
    ("release", "system"): "fence.acq_rel.sys",
    ("acq_rel", "block"): "fence.acq_rel.cta",
    ("acq_rel", "device"): "fence.acq_rel.gpu",
    ("acq_rel", "system"): "fence.acq_rel.sys",
    ("seq_cst", "block"): "fence.sc.cta",
    ("seq_cst", "device"): "fence.sc.gpu",
    ("seq_cst", "system"): "fence.sc.sys",
}
SPACES = ("global", "shared")


def name(*words: str) -> str:
    return "_".join("".join(c if c.isalnum() else "_" for c in w) for w in words)


def last(instructions: list[str], suffix: str) -> list[str]:
    return [*instructions[:-1], instructions[-1] + suffix]


def rows() -> tuple[dict[str, Row], dict[str, list[str]]]:
    made: dict[str, Row] = {}
    expected: dict[str, list[str]] = {}

    def row(key: str, row: Row, want: list[str]) -> None:
        made[key], expected[key] = row, want

    for space, (type_, suffix) in itertools.product(SPACES, TYPES.items()):
        for (order, scope), want in LOADS.items():
            key = name("load", order, scope, space, type_)
            row(key, memory_row("load", type_, space, order, scope), last(want, f".{space}{suffix}"))
        for (order, scope), want in STORES.items():
            key = name("store", order, scope, space, type_)
            row(key, memory_row("store", type_, space, order, scope), last(want, f".{space}{suffix}"))
    for space, ((kind, type_), suffix) in itertools.product(SPACES, RMW.items()):
        negation = NEGATION.get((kind, type_), [])
        for (order, scope), want in ATOMS.items():
            key = name("rmw", kind, order, scope, space, type_)
            row(key, memory_row("atomic_rmw", type_, space, order, scope, kind), negation + last(want, f".{space}{suffix}"))
        for (order, scope), want in (ATOMS if kind == "xchg" else REDS).items():
            key = name("reduce", kind, order, scope, space, type_)
            row(key, memory_row("reduce", type_, space, order, scope, kind), negation + last(want, f".{space}{suffix}"))
    for space, (type_, suffix), ((order, scope), want) in itertools.product(SPACES, CAS.items(), ATOMS.items()):
        key = name("cas", order, scope, space, type_)
        row(key, memory_row("atomic_cas", type_, space, order, scope), last(want, f".{space}{suffix}"))
    for (order, scope), want_fence in FENCES.items():
        row(name("fence", order, scope), Row("", f'"ep.fence"() {{order = "{order}", scope = "{scope}"}} : () -> ()'), [want_fence])
    return made, expected


@pytest.fixture(scope="module")
def compiled():
    made, expected = rows()
    return compile_rows(made, "sm_90"), expected


def test_every_row(compiled):
    code, expected = compiled
    assert len(expected) > 1900
    assert differences(expected, ptx_instructions(code.texts["ptx"])) == ""


@pytest.mark.skipif(shutil.which("ptxas") is None, reason="needs ptxas")
def test_ptxas_takes_every_row(compiled, tmp_path):
    code, _ = compiled
    (tmp_path / "rows.ptx").write_bytes(code.binary)
    done = subprocess.run(["ptxas", "-O0", "-arch=sm_90", "rows.ptx", "-o", "rows.cubin"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


PLAIN = {
    ("load", "global", "i8"): "ld.global.b8",
    ("load", "global", "i16"): "ld.global.b16",
    ("load", "global", "i32"): "ld.global.b32",
    ("load", "global", "f64"): "ld.global.b64",
    ("load", "global", "vector<2xf32>"): "ld.global.v2.b32",
    ("load", "global", "vector<4xi32>"): "ld.global.v4.b32",
    ("load", "global", "vector<4xf32>"): "ld.global.v4.b32",
    ("load", "global", "vector<8xbf16>"): "ld.global.v4.b32",
    ("load", "global", "vector<16xi8>"): "ld.global.v4.b32",
    ("load", "global", "vector<2xi64>"): "ld.global.v2.b64",
    ("load", "shared", "i32"): "ld.shared.b32",
    ("load", "shared", "vector<4xf32>"): "ld.shared.v4.b32",
    ("store", "global", "i8"): "st.global.b8",
    ("store", "global", "i16"): "st.global.b16",
    ("store", "global", "i32"): "st.global.b32",
    ("store", "global", "f64"): "st.global.b64",
    ("store", "global", "vector<4xi32>"): "st.global.v4.b32",
    ("store", "global", "vector<4xf32>"): "st.global.v4.b32",
    ("store", "global", "vector<8xbf16>"): "st.global.v4.b32",
    ("store", "global", "vector<16xi8>"): "st.global.v4.b32",
    ("store", "global", "vector<2xi64>"): "st.global.v2.b64",
    ("store", "shared", "i32"): "st.shared.b32",
    ("store", "shared", "vector<4xf32>"): "st.shared.v4.b32",
}
STREAMING = {
    ("load", "plain", "none", "global", "i32"): "ld.global.L1::no_allocate.b32",
    ("load", "plain", "none", "global", "vector<4xi32>"): "ld.global.L1::no_allocate.v4.b32",
    ("load", "plain", "none", "global", "vector<8xbf16>"): "ld.global.L1::no_allocate.v4.b32",
    ("load", "plain", "none", "shared", "vector<4xi32>"): "ld.shared.v4.b32",
    ("load", "relaxed", "system", "global", "vector<4xi32>"): "ld.relaxed.sys.global.L1::no_allocate.v4.b32",
    ("store", "plain", "none", "global", "i32"): "st.global.L1::no_allocate.b32",
    ("store", "plain", "none", "global", "vector<4xi32>"): "st.global.L1::no_allocate.v4.b32",
    ("store", "plain", "none", "shared", "vector<4xi32>"): "st.shared.v4.b32",
    ("store", "release", "device", "global", "i64"): "st.release.gpu.global.L1::no_allocate.b64",
}


def test_plain_and_streaming():
    made = {name(*key): memory_row(key[0], key[2], key[1], "plain", "none") for key in PLAIN}
    expected = {name(*key): [want] for key, want in PLAIN.items()}
    for (op, order, scope, space, type_), want in STREAMING.items():
        key = name("streaming", op, order, space, type_)
        made[key], expected[key] = memory_row(op, type_, space, order, scope, cache_="streaming"), [want]
    assert differences(expected, instructions(made, "sm_90")) == ""


def test_rows_are_the_same_on_older_and_newer_chips():
    made, expected = rows()
    few = dict(list(made.items())[::23])
    for target in ("sm_80", "sm_100"):
        wanted = {key: expected[key] for key in few}
        assert differences(wanted, instructions(few, target)) == "", target
