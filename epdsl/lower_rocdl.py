"""`ep` to AMD: one row an operation, order and scope, then the small patterns that fill a row in.

Ordered accesses are LLVM atomics with a sync scope, a release being a fence before a weaker access. Nothing here calls a ROCm device
library, so a code object needs no symbol from outside.

What the hardware lacks is a helper function (`HELPERS`), inlined where it is used: barriers of part of a block count waves in
block-shared memory, an mbarrier is a 64-bit word there, and a bulk copy is made by the calling thread before it returns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mlir import ir
from mlir.dialects import llvm

from epdsl import lowering as lo
from epdsl.ir.steps import Step, Watch, run_steps
from epdsl.lower_rocdl_helpers import HELPERS, RELEASE_GFX9
from epdsl.lower_rocdl_helpers import RELEASE as RELEASE_LATER
from epdsl.lowering import Op, Pattern
from epdsl.targets import Target

# ---- the table ------------------------------------------------------------------------------------------------------------------------

SCOPES = {"block": "workgroup", "device": "agent", "system": ""}
MONOTONIC, ACQUIRE, RELEASE, ACQ_REL, SEQ_CST = (
    getattr(llvm.AtomicOrdering, n) for n in ("monotonic", "acquire", "release", "acq_rel", "seq_cst")
)

# (operation, order) -> (whether a release fence goes before, LLVM ordering of the access[, of a cas that fails]).
# A plain access is an ordinary load or store.
MEMORY: dict[tuple[str, str], tuple[Any, ...]] = {
    ("load", "plain"): (False,),
    ("load", "relaxed"): (False, MONOTONIC),
    ("load", "acquire"): (False, ACQUIRE),
    ("load", "seq_cst"): (False, SEQ_CST),
    ("store", "plain"): (False,),
    ("store", "relaxed"): (False, MONOTONIC),
    ("store", "release"): (True, MONOTONIC),
    ("store", "seq_cst"): (True, SEQ_CST),
    ("rmw", "relaxed"): (False, MONOTONIC),
    ("rmw", "acquire"): (False, ACQUIRE),
    ("rmw", "release"): (True, MONOTONIC),
    ("rmw", "acq_rel"): (True, ACQUIRE),
    ("rmw", "seq_cst"): (True, SEQ_CST),
    ("cas", "relaxed"): (False, MONOTONIC, MONOTONIC),
    ("cas", "acquire"): (False, ACQUIRE, ACQUIRE),
    ("cas", "release"): (True, MONOTONIC, MONOTONIC),
    ("cas", "acq_rel"): (True, ACQUIRE, ACQUIRE),
    ("cas", "seq_cst"): (True, SEQ_CST, SEQ_CST),
}
# order -> (whether a release fence goes first, LLVM ordering of the fence after it).
FENCES: dict[str, tuple[bool, Any]] = {
    "acquire": (False, ACQUIRE),
    "release": (True, None),
    "acq_rel": (True, ACQUIRE),
    "seq_cst": (True, SEQ_CST),
}
# (operation, order) -> fences before and after the two relaxed 8-byte halves of an ordered 16-byte access.
HALVES: dict[tuple[str, str], tuple[str | None, str | None]] = {
    ("load", "relaxed"): (None, None),
    ("load", "acquire"): (None, "acquire"),
    ("load", "seq_cst"): ("seq_cst", "acquire"),
    ("store", "relaxed"): (None, None),
    ("store", "release"): ("release", None),
    ("store", "seq_cst"): ("seq_cst", "seq_cst"),
}
# The operand of s_waitcnt on gfx9 that says vmcnt(0) and nothing else.
VMCNT_0 = 0x0F70
GFX10 = 0x1000

# `sub` adds the negated value: a system-scope atomic subtraction would become a compare-and-swap loop.
RMW = {
    "add": llvm.AtomicBinOp.add,
    "sub": llvm.AtomicBinOp.add,
    "min": llvm.AtomicBinOp.min,
    "max": llvm.AtomicBinOp.max,
    "umin": llvm.AtomicBinOp.umin,
    "umax": llvm.AtomicBinOp.umax,
    "and": llvm.AtomicBinOp._and,
    "or": llvm.AtomicBinOp._or,
    "xor": llvm.AtomicBinOp._xor,
    "xchg": llvm.AtomicBinOp.xchg,
    "fadd": llvm.AtomicBinOp.fadd,
}
RMW_BITS = (32, 64)
CAS_BITS = (16, 32, 64)
ACCESS_BITS = (8, 16, 32, 64)

SPECIALS = {
    **{f"thread_idx.{a}": f"llvm.amdgcn.workitem.id.{a}" for a in "xyz"},
    **{f"block_idx.{a}": f"llvm.amdgcn.workgroup.id.{a}" for a in "xyz"},
}
# Byte offset and width in the implicit arguments behind the kernel's own (LLVM, AMDGPU usage, code object version 5).
IMPLICIT = {
    "grid_dim.x": (0, 32),
    "grid_dim.y": (4, 32),
    "grid_dim.z": (8, 32),
    "block_dim.x": (12, 16),
    "block_dim.y": (14, 16),
    "block_dim.z": (16, 16),
}
# s_memrealtime and its successors count a constant 100 MHz clock.
NS_PER_TICK = 10

# operation -> helper; operands are passed as they are.
CALLS = {
    "ep.mbarrier_init": "ep_mbarrier_init",
    "ep.mbarrier_arrive": "ep_mbarrier_arrive",
    "ep.mbarrier_expect": "ep_mbarrier_expect",
    "ep.mbarrier_test": "ep_mbarrier_test",
    "ep.bulk_load": "ep_bulk_load",
    "ep.bulk_store": "ep_bulk_store",
}

# ---- memory ---------------------------------------------------------------------------------------------------------------------------


def _row(op: Op, kind: str) -> tuple[Any, ...]:
    if (kind, op.order) not in MEMORY:
        raise op.error("EP101", "there is no such instruction", f"Orders of {kind} are {', '.join(o for k, o in MEMORY if k == kind)}.")
    return MEMORY[kind, op.order]


def _scope(op: Op, ptr: Any = None) -> str:
    """LLVM's name of the scope. Block-shared memory is seen by the block alone, so no wider scope is paid for."""
    if op.scope not in SCOPES:
        raise op.error("EP101", "an ordered operation needs a scope", f"Scopes are {', '.join(SCOPES)}.")
    return SCOPES["block"] if ptr is not None and lo.address_space(ptr) == lo.SHARED else SCOPES[op.scope]


