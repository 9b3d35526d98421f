"""Whole kernels on every target, and what holds for both lowerings."""

import re
import shutil
import struct
import subprocess

import pytest
from lower_elf import read_elf
from lower_harness import Row, compile_rows, compile_text, context, lower, memory_row, module_text

from epdsl import codegen, lower_nvvm, lower_rocdl
from epdsl.ir import dialect
from epdsl.lowering import LoweringError
from epdsl.targets import parse_target

KERNEL = """
module attributes {gpu.container_module} { gpu.module @kernel_module {
gpu.func @exchange(%src: !llvm.ptr<1>, %flag: !llvm.ptr<1>, %n: i32, %scale: bf16, %context: !llvm.ptr<1>) kernel
    attributes {ep.max_threads = 256 : i64, ep.shared_bytes = 4096 : i64} {
  %zero = arith.constant 0 : i32
  %one = arith.constant 1 : i32
  %two = arith.constant 2 : i32
  %mask = arith.constant -1 : i64
  %timeout = arith.constant 1000000000 : i64
  %tid = "ep.special"() {name = "thread_idx.x"} : () -> i32
  %block = "ep.special"() {name = "block_dim.x"} : () -> i32
  %warp = "ep.special"() {name = "warp_id"} : () -> i32
  %shared = "ep.shared"() {offset = 64 : i32} : () -> !llvm.ptr<3>
  cf.br ^loop(%tid : i32)
^loop(%i: i32):
  %more = arith.cmpi slt, %i, %n : i32
  cf.cond_br %more, ^body, ^after
^body:
  %at = llvm.getelementptr %src[%i] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, vector<8xbf16>
  %row = "ep.load"(%at) {order = "plain", scope = "none", cache = "streaming"} : (!llvm.ptr<1>) -> vector<8xbf16>
  %x = vector.extract %row[3] : bf16 from vector<8xbf16>
  %y = arith.mulf %x, %scale : bf16
  %wide = arith.extf %y : bf16 to f32
  %scaled = arith.mulf %wide, %wide : f32
  %summed = arith.addf %scaled, %wide : f32
  %new = arith.truncf %summed : f32 to bf16
  %row2 = vector.insert %new, %row[3] : bf16 into vector<8xbf16>
  "ep.store"(%row2, %at) {order = "plain", scope = "none", cache = "default"} : (vector<8xbf16>, !llvm.ptr<1>) -> ()
  "ep.store"(%row2, %shared) {order = "plain", scope = "none", cache = "default"} : (vector<8xbf16>, !llvm.ptr<3>) -> ()
  %next = arith.addi %i, %block : i32
  cf.br ^loop(%next : i32)
^after:
  "ep.barrier"() : () -> ()
  "ep.named_barrier"(%one, %block) : (i32, i32) -> ()
  %leader = "ep.elect"(%mask) : (i64) -> i1
  cf.cond_br %leader, ^signal, ^done
^signal:
  "ep.reduce"(%flag, %one) {op = "add", order = "release", scope = "system"} : (!llvm.ptr<1>, i32) -> ()
  %started = "ep.special"() {name = "globaltimer"} : () -> i64
  cf.br ^look
^look:
  %seen = "ep.load"(%flag) {order = "relaxed", scope = "system", cache = "default"} : (!llvm.ptr<1>) -> i32
  %ready = arith.cmpi sge, %seen, %two : i32
  cf.cond_br %ready, ^acquire, ^again
^again:
  %seen64 = arith.extui %seen : i32 to i64
  %expired = "ep.poll"(%flag, %seen64, %started, %timeout) {site = 0 : i32, bits = 64 : i32} : (!llvm.ptr<1>, i64, i64, i64) -> i1
  cf.cond_br %expired, ^fault, ^look
^fault:
  "ep.store"(%one, %context) {order = "relaxed", scope = "system", cache = "default"} : (i32, !llvm.ptr<1>) -> ()
  "ep.trap"() : () -> ()
  cf.br ^done
^acquire:
  "ep.fence"() {order = "acquire", scope = "system"} : () -> ()
  cf.br ^done
^done:
  gpu.return } } }
"""


