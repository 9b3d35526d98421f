"""`ep` to NVIDIA: one row an operation, order and scope, then the small patterns that fill a row in.

Ordered accesses, read-modify-writes and fences are inline PTX, because the NVPTX back end of LLVM 22 drops order and scope from
`atomicrmw`. The orders follow the PTX ISA, "Memory Consistency Model": sequential consistency is `fence.sc` before the access.
Barriers, shuffles and votes are intrinsics, which LLVM knows to be convergent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlir import ir
from mlir.dialects import llvm

from epdsl import lowering as lo
from epdsl.ir.steps import Step, Watch, run_steps
from epdsl.lowering import Op, Pattern
from epdsl.targets import Target

# ---- the table ------------------------------------------------------------------------------------------------------------------------

SCOPES = {"block": "cta", "device": "gpu", "system": "sys"}
SPACES = {lo.GLOBAL: "global", lo.SHARED: "shared"}
CACHES = {
    (lo.GLOBAL, "streaming"): ".L1::no_allocate",
    (lo.GLOBAL, "default"): "",
    (lo.SHARED, "default"): "",
    (lo.SHARED, "streaming"): "",
}

# (operation, order) -> (what goes before, the instruction). "plain" without a cache hint is an ordinary LLVM load or store.
MEMORY = {
    ("load", "plain"): ("", "ld.{space}{cache}"),
    ("load", "relaxed"): ("", "ld.relaxed.{scope}.{space}{cache}"),
    ("load", "acquire"): ("", "ld.acquire.{scope}.{space}{cache}"),
    ("load", "seq_cst"): ("fence.sc.{scope}; ", "ld.acquire.{scope}.{space}{cache}"),
    ("store", "plain"): ("", "st.{space}{cache}"),
    ("store", "relaxed"): ("", "st.relaxed.{scope}.{space}{cache}"),
    ("store", "release"): ("", "st.release.{scope}.{space}{cache}"),
    ("store", "seq_cst"): ("fence.sc.{scope}; ", "st.release.{scope}.{space}{cache}"),
    ("atom", "relaxed"): ("", "atom.relaxed.{scope}.{space}"),
    ("atom", "acquire"): ("", "atom.acquire.{scope}.{space}"),
    ("atom", "release"): ("", "atom.release.{scope}.{space}"),
    ("atom", "acq_rel"): ("", "atom.acq_rel.{scope}.{space}"),
    ("atom", "seq_cst"): ("fence.sc.{scope}; ", "atom.acq_rel.{scope}.{space}"),
    # `red` has no acquire form, so a reduce that acquires is an `atom` whose result nobody reads.
    ("red", "relaxed"): ("", "red.relaxed.{scope}.{space}"),
    ("red", "release"): ("", "red.release.{scope}.{space}"),
    ("fence", "acquire"): ("", "fence.acq_rel.{scope}"),
    ("fence", "release"): ("", "fence.acq_rel.{scope}"),
    ("fence", "acq_rel"): ("", "fence.acq_rel.{scope}"),
    ("fence", "seq_cst"): ("", "fence.sc.{scope}"),
}

# (op, bits) -> operation and type of atom and red; of a float op the bits are the float's. `sub` adds the negated value.
RMW = {
    ("add", 32): "add.u32",
    ("add", 64): "add.u64",
    ("sub", 32): "add.u32",
    ("sub", 64): "add.u64",
    ("min", 32): "min.s32",
    ("min", 64): "min.s64",
    ("max", 32): "max.s32",
    ("max", 64): "max.s64",
    ("umin", 32): "min.u32",
    ("umin", 64): "min.u64",
    ("umax", 32): "max.u32",
    ("umax", 64): "max.u64",
    ("and", 32): "and.b32",
    ("and", 64): "and.b64",
    ("or", 32): "or.b32",
    ("or", 64): "or.b64",
    ("xor", 32): "xor.b32",
    ("xor", 64): "xor.b64",
    ("xchg", 32): "exch.b32",
    ("xchg", 64): "exch.b64",
    ("fadd", 32): "add.f32",
    ("fadd", 64): "add.f64",
}
CAS = {16: "cas.b16", 32: "cas.b32", 64: "cas.b64"}
NO_RED = ("xchg",)

# bits of an access -> (how often, register, bits of one register, type suffix)
ACCESS = {
    8: (1, "h", 16, ".b8"),
    16: (1, "h", 16, ".b16"),
    32: (1, "r", 32, ".b32"),
    64: (1, "l", 64, ".b64"),
    128: (4, "r", 32, ".v4.b32"),
}
REGISTER = {16: "h", 32: "r", 64: "l"}
FLOAT_REGISTER = {32: "f", 64: "d"}

SPECIALS = {
    **{f"thread_idx.{a}": f"llvm.nvvm.read.ptx.sreg.tid.{a}" for a in "xyz"},
    **{f"block_idx.{a}": f"llvm.nvvm.read.ptx.sreg.ctaid.{a}" for a in "xyz"},
    **{f"block_dim.{a}": f"llvm.nvvm.read.ptx.sreg.ntid.{a}" for a in "xyz"},
    **{f"grid_dim.{a}": f"llvm.nvvm.read.ptx.sreg.nctaid.{a}" for a in "xyz"},
    "lane_id": "llvm.nvvm.read.ptx.sreg.laneid",
    "clock": "llvm.nvvm.read.ptx.sreg.clock64",
    "globaltimer": "llvm.nvvm.read.ptx.sreg.globaltimer",
}
# kind -> (intrinsic, clamp operand)
SHUFFLES = {
    "idx": ("llvm.nvvm.shfl.sync.idx.i32", 31),
    "up": ("llvm.nvvm.shfl.sync.up.i32", 0),
    "down": ("llvm.nvvm.shfl.sync.down.i32", 31),
    "xor": ("llvm.nvvm.shfl.sync.bfly.i32", 31),
}
VOTES = {
    "ballot": ("llvm.nvvm.vote.ballot.sync", 32),
    "any": ("llvm.nvvm.vote.any.sync", 1),
    "all": ("llvm.nvvm.vote.all.sync", 1),
}
# operation -> (PTX, constraints), sm_90 and later
BULK = {
    "ep.mbarrier_init": ("mbarrier.init.shared::cta.b64 [$0], $1;", "l,r"),
    "ep.mbarrier_arrive": ("mbarrier.arrive.shared::cta.b64 _, [$0];", "l"),
    "ep.mbarrier_expect": ("mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", "l,r"),
    "ep.bulk_load": ("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];", "l,l,r,l"),
    "ep.bulk_store": ("cp.async.bulk.global.shared::cta.bulk_group [$0], [$1], $2;", "l,l,r"),
    "ep.bulk_commit": ("cp.async.bulk.commit_group;", ""),
}
MBARRIER_TEST = "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [$1], $2; selp.b32 $0, 1, 0, p; }"
BULK_WAIT = {"source": "cp.async.bulk.wait_group.read {pending};", "full": "cp.async.bulk.wait_group {pending};"}
PROXY_FENCE = {"shared": "fence.proxy.async.shared::cta;", "global": "fence.proxy.async.global;"}

# ---- memory ---------------------------------------------------------------------------------------------------------------------------


def _instruction(op: Op, kind: str, pointer: Any = None) -> str:
    """The row of `op`, with scope, space and cache filled in, up to the operation or type suffix."""
    order = op.order
    if (kind, order) not in MEMORY:
        raise op.error("EP101", "there is no such instruction", f"Orders of {kind} are {', '.join(o for k, o in MEMORY if k == kind)}.")
    if order != "plain" and op.scope not in SCOPES:
        raise op.error("EP101", "an ordered operation needs a scope", f"Scopes are {', '.join(SCOPES)}.")
    space = lo.address_space(pointer) if pointer is not None else lo.GLOBAL
    if space not in SPACES:
        raise op.error("EP101", f"a pointer in address space {space} is neither global nor shared", "Pass a ptr<1> or a ptr<3>.")
    cache = CACHES[space, op.cache] if kind in ("load", "store") else ""
    before, instruction = MEMORY[kind, order]
    return (before + instruction).format(scope=SCOPES.get(op.scope, ""), space=SPACES[space], cache=cache)


def _access(op: Op, type_: Any) -> tuple[int, str, int, str]:
    if lo.bits(type_) not in ACCESS:
        raise op.error("EP101", f"{lo.bits(type_)} bits are not one access", f"Widths are {', '.join(map(str, ACCESS))} bits.")
    return ACCESS[lo.bits(type_)]


def _operands(first: int, count: int) -> str:
    names = ", ".join(f"${first + i}" for i in range(count))
    return names if count == 1 else f"{{{names}}}"


def load(op: Op, target: Target) -> Sequence[Any]:
    (ptr,), type_ = op.operands, op.result_type
    instruction = _instruction(op, "load", ptr)
    if op.order == "plain" and (op.cache == "default" or lo.bits(type_) not in ACCESS):
        return [llvm.LoadOp(type_, ptr, alignment=lo.alignment(type_)).res]
    count, register, width, suffix = _access(op, type_)
    text = f"{instruction}{suffix} {_operands(0, count)}, [${count}];"
    words = lo.assembly(text, ",".join([f"={register}"] * count + ["l"]), [ptr], [lo.integer(width)] * count)
    if lo.bits(type_) == 8:
        words = [lo.resize(words[0], 8)]
    return [lo.bitcast(words[0], type_) if count == 1 else lo.vector_of(words, type_)]


def store(op: Op, target: Target) -> Sequence[Any]:
    value, ptr = op.operands
    instruction = _instruction(op, "store", ptr)
    if op.order == "plain" and (op.cache == "default" or lo.bits(value.type) not in ACCESS):
        llvm.StoreOp(value, ptr, alignment=lo.alignment(value.type))
        return []
    count, register, width, suffix = _access(op, value.type)
    words = lo.words_of(value, count, width if lo.bits(value.type) >= width else lo.bits(value.type))
    words = [lo.resize(w, width) for w in words]
    constraints = ",".join(["l"] + [register] * count)
    lo.assembly(f"{instruction}{suffix} [$0], {_operands(1, count)};", constraints, [ptr, *words])
    return []


def _rmw(op: Op, kind: str) -> Any:
    """Emits `atom` or `red`; the old value of an `atom`."""
    ptr, value = op.operands
    key = (op.op, lo.bits(value.type))
    if key not in RMW or lo.is_vector(value.type) or (lo.is_float(value.type) != (op.op == "fadd") and op.op != "xchg"):
        raise op.error("EP101", "there is no such instruction", "Use 32 or 64 bits: f32 or f64 for fadd, integers else.")
    if op.op == "sub":
        value = lo.subtract(lo.constant(0, key[1]), value)
    as_float = op.op == "fadd"
    register = (FLOAT_REGISTER if as_float else REGISTER)[key[1]]
    held = value.type if as_float else lo.integer(key[1])
    instruction = f"{_instruction(op, kind, ptr)}.{RMW[key]}"
    if kind == "red":
        lo.assembly(f"{instruction} [$0], $1;", f"l,{register}", [ptr, lo.bitcast(value, held)])
        return None
    (old,) = lo.assembly(f"{instruction} $0, [$1], $2;", f"={register},l,{register}", [ptr, lo.bitcast(value, held)], [held])
    return lo.bitcast(old, value.type)


def atomic_rmw(op: Op, target: Target) -> Sequence[Any]:
    return [_rmw(op, "atom")]


def reduce(op: Op, target: Target) -> Sequence[Any]:
    _rmw(op, "red" if ("red", op.order) in MEMORY and op.op not in NO_RED else "atom")
    return []


def atomic_cas(op: Op, target: Target) -> Sequence[Any]:
    ptr, expected, desired = op.operands
    type_, width = expected.type, lo.bits(expected.type)
    if width not in CAS or lo.is_vector(type_):
        raise op.error("EP101", "there is no such instruction", f"Use a value of {', '.join(map(str, CAS))} bits.")
    held, register = lo.integer(width), REGISTER[width]
    text = f"{_instruction(op, 'atom', ptr)}.{CAS[width]} $0, [$1], $2, $3;"
    (old,) = lo.assembly(text, f"={register},l,{register},{register}", [ptr, lo.bitcast(expected, held), lo.bitcast(desired, held)], [held])
    return [lo.bitcast(old, type_)]


def fence(op: Op, target: Target) -> Sequence[Any]:
    lo.assembly(f"{_instruction(op, 'fence')};", "", [])
    return []


def shared(op: Op, target: Target) -> Sequence[Any]:
    return [lo.shared_address(op)]


# ---- threads --------------------------------------------------------------------------------------------------------------------------


# Not the `.aligned` forms, which CUDA C++ has: ptxas takes one for a promise that the warp comes to it as one, and lets a warp that a
# branch has parted come in two parts, where branches meet and an exit is among them. This form has it look.


def barrier(op: Op, target: Target) -> Sequence[Any]:
    lo.intrinsic("llvm.nvvm.barrier.cta.sync.all", None, lo.constant(0))
    return []


def named_barrier(op: Op, target: Target) -> Sequence[Any]:
    lo.intrinsic("llvm.nvvm.barrier.cta.sync.count", None, *op.operands)
    return []


def named_arrive(op: Op, target: Target) -> Sequence[Any]:
    lo.intrinsic("llvm.nvvm.barrier.cta.arrive.count", None, *op.operands)
    return []


def _mask(op: Op) -> Any:
    return lo.resize(op.operands[-1], 32)


def warp_sync(op: Op, target: Target) -> Sequence[Any]:
    lo.intrinsic("llvm.nvvm.bar.warp.sync", None, _mask(op))
    return []


def shuffle(op: Op, target: Target) -> Sequence[Any]:
    value, lane, _ = op.operands
    width = lo.bits(value.type)
    if width not in (32, 64):
        raise op.error("EP101", f"{width} bits cannot be shuffled", "Use a value of 32 or 64 bits.")
    name, clamp = SHUFFLES[op.kind]
    words = [lo.intrinsic(name, lo.integer(32), _mask(op), word, lane, lo.constant(clamp)) for word in lo.words_of(value, width // 32, 32)]
    moved = lo.bitcast(words[0], value.type) if width == 32 else lo.vector_of(words, value.type)
    # The instruction looks at the low five bits of the lane or distance only.
    return [lo.select(lo.compare("ult", lane, lo.constant(target.warp_size)), moved, value)]


def vote(op: Op, target: Target) -> Sequence[Any]:
    name, width = VOTES[op.kind]
    result = lo.intrinsic(name, lo.integer(width), _mask(op), op.operands[0])
    return [lo.resize(result, lo.bits(op.result_type))]


def elect(op: Op, target: Target) -> Sequence[Any]:
    if target.has_elect:
        pair = lo.intrinsic("llvm.nvvm.elect.sync", ir.Type.parse("!llvm.struct<(i32, i1)>"), _mask(op))
        return [lo.extract(pair, 1, lo.integer(1))]
    lowest = llvm.CountTrailingZerosOp(_mask(op), False).res
    return [lo.compare("eq", lowest, lo.intrinsic(SPECIALS["lane_id"], lo.integer(32)))]


def special(op: Op, target: Target) -> Sequence[Any]:
    name = op.attribute("name")
    if name == "warp_id":
        names = (*(f"thread_idx.{a}" for a in "xyz"), "block_dim.x", "block_dim.y")
        x, y, z, nx, ny = (lo.intrinsic(SPECIALS[n], lo.integer(32)) for n in names)
        linear = lo.add(x, lo.multiply(nx, lo.add(y, lo.multiply(ny, z))))
        return [llvm.LShrOp(linear, lo.constant(5)).result]
    return [lo.intrinsic(SPECIALS[name], op.result_type)]


# ---- time -----------------------------------------------------------------------------------------------------------------------------


def sleep(op: Op, target: Target) -> Sequence[Any]:
    lo.assembly("nanosleep.u32 $0;", "r", op.operands)
    return []


def poll(op: Op, target: Target) -> Sequence[Any]:
    _, _, started, timeout = op.operands
    now = lo.intrinsic(SPECIALS["globaltimer"], lo.integer(64))
    return [lo.compare("ugt", lo.subtract(now, started), timeout)]


def nothing(op: Op, target: Target) -> Sequence[Any]:
    return []


def trap(op: Op, target: Target) -> Sequence[Any]:
    llvm.Trap()
    return []


# ---- the bulk copy engine -------------------------------------------------------------------------------------------------------------


def _need_bulk(op: Op) -> None:
    if not op.target.has_bulk_copy:
        raise op.error("EP103", "there is no bulk copy engine", "Compile for sm_90 or later, or copy with ep.copy and ep.barrier.")


def bulk(op: Op, target: Target) -> Sequence[Any]:
    _need_bulk(op)
    text, constraints = BULK[op.name]
    lo.assembly(text, constraints, op.operands)
    return []


def bulk_wait(op: Op, target: Target) -> Sequence[Any]:
    _need_bulk(op)
    lo.assembly(BULK_WAIT[op.read].format(pending=op.pending), "", [])
    return []


def mbarrier_test(op: Op, target: Target) -> Sequence[Any]:
    _need_bulk(op)
    (done,) = lo.assembly(MBARRIER_TEST, "=r,l,r", op.operands, [lo.integer(32)])
    return [lo.compare("ne", done, lo.constant(0))]


def proxy_fence(op: Op, target: Target) -> Sequence[Any]:
    _need_bulk(op)
    lo.assembly(PROXY_FENCE[op.space], "", [])
    return []


# ---- arithmetic LLVM has no NVPTX code for ----------------------------------------------------------------------------------------------


def _approx(mnemonic: str, value: Any) -> Any:
    return lo.assembly(f"{mnemonic}.approx.f32 $0, $1;", "=f,f", [value], [value.type], effects=False)[0]


def _float(value: float) -> Any:
    f32 = ir.F32Type.get()
    return llvm.ConstantOp(f32, ir.FloatAttr.get(f32, value)).result


def _multiply(a: Any, b: Any) -> Any:
    return llvm.FMulOp(a, b).result


def _f32_only(op: Op) -> Any:
    (value,) = op.operands
    if not isinstance(value.type, ir.F32Type):
        raise op.error("EP104", "it exists for f32 only", "Convert to f32 first.")
    return value


def exp2(op: Op, target: Target) -> Sequence[Any]:
    return [_approx("ex2", _f32_only(op))]


def exp(op: Op, target: Target) -> Sequence[Any]:
    """2 to the x log2(e), with the product's rounding error put back: a relative error of about 2^-22 over the whole range."""
    x = _f32_only(op)
    high = _multiply(x, _float(1.44269502162933349609375))
    rest = llvm.FMAOp(x, _float(1.44269502162933349609375), llvm.FNegOp(high).result).res
    rest = llvm.FMAOp(x, _float(1.92596299112661746887e-8), rest).res
    power = _approx("ex2", high)
    corrected = llvm.FMAOp(_multiply(power, rest), _float(0.693147182464599609375), power).res
    # Where the power overflows or vanishes there is no error to put back, and infinity times zero would make a NaN.
    inside = llvm.FCmpOp(llvm.FCmpPredicate.olt, llvm.FAbsOp(x).res, _float(88.0)).res
    return [lo.select(inside, corrected, power)]


