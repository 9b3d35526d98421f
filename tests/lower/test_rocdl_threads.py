"""Barriers, warp operations, clocks and what stands in for the bulk engine on AMD."""

import re

import pytest
from lower_harness import Row, compile_rows, instructions, lower, module_text
from test_nvvm_threads import ROWS, SPECIALS, special

from epdsl.lowering import LoweringError

GFX9, GFX11 = "gfx942", "gfx1100"


WIDE = "%w0 = arith.extui %v0 : i32 to i64\n%w1 = arith.constant 6364136223846793005 : i64\n%w2 = arith.muli %w0, %w1 : i64\n"
SHUFFLED = {
    "i32": "",
    "f32": "%v1 = arith.bitcast %v0 : i32 to f32\n",
    "i64": WIDE + "%v1 = arith.xori %w2, %w0 : i64\n",
    "f64": WIDE + "%v1 = arith.bitcast %w2 : i64 to f64\n",
}


def shuffle(kind: str, type_: str) -> Row:
    """A shuffle of a value that differs by lane; another would be folded away."""
    value = "%v1" if type_ != "i32" else "%v0"
    return Row(
        "%l: i32",
        f'%m = arith.constant -1 : i64\n%v0 = "ep.special"() {{name = "thread_idx.x"}} : () -> i32\n{SHUFFLED[type_]}'
        f'%s0 = "ep.shuffle"({value}, %l, %m) {{kind = "{kind}"}} : ({type_}, i32, i64) -> {type_}\nsink(%s0 : {type_})',
    )


@pytest.fixture(scope="module", params=[GFX9, GFX11])
def compiled(request):
    made = {name: row for name, (row, _) in ROWS.items()} | {name.replace(".", "_"): special(name) for name in SPECIALS}
    made |= {"idx": shuffle("idx", "i32"), "up": shuffle("up", "f32"), "down": shuffle("down", "i32"), "xor": shuffle("xor", "i32")}
    made |= {"idx64": shuffle("idx", "i64"), "xor64": shuffle("xor", "f64")}
    made["bulk_load"] = Row(
        "%p: !llvm.ptr<1>, %b: !llvm.ptr<3>, %n: i32",
        '"ep.bulk_load"(%b, %p, %n, %b) : (!llvm.ptr<3>, !llvm.ptr<1>, i32, !llvm.ptr<3>) -> ()',
    )
    return request.param, instructions(made, request.param)


def test_memory_and_barriers(compiled):
    target, got = compiled
    inv = ["buffer_gl0_inv"] if target == GFX11 else []
    permute = "ds_bpermute_b32"
    assert got["barrier"] == (["s_waitcnt vmcnt(0)", "s_barrier"] if target == GFX9 else ["s_barrier", *inv])
    assert got["warp_sync"] == []
    assert got["yield"] == got["bulk_commit"] == got["bulk_wait_full"] == got["bulk_wait_source"] == got["proxy_fence_shared"] == []
    for name in ("idx", "up", "down", "xor"):
        assert got[name] == [permute], name
    assert got["idx64"] == got["xor64"] == [permute, permute]


def test_named_barriers_count_in_lds(compiled):
    target, got = compiled
    names = {
        GFX9: ("ds_write_b128", "ds_add_rtn_u32", "ds_add_u32", "ds_read_b32"),
        GFX11: ("ds_store_b128", "ds_add_rtn_u32", "ds_add_u32", "ds_load_b32"),
    }
    clear, arrive, complete, look = names[target]
    wait = [i for i in got["named_barrier"] if not i.startswith(("buffer", "s_wait"))]
    assert wait == [clear, clear, clear, clear, "s_barrier", arrive, complete, look, "s_sleep", look]
    only = [i for i in got["named_arrive"] if not i.startswith(("buffer", "s_wait"))]
    assert only == [clear, clear, clear, clear, "s_barrier", arrive, complete]
    assert "s_barrier" not in got["sleep"]