def _sync(scope: str) -> dict[str, Any]:
    """The system scope is LLVM's default and has no name."""
    return {"syncscope": ir.StringAttr.get(scope)} if scope else {}


def _fence(order: str, scope: str, target: Target) -> None:
    release, after = FENCES[order]
    if release:
        llvm.FenceOp(RELEASE, **_sync(scope))
        # On gfx9 LLVM 22 leaves out the wait for buffer_wbl2 when the wave has no store of its own in flight (llvm-project #178316), and
        # at block scope every wait, so that another wave could not release this one's stores further.
        if target.generation < GFX10:
            lo.intrinsic("llvm.amdgcn.s.waitcnt", None, lo.constant(VMCNT_0))
    if after is not None:
        llvm.FenceOp(after, **_sync(scope))


def _halves(op: Op, kind: str, scope: str, target: Target, access: Callable[[int], Any]) -> list[Any]:
    before, after = HALVES[kind, op.order]
    if before:
        _fence(before, scope, target)
    done = [access(i) for i in range(2)]
    if after:
        _fence(after, scope, target)
    return done


def _width_error(op: Op, width: int) -> lo.LoweringError:
    return op.error("EP101", f"{width} bits are not one access", f"Widths are {', '.join(map(str, ACCESS_BITS))} and 128 bits.")


