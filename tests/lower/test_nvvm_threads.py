"""Barriers, warp operations, clocks and the bulk engine on NVIDIA against the PTX they must be."""

import re
import shutil
import subprocess

import pytest
from lower_harness import Row, compile_rows, differences, instructions, lower, module_text, ptx_instructions

from epdsl.lowering import LoweringError

MASK = "%m = arith.constant -1 : i64\n"
SHARED_POINTER = "%b: !llvm.ptr<3>"


def shuffle(kind: str, type_: str) -> Row:
    op = f'%s0 = "ep.shuffle"(%v, %l, %m) {{kind = "{kind}"}} : ({type_}, i32, i64) -> {type_}\nsink(%s0 : {type_})'
    return Row(f"%v: {type_}, %l: i32", MASK + op)


def vote(kind: str, type_: str) -> Row:
    body = f'%q = arith.cmpi slt, %v, %l : i32\n%s0 = "ep.vote"(%q, %m) {{kind = "{kind}"}} : (i1, i64) -> {type_}\n'
    sink = f"sink(%s0 : {type_})" if type_ == "i64" else "%s1 = arith.extui %s0 : i1 to i32\nsink(%s1 : i32)"
    return Row("%v: i32, %l: i32", MASK + body + sink)


ROWS = {
    "barrier": (Row("", '"ep.barrier"() : () -> ()'), ["barrier.sync"]),
    "named_barrier": (Row("%i: i32, %n: i32", '"ep.named_barrier"(%i, %n) : (i32, i32) -> ()'), ["barrier.sync"]),
    "named_arrive": (Row("%i: i32, %n: i32", '"ep.named_arrive"(%i, %n) : (i32, i32) -> ()'), ["barrier.arrive"]),
    "warp_sync": (Row("", MASK + '"ep.warp_sync"(%m) : (i64) -> ()'), ["bar.warp.sync"]),
    "idx": (shuffle("idx", "i32"), ["shfl.sync.idx.b32"]),
    "up": (shuffle("up", "f32"), ["shfl.sync.up.b32"]),
    "down": (shuffle("down", "i32"), ["shfl.sync.down.b32"]),
    "xor": (shuffle("xor", "i32"), ["shfl.sync.bfly.b32"]),
    "idx64": (shuffle("idx", "i64"), ["shfl.sync.idx.b32", "shfl.sync.idx.b32"]),
    "xor64": (shuffle("xor", "f64"), ["shfl.sync.bfly.b32", "shfl.sync.bfly.b32"]),
    "ballot": (vote("ballot", "i64"), ["vote.sync.ballot.b32"]),
    "any": (vote("any", "i1"), ["vote.sync.any.pred"]),
    "all": (vote("all", "i1"), ["vote.sync.all.pred"]),
    "elect": (
        Row("", MASK + '%s0 = "ep.elect"(%m) : (i64) -> i1\n%s1 = arith.extui %s0 : i1 to i32\nsink(%s1 : i32)'),
        ["elect.sync"],
    ),
    "sleep": (Row("%n: i32", '"ep.sleep"(%n) : (i32) -> ()'), ["nanosleep.u32"]),
    "trap": (Row("", '"ep.trap"() : () -> ()'), ["trap"]),
    "yield": (Row("", '"ep.yield"() {site = 0 : i32, bounded = 0 : i32} : () -> ()'), []),
    "mbarrier_init": (
        Row(f"{SHARED_POINTER}, %n: i32", '"ep.mbarrier_init"(%b, %n) : (!llvm.ptr<3>, i32) -> ()'),
        ["mbarrier.init.shared::cta.b64"],
    ),
    "mbarrier_arrive": (Row(SHARED_POINTER, '"ep.mbarrier_arrive"(%b) : (!llvm.ptr<3>) -> ()'), ["mbarrier.arrive.shared::cta.b64"]),
    "mbarrier_expect": (
        Row(f"{SHARED_POINTER}, %n: i32", '"ep.mbarrier_expect"(%b, %n) : (!llvm.ptr<3>, i32) -> ()'),
        ["mbarrier.arrive.expect_tx.shared::cta.b64"],
    ),
    "mbarrier_test": (
        Row(
            f"{SHARED_POINTER}, %n: i32",
            '%s0 = "ep.mbarrier_test"(%b, %n) : (!llvm.ptr<3>, i32) -> i1\n%s1 = arith.extui %s0 : i1 to i32\nsink(%s1 : i32)',
        ),
        ["mbarrier.try_wait.parity.shared::cta.b64"],
    ),
    "bulk_load": (
        Row(
            f"{SHARED_POINTER}, %s: !llvm.ptr<1>, %n: i32",
            '"ep.bulk_load"(%b, %s, %n, %b) : (!llvm.ptr<3>, !llvm.ptr<1>, i32, !llvm.ptr<3>) -> ()',
        ),
        ["cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"],
    ),
    "bulk_store": (
        Row(f"{SHARED_POINTER}, %d: !llvm.ptr<1>, %n: i32", '"ep.bulk_store"(%d, %b, %n) : (!llvm.ptr<1>, !llvm.ptr<3>, i32) -> ()'),
        ["cp.async.bulk.global.shared::cta.bulk_group"],
    ),
    "bulk_commit": (Row("", '"ep.bulk_commit"() : () -> ()'), ["cp.async.bulk.commit_group"]),
    "bulk_wait_source": (Row("", '"ep.bulk_wait"() {pending = 2 : i32, read = "source"} : () -> ()'), ["cp.async.bulk.wait_group.read"]),
    "bulk_wait_full": (Row("", '"ep.bulk_wait"() {pending = 0 : i32, read = "full"} : () -> ()'), ["cp.async.bulk.wait_group"]),
    "proxy_fence_shared": (Row("", '"ep.proxy_fence"() {space = "shared"} : () -> ()'), ["fence.proxy.async.shared::cta"]),
    "proxy_fence_global": (Row("", '"ep.proxy_fence"() {space = "global"} : () -> ()'), ["fence.proxy.async.global"]),
}
SPECIALS = {
    "thread_idx.x": "%tid.x",
    "thread_idx.y": "%tid.y",
    "thread_idx.z": "%tid.z",
    "block_idx.x": "%ctaid.x",
    "block_idx.y": "%ctaid.y",
    "block_idx.z": "%ctaid.z",
    "block_dim.x": "%ntid.x",
    "block_dim.y": "%ntid.y",
    "block_dim.z": "%ntid.z",
    "grid_dim.x": "%nctaid.x",
    "grid_dim.y": "%nctaid.y",
    "grid_dim.z": "%nctaid.z",
    "lane_id": "%laneid",
    "clock": "%clock64",
    "globaltimer": "%globaltimer",
}
BULK = ("mbarrier", "bulk", "proxy")


