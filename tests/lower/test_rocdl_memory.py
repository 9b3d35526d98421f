"""Every (operation, order, scope, type, space) on AMD against the instructions it must be.

Each row's kernel first makes a plain store, for a release to wait for. Waits at the end, which only deliver a loaded value, are
not compared.
"""

import itertools

import pytest
from lower_harness import Row, differences, instructions, memory_row

# ---- gfx942 and gfx950: sc0 and sc1 spell the scope, buffer_wbl2 releases, buffer_inv acquires ----

RELEASE = {
    "block": ["s_waitcnt vmcnt(0)"],
    "device": ["buffer_wbl2 sc1", "s_waitcnt vmcnt(0)"],
    "system": ["buffer_wbl2 sc0 sc1", "s_waitcnt vmcnt(0)"],
}
ACQUIRE = {
    "block": [],
    "device": ["s_waitcnt vmcnt(0)", "buffer_inv sc1"],
    "system": ["s_waitcnt vmcnt(0)", "buffer_inv sc0 sc1"],
}
# A sequentially consistent access adds to the release what LLVM emits for the access itself.
SEQ_CST_LOAD = {"block": [], "device": ["s_waitcnt vmcnt(0)"], "system": ["s_waitcnt vmcnt(0)"]}
SEQ_CST_STORE = {
    "block": ["s_waitcnt vmcnt(0)"],
    "device": ["buffer_wbl2 sc1", "s_waitcnt vmcnt(0)", "buffer_wbl2 sc1"],
    "system": ["buffer_wbl2 sc0 sc1", "s_waitcnt vmcnt(0)", "buffer_wbl2 sc0 sc1"],
}
ACCESS_BITS = {"block": " sc0", "device": " sc1", "system": " sc0 sc1"}
RETURNING_BITS = {"block": " sc0", "device": " sc0", "system": " sc0 sc1"}
SILENT_BITS = {"block": "", "device": "", "system": " sc1"}
SCOPES = ("block", "device", "system")