def log2(op: Op, target: Target) -> Sequence[Any]:
    return [_approx("lg2", _f32_only(op))]


def log(op: Op, target: Target) -> Sequence[Any]:
    """As CUDA's `__logf`: an absolute error of about 2^-22 near one, two units in the last place elsewhere."""
    return [_multiply(_approx("lg2", _f32_only(op)), _float(0.693147182464599609375))]


def rsqrt(op: Op, target: Target) -> Sequence[Any]:
    return [_approx("rsqrt", _f32_only(op))]


PATTERNS: dict[str, Pattern] = {
    "ep.load": load,
    "ep.store": store,
    "ep.atomic_rmw": atomic_rmw,
    "ep.reduce": reduce,
    "ep.atomic_cas": atomic_cas,
    "ep.fence": fence,
    "ep.proxy_fence": proxy_fence,
    "ep.barrier": barrier,
    "ep.named_barrier": named_barrier,
    "ep.named_arrive": named_arrive,
    "ep.warp_sync": warp_sync,
    "ep.shuffle": shuffle,
    "ep.vote": vote,
    "ep.elect": elect,
    "ep.special": special,
    "ep.shared": shared,
    "ep.sleep": sleep,
    "ep.poll": poll,
    "ep.yield": nothing,
    "ep.trap": trap,
    "ep.mbarrier_init": bulk,
    "ep.mbarrier_arrive": bulk,
    "ep.mbarrier_expect": bulk,
    "ep.mbarrier_test": mbarrier_test,
    "ep.bulk_load": bulk,
    "ep.bulk_store": bulk,
    "ep.bulk_commit": bulk,
    "ep.bulk_wait": bulk_wait,
    "math.exp": exp,
    "math.exp2": exp2,
    "math.log": log,
    "math.log2": log2,
    "math.rsqrt": rsqrt,
}
# What the code generator knows by itself.
MATH = ("absf", "absi", "ceil", "copysign", "ctlz", "ctpop", "cttz", "floor", "fma", "round", "roundeven", "sqrt", "trunc")