def special(name: str) -> Row:
    type_ = "i64" if name in ("clock", "globaltimer") else "i32"
    return Row("", f'%s0 = "ep.special"() {{name = "{name}"}} : () -> {type_}\nsink(%s0 : {type_})')


def bodies(ptx: str) -> dict[str, str]:
    return {name: body for name, body in re.findall(r"\.entry (\w+)\(.*?\n\{\n(.*?)\n\}", ptx, re.S)}


@pytest.fixture(scope="module")
def compiled():
    return compile_rows({name: row for name, (row, _) in ROWS.items()}, "sm_90")


def test_every_row(compiled):
    assert differences({name: want for name, (_, want) in ROWS.items()}, ptx_instructions(compiled.texts["ptx"])) == ""


@pytest.mark.skipif(shutil.which("ptxas") is None, reason="needs ptxas")
def test_ptxas_takes_every_row(compiled, tmp_path):
    (tmp_path / "rows.ptx").write_bytes(compiled.binary)
    done = subprocess.run(["ptxas", "-O0", "-arch=sm_90", "rows.ptx", "-o", "rows.cubin"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_operands(compiled):
    body = bodies(compiled.texts["ptx"])
    assert re.search(r"barrier\.sync\s+0;", body["barrier"])
    assert re.search(r"barrier\.sync\s+%r\d+, %r\d+;", body["named_barrier"])
    assert re.search(r"barrier\.arrive\s+%r\d+, %r\d+;", body["named_arrive"])
    # The form that takes it for granted that a warp comes as one is what ptxas lets a warp in parts come to.
    assert not re.search(r"\bbar\.(sync|arrive|red)\b|\.aligned\b", compiled.texts["ptx"])
    assert re.search(r"bar\.warp\.sync\s+-1;", body["warp_sync"])
    assert re.search(r"shfl\.sync\.up\.b32\s+%r\d+, %r\d+, %r\d+, 0, -1;", body["up"])
    assert re.search(r"shfl\.sync\.down\.b32\s+%r\d+, %r\d+, %r\d+, 31, -1;", body["down"])
    assert "cp.async.bulk.wait_group.read 2;" in body["bulk_wait_source"]
    # The instruction takes a lane or distance modulo 32; out of range keeps the own value.
    for name in ("idx", "up", "down", "xor"):
        assert re.search(r"setp\.(lt\.u32\s+%p\d+, %r\d+, 32|gt\.u32\s+%p\d+, %r\d+, 31);", body[name]), body[name]


def test_specials():
    code = compile_rows({name.replace(".", "_"): special(name) for name in SPECIALS}, "sm_90")
    found = {
        name: set(re.findall(r"mov\.u\d+\s+%rd?\d+, (%[a-z0-9]+(?:\.[xyz])?);", body)) for name, body in bodies(code.texts["ptx"]).items()
    }
    assert found == {name.replace(".", "_"): {register} for name, register in SPECIALS.items()}


def test_warp_id_counts_threads_of_all_three_dimensions():
    body = bodies(compile_rows({"k": special("warp_id")}, "sm_90").texts["ptx"])["k"]
    assert "%warpid" not in body
    assert all(register in body for register in ("%tid.x", "%tid.y", "%tid.z", "%ntid.x", "%ntid.y"))
    assert re.search(r"shr\.u32\s+%r\d+, %r\d+, 5;", body)


def test_poll_reads_the_clock():
    row = Row(
        "%p: !llvm.ptr<1>, %v: i64, %t: i64, %n: i64",
        '%s0 = "ep.poll"(%p, %v, %t, %n) {site = 0 : i32, bits = 64 : i32} : (!llvm.ptr<1>, i64, i64, i64) -> i1\n'
        "%s1 = arith.extui %s0 : i1 to i32\nsink(%s1 : i32)",
    )
    body = bodies(compile_rows({"k": row}, "sm_90").texts["ptx"])["k"]
    assert "%globaltimer" in body
    assert body.index("%globaltimer") < body.index("sub.s64") < body.index("setp.gt.u64")


def test_elect_before_sm_90_is_the_lowest_lane_of_the_mask():
    body = bodies(compile_rows({"k": ROWS["elect"][0]}, "sm_80").texts["ptx"])["k"]
    assert "elect" not in body
    assert "%laneid" in body


@pytest.mark.parametrize("name", [n for n in ROWS if n.startswith(BULK)])
@pytest.mark.parametrize("target", ["sm_80", "sm_89"])
def test_bulk_engine_before_sm_90_is_refused(name, target):
    with pytest.raises(LoweringError, match=rf"ep\.\w+.*there is no bulk copy engine on {target}\. Compile for sm_90 or later"):
        lower(module_text({"k": ROWS[name][0]}, "nvidia"), target)


def test_math():
    made = {
        name: Row("%x: f32", f"%s0 = math.{name} %x : f32\nsink(%s0 : f32)")
        for name in ("exp", "exp2", "log", "log2", "rsqrt", "sqrt", "absf")
    }
    got = instructions(made, "sm_90")
    assert got["exp2"] == ["ex2.approx.f32"]
    assert got["log2"] == ["lg2.approx.f32"]
    assert got["rsqrt"] == ["rsqrt.approx.f32"]
    assert [i for i in got["exp"] if i.startswith("ex2")] == ["ex2.approx.f32"]
    with pytest.raises(LoweringError, match=r"math\.sin on \(f32\): there is no code for it on sm_90"):
        lower(module_text({"k": Row("%x: f32", "%s0 = math.sin %x : f32\nsink(%s0 : f32)")}, "nvidia"), "sm_90")