GLOBAL_TYPES = {
    "i8": ("global_load_ubyte", "global_store_byte"),
    "i16": ("global_load_ushort", "global_store_short"),
    "bf16": ("global_load_ushort", "global_store_short"),
    "i32": ("global_load_dword", "global_store_dword"),
    "f32": ("global_load_dword", "global_store_dword"),
    "i64": ("global_load_dwordx2", "global_store_dwordx2"),
    "f64": ("global_load_dwordx2", "global_store_dwordx2"),
    "vector<2xf32>": ("global_load_dwordx2", "global_store_dwordx2"),
}
SHARED_TYPES = {
    "i8": ("ds_read_u8", "ds_write_b8"),
    "i16": ("ds_read_u16", "ds_write_b16"),
    "bf16": ("ds_read_u16", "ds_write_b16"),
    "i32": ("ds_read_b32", "ds_write_b32"),
    "f32": ("ds_read_b32", "ds_write_b32"),
    "i64": ("ds_read_b64", "ds_write_b64"),
    "f64": ("ds_read_b64", "ds_write_b64"),
    "vector<2xf32>": ("ds_read_b64", "ds_write_b64"),
}
# (op, type) -> global, block-shared returning, block-shared silent
RMW = {
    ("add", "i32"): ("global_atomic_add", "ds_add_rtn_u32", "ds_add_u32"),
    ("add", "i64"): ("global_atomic_add_x2", "ds_add_rtn_u64", "ds_add_u64"),
    ("sub", "i32"): ("global_atomic_add", "ds_add_rtn_u32", "ds_add_u32"),
    ("sub", "i64"): ("global_atomic_add_x2", "ds_add_rtn_u64", "ds_add_u64"),
    ("min", "i32"): ("global_atomic_smin", "ds_min_rtn_i32", "ds_min_i32"),
    ("min", "i64"): ("global_atomic_smin_x2", "ds_min_rtn_i64", "ds_min_i64"),
    ("max", "i32"): ("global_atomic_smax", "ds_max_rtn_i32", "ds_max_i32"),
    ("max", "i64"): ("global_atomic_smax_x2", "ds_max_rtn_i64", "ds_max_i64"),
    ("umin", "i32"): ("global_atomic_umin", "ds_min_rtn_u32", "ds_min_u32"),
    ("umin", "i64"): ("global_atomic_umin_x2", "ds_min_rtn_u64", "ds_min_u64"),
    ("umax", "i32"): ("global_atomic_umax", "ds_max_rtn_u32", "ds_max_u32"),
    ("umax", "i64"): ("global_atomic_umax_x2", "ds_max_rtn_u64", "ds_max_u64"),
    ("and", "i32"): ("global_atomic_and", "ds_and_rtn_b32", "ds_and_b32"),
    ("and", "i64"): ("global_atomic_and_x2", "ds_and_rtn_b64", "ds_and_b64"),
    ("or", "i32"): ("global_atomic_or", "ds_or_rtn_b32", "ds_or_b32"),
    ("or", "i64"): ("global_atomic_or_x2", "ds_or_rtn_b64", "ds_or_b64"),
    ("xor", "i32"): ("global_atomic_xor", "ds_xor_rtn_b32", "ds_xor_b32"),
    ("xor", "i64"): ("global_atomic_xor_x2", "ds_xor_rtn_b64", "ds_xor_b64"),
    ("xchg", "i32"): ("global_atomic_swap", "ds_wrxchg_rtn_b32", "ds_wrxchg_rtn_b32"),
    ("xchg", "i64"): ("global_atomic_swap_x2", "ds_wrxchg_rtn_b64", "ds_wrxchg_rtn_b64"),
    ("fadd", "f32"): ("global_atomic_add_f32", "ds_add_rtn_f32", "ds_add_f32"),
    ("fadd", "f64"): ("global_atomic_add_f64", "ds_add_rtn_f64", "ds_add_f64"),
}
# What a bus to another device may not carry is a compare-and-swap loop at system scope.
LOOPS_AT_SYSTEM_SCOPE = ("min", "max", "umin", "umax", "and", "or", "xor", "fadd")
LOOP = {
    "i32": ["global_load_dword", "s_waitcnt vmcnt(0)", "global_atomic_cmpswap sc0 sc1"],
    "f32": ["global_load_dword", "s_waitcnt vmcnt(0)", "global_atomic_cmpswap sc0 sc1"],
    "i64": ["global_load_dwordx2", "s_waitcnt vmcnt(0)", "global_atomic_cmpswap_x2 sc0 sc1"],
    "f64": ["global_load_dwordx2", "s_waitcnt vmcnt(0)", "global_atomic_cmpswap_x2 sc0 sc1"],
}
CAS = {"i32": ("global_atomic_cmpswap", "ds_cmpst_rtn_b32"), "i64": ("global_atomic_cmpswap_x2", "ds_cmpst_rtn_b64")}
RMW_ORDERS = {  # (release part, acquire part)
    "relaxed": (False, False),
    "acquire": (False, True),
    "release": (True, False),
    "acq_rel": (True, True),
}
# A release through block-shared memory: the stores to global memory must have been made, for another wave to release them further.
RELEASE_ON_SHARED = {
    "relaxed": [],
    "acquire": [],
    "release": ["s_waitcnt vmcnt(0)"],
    "acq_rel": ["s_waitcnt vmcnt(0)"],
    "seq_cst": ["s_waitcnt vmcnt(0)"],
}
FENCES = {
    ("acquire", "block"): [],
    ("acquire", "device"): ["s_waitcnt vmcnt(0)", "buffer_inv sc1"],
    ("acquire", "system"): ["s_waitcnt vmcnt(0)", "buffer_inv sc0 sc1"],
    ("release", "block"): ["s_waitcnt vmcnt(0)"],
    ("release", "device"): ["buffer_wbl2 sc1", "s_waitcnt vmcnt(0)"],
    ("release", "system"): ["buffer_wbl2 sc0 sc1", "s_waitcnt vmcnt(0)"],
    ("acq_rel", "block"): ["s_waitcnt vmcnt(0)"],
    ("acq_rel", "device"): ["buffer_wbl2 sc1", "s_waitcnt vmcnt(0)", "buffer_inv sc1"],
    ("acq_rel", "system"): ["buffer_wbl2 sc0 sc1", "s_waitcnt vmcnt(0)", "buffer_inv sc0 sc1"],
    ("seq_cst", "block"): ["s_waitcnt vmcnt(0)"],
    ("seq_cst", "device"): ["buffer_wbl2 sc1", "s_waitcnt vmcnt(0)", "buffer_wbl2 sc1", "buffer_inv sc1"],
    ("seq_cst", "system"): ["buffer_wbl2 sc0 sc1", "s_waitcnt vmcnt(0)", "buffer_wbl2 sc0 sc1", "buffer_inv sc0 sc1"],
}
PLAIN_STORE = '"ep.store"(%c, %d) {order = "plain", scope = "none", cache = "default"} : (i32, !llvm.ptr<1>) -> ()\n'