def test_clocks(compiled):
    target, got = compiled
    if target == GFX9:
        assert got["clock"] == ["s_memtime"]
        assert got["globaltimer"] == ["s_memrealtime"]
        assert got["sleep"] == ["s_memrealtime", "s_sleep", "s_memrealtime"]
    else:
        assert got["globaltimer"] == ["s_sendmsg_rtn_b64"]


def test_bulk_copies_are_made_at_once(compiled):
    target, got = compiled
    load = [i for i in got["bulk_load"] if i.startswith(("global", "ds"))][1:]
    store = [i for i in got["bulk_store"] if i.startswith(("global", "ds"))]
    if target == GFX9:
        assert load == ["global_load_dwordx4", "ds_write_b128", "ds_read_b64", "ds_cmpst_rtn_b64"]
        assert store == ["ds_read_b128", "global_store_dwordx4"]
    else:
        assert load == ["global_load_b128", "ds_store_b128", "ds_load_b64", "ds_cmpstore_rtn_b64"]
        assert store == ["ds_load_b128", "global_store_b128"]


def body(row: Row, target: str) -> str:
    text = compile_rows({"k": row}, target).texts["gcn"]
    found = re.search(r"^k:.*?\n(.*?)^\.Lfunc_end", text, re.S | re.M)
    assert found
    return found[1]


@pytest.mark.parametrize(("target", "shift"), [(GFX9, 6), (GFX11, 5)])
def test_warp_id(target, shift):
    assert re.search(rf"v_lshrrev_b32_e32 v\d+, {shift}, v\d+", body(special("warp_id"), target))


def test_grid_and_block_size_come_from_the_implicit_arguments():
    metadata = compile_rows({"k": special("grid_dim.y"), "l": special("block_dim.z")}, GFX9).texts["gcn"]
    assert "hidden_block_count_y" in metadata
    assert "hidden_group_size_z" in metadata
    for name, at in (("grid_dim.y", 4), ("block_dim.z", 16)):
        llvm = compile_rows({"k": special(name)}, GFX9).texts["llvm-opt"]
        assert re.search(rf"getelementptr \w*\s*i8, ptr addrspace\(4\) %\d+, i64 {at}\b", llvm), llvm


def test_votes_look_at_the_lanes_of_the_mask_only():
    row = Row(
        "%v: i32, %l: i32, %m: i64",
        '%q = arith.cmpi slt, %v, %l : i32\n%s0 = "ep.vote"(%q, %m) {kind = "ballot"} : (i1, i64) -> i64\nsink(%s0 : i64)',
    )
    assert "s_and_b64" in body(row, GFX9)


def test_trap():
    assert "s_trap 2" in body(ROWS["trap"][0], GFX9)


def test_poll_sleeps_and_reads_the_clock():
    row = Row(
        "%q: !llvm.ptr<1>, %v: i64, %t: i64, %n: i64",
        '%s0 = "ep.poll"(%q, %v, %t, %n) {site = 0 : i32, bits = 64 : i32} : (!llvm.ptr<1>, i64, i64, i64) -> i1\n'
        "%s1 = arith.extui %s0 : i1 to i32\nsink(%s1 : i32)",
    )
    text = body(row, GFX9)
    assert text.index("s_sleep 1") < text.index("s_memrealtime")
    assert re.search(r"s_mul_hi_u32 s\d+, s\d+, 10", text), "ticks of 10 ns"


def test_math():
    names = ("exp", "exp2", "log", "log2", "rsqrt", "sqrt", "absf", "floor", "roundeven")
    made = {f"{n}_{t}": Row(f"%x: {t}", f"%s0 = math.{n} %x : {t}\nsink(%s0 : {t})") for n in names for t in ("f32", "f16", "bf16")}
    made |= {f"{n}_f64": Row("%x: f64", f"%s0 = math.{n} %x : f64\nsink(%s0 : f64)") for n in names[4:]}
    assert set(instructions(made, GFX9)) == set(made), "each compiles, and calls nothing"
    with pytest.raises(LoweringError, match=r"math\.exp on \(f64\): there is no code for f64 on gfx942\. Convert to f32 first"):
        lower(module_text({"k": Row("%x: f64", "%s0 = math.exp %x : f64\nsink(%s0 : f64)")}, "amd"), GFX9)