def load(op: Op, target: Target) -> Sequence[Any]:
    (ptr,), type_ = op.operands, op.result_type
    row, width = _row(op, "load"), lo.bits(type_)
    streaming: dict[str, Any] = {"nontemporal": True} if op.cache == "streaming" else {}
    if op.order == "plain":
        return [llvm.LoadOp(type_, ptr, alignment=lo.alignment(type_), **streaming).res]
    scope = _scope(op, ptr)

    def atomic(bits: int, at: int, ordering: Any) -> Any:
        return llvm.LoadOp(lo.integer(bits), lo.offset(ptr, at), alignment=bits // 8, ordering=ordering, **_sync(scope), **streaming).res

    if width == 128:
        return [lo.vector_of(_halves(op, "load", scope, target, lambda i: atomic(64, 8 * i, MONOTONIC)), type_)]
    if width not in ACCESS_BITS:
        raise _width_error(op, width)
    return [lo.bitcast(atomic(width, 0, row[1]), type_)]


def store(op: Op, target: Target) -> Sequence[Any]:
    value, ptr = op.operands
    row, width = _row(op, "store"), lo.bits(value.type)
    streaming: dict[str, Any] = {"nontemporal": True} if op.cache == "streaming" else {}
    if op.order == "plain":
        llvm.StoreOp(value, ptr, alignment=lo.alignment(value.type), **streaming)
        return []
    scope = _scope(op, ptr)

    def atomic(word: Any, at: int, ordering: Any) -> None:
        nbytes = lo.bits(word.type) // 8
        llvm.StoreOp(word, lo.offset(ptr, at), alignment=nbytes, ordering=ordering, **_sync(scope), **streaming)

    if width == 128:
        words = lo.words_of(value, 2, 64)
        _halves(op, "store", scope, target, lambda i: atomic(words[i], 8 * i, MONOTONIC))
    elif width in ACCESS_BITS:
        if row[0]:
            _fence("release", scope, target)
        atomic(lo.bitcast(value, lo.integer(width)), 0, row[1])
    else:
        raise _width_error(op, width)
    return []


def atomic_rmw(op: Op, target: Target) -> Sequence[Any]:
    ptr, value = op.operands
    (release, ordering), width, scope = _row(op, "rmw"), lo.bits(value.type), _scope(op, ptr)
    fits = op.op == "xchg" or lo.is_float(value.type) == (op.op == "fadd")
    if op.op not in RMW or width not in RMW_BITS or lo.is_vector(value.type) or not fits:
        raise op.error("EP101", "there is no such instruction", "Use 32 or 64 bits: f32 or f64 for fadd, integers else.")
    if op.op == "sub":
        value = lo.subtract(lo.constant(0, width), value)
    if release:
        _fence("release", scope, target)
    held = value.type if op.op == "fadd" else lo.integer(width)
    old = llvm.AtomicRMWOp(RMW[op.op], ptr, lo.bitcast(value, held), ordering, alignment=width // 8, **_sync(scope)).result
    return [lo.bitcast(old, value.type)] if op.operation.results else []


def atomic_cas(op: Op, target: Target) -> Sequence[Any]:
    ptr, expected, desired = op.operands
    type_, width = expected.type, lo.bits(expected.type)
    (release, success, failure), scope = _row(op, "cas"), _scope(op, ptr)
    if width not in CAS_BITS or lo.is_vector(type_):
        raise op.error("EP101", "there is no such instruction", f"Use a value of {', '.join(map(str, CAS_BITS))} bits.")
    if release:
        _fence("release", scope, target)
    held = lo.integer(width)
    values = (lo.bitcast(expected, held), lo.bitcast(desired, held))
    pair = llvm.AtomicCmpXchgOp(ptr, *values, success, failure, alignment=width // 8, **_sync(scope)).res
    return [lo.bitcast(lo.extract(pair, 0, held), type_)]


def fence(op: Op, target: Target) -> Sequence[Any]:
    if op.order not in FENCES:
        raise op.error("EP101", "there is no such fence", f"Orders of a fence are {', '.join(FENCES)}.")
    _fence(op.order, _scope(op), target)
    return []


def shared(op: Op, target: Target) -> Sequence[Any]:
    return [lo.shared_address(op)]


# ---- threads --------------------------------------------------------------------------------------------------------------------------


def barrier(op: Op, target: Target) -> Sequence[Any]:
    """As `__syncthreads` of HIP: orders global and block-shared memory at block scope."""
    lo.call("ep_block_barrier", None)
    return []


def _named(op: Op, target: Target, waits: int) -> Sequence[Any]:
    barrier_id, threads = op.operands
    waves = llvm.LShrOp(threads, lo.constant(target.warp_size.bit_length() - 1)).result
    lo.call("ep_named_barrier", None, barrier_id, waves, lo.constant(waits, 1))
    return []


def named_barrier(op: Op, target: Target) -> Sequence[Any]:
    return _named(op, target, -1)


def named_arrive(op: Op, target: Target) -> Sequence[Any]:
    return _named(op, target, 0)


def warp_sync(op: Op, target: Target) -> Sequence[Any]:
    """A wave runs in step, so this emits nothing; it keeps the compiler from moving memory accesses across."""
    llvm.FenceOp(RELEASE, **_sync("wavefront"))
    lo.intrinsic("llvm.amdgcn.wave.barrier", None)
    llvm.FenceOp(ACQUIRE, **_sync("wavefront"))
    return []


def _lane_id() -> Any:
    return lo.call("ep_lane_id", lo.integer(32))


def shuffle(op: Op, target: Target) -> Sequence[Any]:
    value, lane, _ = op.operands
    width = lo.bits(value.type)
    if width not in (32, 64):
        raise op.error("EP101", f"{width} bits cannot be shuffled", "Use a value of 32 or 64 bits.")
    mine = _lane_id()
    source = {
        "idx": lambda: lane,
        "up": lambda: lo.subtract(mine, lane),
        "down": lambda: lo.add(mine, lane),
        "xor": lambda: llvm.XOrOp(mine, lane).result,
    }[op.kind]()
    # A distance near 2^32 would wrap round to a lane of the warp, so the distance is looked at as well.
    inside = lo.compare("ult", source, lo.constant(target.warp_size))
    if op.kind in ("up", "down"):
        inside = llvm.AndOp(inside, lo.compare("ult", lane, lo.constant(target.warp_size))).result
    address = llvm.ShlOp(lo.select(inside, source, mine), lo.constant(2), llvm.IntegerOverflowFlags.none).result
    words = [lo.intrinsic("llvm.amdgcn.ds.bpermute", lo.integer(32), address, w) for w in lo.words_of(value, width // 32, 32)]
    return [lo.bitcast(words[0], value.type) if width == 32 else lo.vector_of(words, value.type)]


def _ballot(predicate: Any, mask: Any) -> Any:
    return llvm.AndOp(lo.intrinsic("llvm.amdgcn.ballot.i64", lo.integer(64), predicate), mask).result


def vote(op: Op, target: Target) -> Sequence[Any]:
    predicate, mask = op.operands
    match op.kind:
        case "ballot":
            return [_ballot(predicate, mask)]
        case "any":
            return [lo.compare("ne", _ballot(predicate, mask), lo.constant(0, 64))]
        case _:
            other = llvm.XOrOp(predicate, lo.constant(-1, 1)).result
            return [lo.compare("eq", _ballot(other, mask), lo.constant(0, 64))]


def elect(op: Op, target: Target) -> Sequence[Any]:
    """The lowest running lane of the mask."""
    running = _ballot(lo.constant(-1, 1), op.operands[0])
    lowest = llvm.CountTrailingZerosOp(running, False).res
    return [lo.compare("eq", lo.resize(lowest, 32), _lane_id())]


def special(op: Op, target: Target) -> Sequence[Any]:
    return [_special(op.attribute("name"), target)]


def _special(name: str, target: Target) -> Any:
    if name in SPECIALS:
        return lo.intrinsic(SPECIALS[name], lo.integer(32))
    if name in IMPLICIT:
        at, width = IMPLICIT[name]
        implicit = lo.intrinsic("llvm.amdgcn.implicitarg.ptr", ir.Type.parse("!llvm.ptr<4>"))
        return lo.resize(llvm.LoadOp(lo.integer(width), lo.offset(implicit, at), alignment=width // 8, invariant=True).res, 32)
    match name:
        case "lane_id":
            return _lane_id()
        case "warp_id":
            x, y, z, nx, ny = (_special(n, target) for n in (*(f"thread_idx.{a}" for a in "xyz"), "block_dim.x", "block_dim.y"))
            linear = lo.add(x, lo.multiply(nx, lo.add(y, lo.multiply(ny, z))))
            return llvm.LShrOp(linear, lo.constant(target.warp_size.bit_length() - 1)).result
        case "clock" if target.generation < GFX10:
            return lo.intrinsic("llvm.amdgcn.s.memtime", lo.integer(64))
        case "clock":
            # gfx11 has no 64-bit cycle counter; ticks of the constant clock stand in.
            return lo.intrinsic("llvm.readsteadycounter", lo.integer(64))
        case _:
            return lo.multiply(lo.intrinsic("llvm.readsteadycounter", lo.integer(64)), lo.constant(NS_PER_TICK, 64))


# ---- time -----------------------------------------------------------------------------------------------------------------------------


def sleep(op: Op, target: Target) -> Sequence[Any]:
    lo.call("ep_sleep", None, *op.operands)
    return []


def poll(op: Op, target: Target) -> Sequence[Any]:
    _, _, started, timeout = op.operands
    lo.intrinsic("llvm.amdgcn.s.sleep", None, lo.constant(1))
    return [lo.compare("ugt", lo.subtract(_special("globaltimer", target), started), timeout)]


def nothing(op: Op, target: Target) -> Sequence[Any]:
    """Of `proxy_fence`, `bulk_commit` and `bulk_wait` too: a bulk copy was made by ordinary accesses of its own thread."""
    return []


def trap(op: Op, target: Target) -> Sequence[Any]:
    llvm.Trap()
    return []


def helper(op: Op, target: Target) -> Sequence[Any]:
    result = lo.call(CALLS[op.name], op.result_type if op.operation.results else None, *op.operands)
    return [] if result is None else [result]


PATTERNS: dict[str, Pattern] = {
    "ep.load": load,
    "ep.store": store,
    "ep.atomic_rmw": atomic_rmw,
    # The back end leaves the old value out of the instruction when nobody reads it.
    "ep.reduce": atomic_rmw,
    "ep.atomic_cas": atomic_cas,
    "ep.fence": fence,
    "ep.proxy_fence": nothing,
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
    "ep.mbarrier_init": helper,
    "ep.mbarrier_arrive": helper,
    "ep.mbarrier_expect": helper,
    "ep.mbarrier_test": helper,
    "ep.bulk_load": helper,
    "ep.bulk_store": helper,
    "ep.bulk_commit": nothing,
    "ep.bulk_wait": nothing,
}
# What the code generator knows by itself, in f32 and narrower.
MATH = (
    *("absf", "absi", "ceil", "copysign", "ctlz", "ctpop", "cttz", "exp", "exp2", "floor", "fma", "log", "log2"),
    *("round", "roundeven", "rsqrt", "sqrt", "trunc"),
)


def _max_threads(given: int | None) -> dict[str, Any]:
    return {"rocdl.flat_work_group_size": ir.StringAttr.get(f"1,{given or 1024}")}


def _prepare_named_barriers(gpu_module: Any) -> None:
    """Clears the counters at the entry of every kernel that has a named barrier."""
    for kernel in lo.kernels(gpu_module):
        if lo.named(kernel, ("ep.named_barrier", "ep.named_arrive")):
            entry = kernel.regions[0].blocks[0]
            with ir.InsertionPoint.at_block_begin(entry), kernel.location:
                lo.call("ep_named_barriers_clear", None)


def steps(target: Target) -> tuple[Step, ...]:
    """The passes from `ep` to the LLVM dialect for an AMD chip, in order."""
    helpers = HELPERS + (RELEASE_GFX9 if target.generation < GFX10 else RELEASE_LATER)
    return (
        lo.each_gpu_module("check-math", lambda m: lo.check_math(m, target, PATTERNS, MATH)),
        lo.each_gpu_module("add-helpers", lambda m: lo.add_text(m, helpers)),
        lo.each_gpu_module("declare-shared", lo.declare_shared),
        lo.each_gpu_module("prepare-named-barriers", _prepare_named_barriers),
        lo.each_gpu_module("ep-to-rocdl", lambda m: lo.rewrite_all(m, target, PATTERNS)),
        lo.each_gpu_module("func-to-llvm", lambda m: lo.functions_to_llvm(m, "rocdl.kernel", _max_threads)),
        *lo.to_llvm_dialect("LineTablesOnly"),
    )


def lower(module: Any, target: Target, watch: Watch | None = None) -> int:
    """Lowers the kernels of `module`, in place, to the LLVM dialect for an AMD chip.

    Returns the bytes of dynamic block-shared memory the lowering itself needs beyond the kernel's: none, because the counters of
    named barriers are static and so part of the code object's own size. Raises LoweringError.
    """
    run_steps(module, steps(target), watch or Watch())
    return 0