def fence_row(order: str, scope: str) -> Row:
    """A fence between two plain stores."""
    fence = f'"ep.fence"() {{order = "{order}", scope = "{scope}"}} : () -> ()\n'
    return Row("%d: !llvm.ptr<1>", "%c = arith.constant 7 : i32\n" + PLAIN_STORE + fence + PLAIN_STORE)


def name(*words: str) -> str:
    return "_".join("".join(c if c.isalnum() else "_" for c in w) for w in words)


def without_last_waits(instructions: list[str]) -> list[str]:
    while instructions and instructions[-1].startswith("s_wait"):
        instructions = instructions[:-1]
    return instructions


def rows() -> tuple[dict[str, Row], dict[str, list[str]]]:
    made: dict[str, Row] = {}
    expected: dict[str, list[str]] = {}

    def row(key: str, row: Row, want: list[str]) -> None:
        made[key], expected[key] = row, ["global_store_dword", *without_last_waits(want)]

    for scope in SCOPES:
        for type_, (load, store) in GLOBAL_TYPES.items():
            bits, acquire, release = ACCESS_BITS[scope], ACQUIRE[scope], RELEASE[scope]
            for order, want in (
                ("relaxed", [load + bits]),
                ("acquire", [load + bits, *acquire]),
                ("seq_cst", [*SEQ_CST_LOAD[scope], load + bits, *acquire]),
            ):
                row(name("load", order, scope, "global", type_), memory_row("load", type_, "global", order, scope), want)
            for order, want in (
                ("relaxed", [store + bits]),
                ("release", [*release, store + bits]),
                ("seq_cst", [*SEQ_CST_STORE[scope], store + bits]),
            ):
                row(name("store", order, scope, "global", type_), memory_row("store", type_, "global", order, scope), want)
        for type_, (load, store) in SHARED_TYPES.items():
            for order in ("relaxed", "acquire", "seq_cst"):
                row(name("load", order, scope, "shared", type_), memory_row("load", type_, "shared", order, scope), [load])
            for order in ("relaxed", "release", "seq_cst"):
                want = [store] if order == "relaxed" else ["s_waitcnt vmcnt(0)", store]
                row(name("store", order, scope, "shared", type_), memory_row("store", type_, "shared", order, scope), want)
        orders = {o: (RELEASE[scope] if r else [], ACQUIRE[scope] if a else []) for o, (r, a) in RMW_ORDERS.items()}
        orders["seq_cst"] = (SEQ_CST_STORE[scope], ACQUIRE[scope])
        for ((kind, type_), (on_global, returning, silent)), (order, (before, after)) in itertools.product(RMW.items(), orders.items()):
            for op, bits, on_shared in (("atomic_rmw", RETURNING_BITS, returning), ("reduce", SILENT_BITS, silent)):
                want = [*RELEASE_ON_SHARED[order], on_shared]
                row(name(op, kind, order, scope, "shared", type_), memory_row(op, type_, "shared", order, scope, kind), want)
                if scope == "system" and kind in LOOPS_AT_SYSTEM_SCOPE:
                    load, wait, swap = LOOP[type_]
                    again = ["buffer_wbl2 sc0 sc1"] if order == "seq_cst" else []
                    want = [*(RELEASE[scope] if again else before), load, wait, *again, swap, *after]
                else:
                    want = [*before, on_global + bits[scope], *after]
                row(name(op, kind, order, scope, "global", type_), memory_row(op, type_, "global", order, scope, kind), want)
        for (type_, (on_global, on_shared)), (order, (before, after)) in itertools.product(CAS.items(), orders.items()):
            want = [*before, on_global + RETURNING_BITS[scope], *after]
            row(name("cas", order, scope, "global", type_), memory_row("atomic_cas", type_, "global", order, scope), want)
            want = [*RELEASE_ON_SHARED[order], on_shared]
            row(name("cas", order, scope, "shared", type_), memory_row("atomic_cas", type_, "shared", order, scope), want)
    for (order, scope), want in FENCES.items():
        row(name("fence", order, scope), fence_row(order, scope), [*want, "global_store_dword"])
    return made, expected


def test_every_row_on_gfx942():
    made, expected = rows()
    assert len(expected) > 1500
    assert differences(expected, instructions(made, "gfx942")) == ""


def test_some_rows_on_gfx950():
    made, expected = rows()
    few = dict(list(made.items())[::11])
    assert differences({key: expected[key] for key in few}, instructions(few, "gfx950")) == ""


# ---- chips whose scopes are spelled differently: a sample ----