def _max_threads(given: int | None) -> dict[str, Any]:
    """Without the "at least one block an SM", ptxas aims at two and spills."""
    if given is None:
        return {}
    return {"nvvm.maxntid": ir.DenseI32ArrayAttr.get([given]), "nvvm.minctasm": ir.IntegerAttr.get(lo.integer(32), 1)}


def steps(target: Target) -> tuple[Step, ...]:
    """The passes from `ep` to the LLVM dialect for an NVIDIA chip, in order."""
    return (
        lo.each_gpu_module("check-math", lambda m: lo.check_math(m, target, PATTERNS, MATH)),
        lo.each_gpu_module("declare-shared", lo.declare_shared),
        lo.each_gpu_module("ep-to-nvvm", lambda m: lo.rewrite_all(m, target, PATTERNS)),
        lo.each_gpu_module("func-to-llvm", lambda m: lo.functions_to_llvm(m, "nvvm.kernel", _max_threads)),
        # ".target sm_90, debug" makes the driver switch optimisation off; directives alone give lines without it.
        *lo.to_llvm_dialect("DebugDirectivesOnly"),
    )


def lower(module: Any, target: Target, watch: Watch | None = None) -> int:
    """Lowers the kernels of `module`, in place, to the LLVM dialect for an NVIDIA chip.

    Returns the bytes of block-shared memory the lowering itself needs beyond the kernel's: none. Raises LoweringError.
    """
    run_steps(module, steps(target), watch or Watch())
    return 0