@pytest.mark.parametrize(
    ("target", "version"), [("sm_80", "8.0"), ("sm_89", "8.0"), ("sm_90", "8.3"), ("sm_90a", "8.3"), ("sm_100", "8.6"), ("sm_120", "8.7")]
)
def test_ptx(target, version):
    ptx = compile_text(KERNEL, target).texts["ptx"]
    assert re.search(rf"^\.version {re.escape(version)}$", ptx, re.M)
    assert re.search(rf"^\.target {target}$", ptx, re.M), "also that it does not say debug"
    assert re.search(r"^\.visible \.entry exchange\(", ptx, re.M)
    assert re.search(r"^\.maxntid 256", ptx, re.M)
    assert re.search(r"^\.minnctapersm 1$", ptx, re.M)
    assert re.search(r"^\.extern \.shared \.align 128 \.b8 ep_shared\[\];", ptx, re.M)
    assert len(re.findall(r"\.loc\s+1 \d+ \d+", ptx)) > 10
    assert ".func" not in ptx


@pytest.mark.skipif(shutil.which("ptxas") is None, reason="needs ptxas")
@pytest.mark.parametrize("target", ["sm_80", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_120"])
def test_ptxas_takes_the_kernel(target, tmp_path):
    (tmp_path / "kernel.ptx").write_bytes(compile_text(KERNEL, target).binary)
    done = subprocess.run(["ptxas", f"-arch={target}", "kernel.ptx", "-o", "kernel.cubin"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize(
    ("target", "mach"), [("gfx90a", 0x3F), ("gfx942", 0x4C), ("gfx950", 0x4F), ("gfx1100", 0x41), ("gfx1200", 0x48), ("gfx1201", 0x4E)]
)
def test_hsaco(target, mach):
    code = compile_text(KERNEL, target)
    elf = read_elf(code.binary)
    assert elf.machine == 224  # EM_AMDGPU
    assert elf.flags & 0xFF == mach == parse_target(target).elf_mach
    # EF_AMDGPU_FEATURE_XNACK_ANY_V4 and ..._SRAMECC_ANY_V4, of chips that have the choice.
    assert elf.flags & 0xF00 == (0x500 if target in ("gfx90a", "gfx942", "gfx950") else 0)
    assert elf.undefined == ()
    assert code.binary[8] == 3  # ABI version of code object version 5
    descriptor = elf.symbols["exchange.kd"]
    assert len(descriptor) == 64
    group_bytes, private_bytes, argument_bytes = struct.unpack_from("<III", descriptor)
    assert group_bytes == 128, "sixteen barrier counters, up to the alignment of the dynamic memory behind them"
    assert private_bytes == 0
    assert argument_bytes == 32 + 256, "8 + 8 + 4 + 2 + 2 of padding + 8, then the implicit arguments"
    assert ".debug_line" in elf.sections
    assert ".amdhsa_code_object_version 5" in code.texts["gcn"]
    assert ".max_flat_workgroup_size: 256" in code.texts["gcn"]


def test_a_kernel_without_named_barriers_pays_for_none():
    code = compile_rows({"k": Row("", '"ep.barrier"() : () -> ()')}, "gfx942")
    assert struct.unpack_from("<I", read_elf(code.binary).symbols["k.kd"])[0] == 0


def test_the_lowering_needs_no_dynamic_shared_memory_of_its_own():
    for target in ("sm_90", "gfx942"):
        _, extra = lower(KERNEL, target)
        assert extra == 0


def test_texts():
    assert set(compile_text(KERNEL, "sm_90").texts) == {"llvm", "llvm-opt", "ptx"}
    assert set(compile_text(KERNEL, "gfx942").texts) == {"llvm", "llvm-opt", "gcn"}
    code = compile_text(KERNEL, "sm_90")
    assert code.binary.decode() == code.texts["ptx"]


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_multiply_and_add_are_not_contracted(target):
    row = Row("%a: f32, %b: f32, %c: f32", "%s0 = arith.mulf %a, %b : f32\n%s1 = arith.addf %s0, %c : f32\nsink(%s1 : f32)")
    code = compile_rows({"k": row}, target)
    text = code.texts.get("ptx") or code.texts["gcn"]
    assert "fma" not in text
    if target == "sm_90":
        # Without .rn, ptxas would be free to contract.
        assert "mul.rn.f32" in text
        assert "add.rn.f32" in text
    else:
        assert re.search("v_mul_f32|s_mul_f32", text)
        assert re.search("v_add_f32|s_add_f32", text)


def test_every_operation_has_a_row_on_both():
    operations = {f"ep.{name}" for name in re.findall(r"irdl\.operation @(\w+)", dialect.IRDL)}
    assert len(operations) > 25
    of_the_simulator = {"ep.breakpoint", "ep.debug_value"}
    for patterns in (lower_nvvm.PATTERNS, lower_rocdl.PATTERNS):
        assert {name for name in patterns if name.startswith("ep.")} == operations - of_the_simulator


@pytest.mark.parametrize("table", [lower_nvvm.MEMORY, lower_rocdl.MEMORY])
def test_every_order_has_a_row(table):
    load_orders = {order for kind, order in table if kind == "load"}
    store_orders = {order for kind, order in table if kind == "store"}
    assert load_orders == {"plain", *dialect.LOAD_ORDERS}
    assert store_orders == {"plain", *dialect.STORE_ORDERS}
    for kind in ("atom", "rmw", "cas"):
        assert {order for k, order in table if k == kind} in (set(), set(dialect.RMW_ORDERS))


def test_every_operation_of_the_tables():
    assert {op for op, _ in lower_nvvm.RMW} == set(lower_rocdl.RMW) == set(dialect.RMW_OPS)
    assert set(lower_nvvm.SCOPES) == set(lower_rocdl.SCOPES) == set(dialect.ATOMIC_SCOPES)
    assert set(lower_nvvm.SHUFFLES) == set(dialect.SHUFFLE_KINDS)
    assert set(lower_nvvm.VOTES) == set(dialect.VOTE_KINDS)
    assert set(lower_nvvm.SPECIALS) | {"warp_id"} == {*dialect.SPECIALS_32, *dialect.SPECIALS_64}


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            memory_row("load", "i32", "global", "release", "system"),
            r"ep\.load order release scope system cache default on \(!llvm\.ptr<1>\)",
        ),
        (memory_row("store", "i32", "global", "acquire", "block"), r"ep\.store order acquire scope block"),
        (memory_row("store", "vector<3xf32>", "global", "release", "device"), r"96 bits are not one access"),
        (memory_row("atomic_rmw", "i16", "global", "relaxed", "device", "add"), r"ep\.atomic_rmw op add order relaxed scope device"),
        (memory_row("atomic_rmw", "f32", "global", "relaxed", "device", "add"), r"Use 32 or 64 bits: f32 or f64 for fadd, integers else"),
        (memory_row("atomic_rmw", "i32", "global", "relaxed", "device", "fadd"), r"f32 or f64 for fadd"),
        (memory_row("atomic_rmw", "i32", "global", "relaxed", "none", "add"), r"an ordered operation needs a scope"),
        (memory_row("atomic_cas", "i8", "global", "relaxed", "device"), r"Use a value of 16, 32, 64 bits"),
    ],
)
def test_what_no_row_fits_is_an_error_with_a_place(row, message, target):
    with pytest.raises(LoweringError, match=message) as caught:
        lower(module_text({"k": row}, parse_target(target).vendor), target)
    assert re.match(r'EP101: loc\("-":\d+:\d+\)', str(caught.value))
    assert target in str(caught.value)


def test_inline_assembly_on_amd_is_assembled_by_clang():
    row = Row("", 'llvm.inline_asm has_side_effects "s_nop 7", "" : () -> ()')
    code = compile_rows({"k": row}, "gfx942")
    assert "s_nop 7" in code.texts["gcn"]
    assert "k.kd" in read_elf(code.binary).symbols


def test_no_linker_names_the_extra(monkeypatch):
    monkeypatch.setenv("ROCM_PATH", "/nowhere")
    monkeypatch.setattr(codegen.Path, "is_file", lambda self: False)
    monkeypatch.setattr(codegen.shutil, "which", lambda name: None)
    monkeypatch.setattr(codegen.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(codegen.CodegenError, match=r"no ld\.lld .* pip install epdsl\[amd\]"):
        codegen.find_tool("ld.lld", "ld.lld")


def test_rocm_is_preferred(monkeypatch, tmp_path):
    linker = tmp_path / "llvm" / "bin" / "ld.lld"
    linker.parent.mkdir(parents=True)
    linker.write_text("#!/bin/sh\nexit 3\n")
    linker.chmod(0o755)
    monkeypatch.setenv("ROCM_PATH", str(tmp_path))
    assert codegen.find_tool("ld.lld", "ld.lld") == [str(linker)]
    with pytest.raises(codegen.CodegenError, match=r"ld\.lld .* failed with status 3"):
        codegen.link(b"")


def test_an_undefined_symbol_is_an_error():
    text = """
    declare void @missing()
    define amdgpu_kernel void @k() {
      call void @missing()
      ret void
    }"""
    target = parse_target("gfx942")
    unit, machine = codegen.optimise(text, target)
    with pytest.raises(codegen.CodegenError, match="undefined symbol: missing"):
        codegen.link(machine.emit_object(unit))


def test_llvm_that_does_not_parse_is_an_error():
    assert context() is context()
    with pytest.raises(codegen.CodegenError, match="LLVM refuses the module lowered for sm_90"):
        codegen.optimise("define void @k( {", parse_target("sm_90"))