SAMPLE = {
    ("load", "relaxed", "system"): ("load", "i32", "global"),
    ("load", "acquire", "block"): ("load", "i32", "global"),
    ("load", "acquire", "device"): ("load", "i32", "global"),
    ("load", "acquire", "system"): ("load", "i32", "global"),
    ("store", "release", "block"): ("store", "i32", "global"),
    ("store", "release", "device"): ("store", "i32", "global"),
    ("store", "release", "system"): ("store", "i32", "global"),
    ("atomic_rmw", "acq_rel", "device"): ("atomic_rmw", "i32", "global"),
    ("atomic_rmw", "acq_rel", "system"): ("atomic_rmw", "i32", "global"),
    ("reduce", "release", "system"): ("reduce", "i64", "global"),
}
ON = {
    "gfx90a": [
        ["global_load_dword glc"],
        ["global_load_dword"],
        ["global_load_dword glc", "s_waitcnt vmcnt(0)", "buffer_wbinvl1_vol"],
        ["global_load_dword glc", "s_waitcnt vmcnt(0)", "buffer_invl2", "buffer_wbinvl1_vol"],
        ["s_waitcnt vmcnt(0)", "global_store_dword"],
        ["s_waitcnt vmcnt(0)", "global_store_dword"],
        ["buffer_wbl2", "s_waitcnt vmcnt(0)", "global_store_dword"],
        ["s_waitcnt vmcnt(0)", "global_atomic_add glc", "s_waitcnt vmcnt(0)", "buffer_wbinvl1_vol"],
        ["buffer_wbl2", "s_waitcnt vmcnt(0)", "global_atomic_add glc", "s_waitcnt vmcnt(0)", "buffer_invl2", "buffer_wbinvl1_vol"],
        ["buffer_wbl2", "s_waitcnt vmcnt(0)", "global_atomic_add_x2"],
    ],
    "gfx1100": [
        ["global_load_b32 glc"],
        ["global_load_b32 glc", "s_waitcnt vmcnt(0)", "buffer_gl0_inv"],
        ["global_load_b32 glc", "s_waitcnt vmcnt(0)", "buffer_gl1_inv", "buffer_gl0_inv"],
        ["global_load_b32 glc", "s_waitcnt vmcnt(0)", "buffer_gl1_inv", "buffer_gl0_inv"],
        ["s_waitcnt_vscnt 0x0", "global_store_b32"],
        ["s_waitcnt_vscnt 0x0", "global_store_b32"],
        ["s_waitcnt_vscnt 0x0", "global_store_b32"],
        ["s_waitcnt_vscnt 0x0", "global_atomic_add_u32 glc", "s_waitcnt vmcnt(0)", "buffer_gl1_inv", "buffer_gl0_inv"],
        ["s_waitcnt_vscnt 0x0", "global_atomic_add_u32 glc", "s_waitcnt vmcnt(0)", "buffer_gl1_inv", "buffer_gl0_inv"],
        ["s_waitcnt_vscnt 0x0", "global_atomic_add_u64"],
    ],
}


@pytest.mark.parametrize("target", ON)
def test_sample_on(target):
    made = {name(*key): memory_row(op, t, space, key[1], key[2], "add") for key, (op, t, space) in SAMPLE.items()}
    store = "global_store_dword" if target == "gfx90a" else "global_store_b32"
    expected = {key: [store, *want] for key, want in zip(made, ON[target], strict=True)}
    assert differences(expected, instructions(made, target)) == ""


# ---- plain accesses, cache hints, halves ----

PLAIN = {
    ("load", "global", "i8", "default"): ["global_load_ubyte"],
    ("load", "global", "i32", "default"): ["global_load_dword"],
    ("load", "global", "vector<4xi32>", "default"): ["global_load_dwordx4"],
    ("load", "global", "vector<4xf32>", "default"): ["global_load_dwordx4"],
    ("load", "global", "vector<8xbf16>", "default"): ["global_load_dwordx4"],
    ("load", "global", "vector<16xi8>", "default"): ["global_load_dwordx4"],
    ("load", "global", "vector<4xi32>", "streaming"): ["global_load_dwordx4 nt"],
    ("load", "shared", "vector<4xf32>", "default"): ["ds_read_b128"],
    ("store", "global", "i8", "default"): ["global_store_byte"],
    ("store", "global", "i32", "default"): ["global_store_dword"],
    ("store", "global", "vector<4xi32>", "default"): ["global_store_dwordx4"],
    ("store", "global", "vector<8xbf16>", "default"): ["global_store_dwordx4"],
    ("store", "global", "vector<16xi8>", "default"): ["global_store_dwordx4"],
    ("store", "global", "vector<4xi32>", "streaming"): ["global_store_dwordx4 nt"],
    ("store", "shared", "vector<4xf32>", "default"): ["ds_write_b128"],
}
HALVES = {
    ("load", "relaxed", "device"): ["global_load_dwordx2 sc1", "global_load_dwordx2 sc1"],
    ("load", "acquire", "system"): [
        *("global_load_dwordx2 sc0 sc1", "global_load_dwordx2 sc0 sc1", "s_waitcnt vmcnt(0)", "buffer_inv sc0 sc1"),
    ],
    ("store", "relaxed", "device"): ["global_store_dwordx2 sc1", "global_store_dwordx2 sc1"],
    ("store", "release", "system"): [
        *("buffer_wbl2 sc0 sc1", "s_waitcnt vmcnt(0)", "global_store_dwordx2 sc0 sc1", "global_store_dwordx2 sc0 sc1"),
    ],
}


def test_plain_on_gfx942():
    made = {name(*key): memory_row(key[0], key[2], key[1], "plain", "none", cache_=key[3]) for key in PLAIN}
    got = instructions(made, "gfx942")
    # The compiler may move the row's own store and a plain access past each other.
    got = {key: [i for i in done if i != "global_store_dword" or "store_global_i32" in key] for key, done in got.items()}
    expected = {name(*key): want if "store_global_i32" not in name(*key) else [*want, *want] for key, want in PLAIN.items()}
    assert differences(expected, got) == ""


def test_sixteen_ordered_bytes_on_gfx942():
    made = {name(*key): memory_row(key[0], "vector<4xi32>", "global", key[1], key[2]) for key in HALVES}
    got = {key: [i for i in done if i != "s_waitcnt vmcnt(1)"][1:] for key, done in instructions(made, "gfx942").items()}
    assert differences({name(*key): want for key, want in HALVES.items()}, got) == ""


# ---- a block's stores, a barrier, and one thread's release ----
# LLVM 22 would leave out both waits on gfx9: the one for stores before the barrier, without which the releasing wave cannot release
# them, and the one for buffer_wbl2, where the releasing wave itself has stored nothing.

STORES_BARRIER_RELEASE = {
    ("gfx90a", "device"): ["global_store_dword", "s_waitcnt vmcnt(0)", "s_barrier", "s_waitcnt vmcnt(0)", "global_store_dword"],
    ("gfx90a", "system"): [
        *("global_store_dword", "s_waitcnt vmcnt(0)", "s_barrier"),
        *("buffer_wbl2", "s_waitcnt vmcnt(0)", "global_store_dword"),
    ],
    ("gfx942", "device"): [
        *("global_store_dword", "s_waitcnt vmcnt(0)", "s_barrier"),
        *("buffer_wbl2 sc1", "s_waitcnt vmcnt(0)", "global_store_dword sc1"),
    ],
    ("gfx942", "system"): [
        *("global_store_dword", "s_waitcnt vmcnt(0)", "s_barrier"),
        *("buffer_wbl2 sc0 sc1", "s_waitcnt vmcnt(0)", "global_store_dword sc0 sc1"),
    ],
    ("gfx950", "system"): [
        *("global_store_dword", "s_waitcnt vmcnt(0)", "s_barrier"),
        *("buffer_wbl2 sc0 sc1", "s_waitcnt vmcnt(0)", "global_store_dword sc0 sc1"),
    ],
    ("gfx1100", "system"): ["global_store_b32", "s_waitcnt_vscnt 0x0", "s_barrier", "buffer_gl0_inv", "global_store_b32"],
}


@pytest.mark.parametrize(("target", "scope"), STORES_BARRIER_RELEASE)
def test_one_thread_releases_the_stores_of_its_block(target, scope):
    body = memory_row("store", "i32", "global", "release", scope).body
    got = instructions({"k": Row("%p: !llvm.ptr<1>, %v: i32", '"ep.barrier"() : () -> ()\n' + body)}, target)
    assert got == {"k": STORES_BARRIER_RELEASE[target, scope]}


def test_one_thread_releases_the_stores_of_its_block_on_gfx12():
    body = memory_row("store", "i32", "global", "release", "system").body
    got = instructions({"k": Row("%p: !llvm.ptr<1>, %v: i32", '"ep.barrier"() : () -> ()\n' + body)}, "gfx1200")["k"]
    assert got.index("global_store_b32") < got.index("s_wait_storecnt 0x0") < got.index("s_barrier_signal")
    released = got[got.index("s_barrier_wait") :]
    assert released.index("global_wb scope:SCOPE_SYS") < released.index("s_wait_storecnt 0x0")
    assert released[-1] == "global_store_b32 scope:SCOPE_SYS"
