"""ep -> coroutines -> host machine code: the simulator's lowering.

A kernel becomes one LLVM coroutine `ptr NAME(ptr args, ptr thread)`. It suspends wherever a GPU thread may have to wait; the scheduler
(`epdsl.sim.scheduler`) resumes it. All threads run on one host thread, so every order and scope is the plain access of the same name;
what orders and scopes promise is checked on the events, not by the hardware.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from epdsl_runtime import sim_layout as layout
from mlir import ir

from epdsl.ir.dialect import STOPS
from epdsl.ir.errors import CompileError
from epdsl.ir.graph import fault_exits
from epdsl.ir.locations import shown_places
from epdsl.ir.steps import Step, Watch, run_steps, upstream
from epdsl.ir.waves import Parting, partings
from epdsl.targets import Target


@dataclass(frozen=True)
class Code:
    """binary: a host object file; texts: "llvm" and "llvm-opt"."""

    binary: bytes = field(repr=False)
    texts: dict[str, str] = field(default_factory=dict[str, str], repr=False)


_RMW = {
    "add": "llvm.add", "sub": "llvm.sub", "and": "llvm.and", "or": "llvm.or", "xor": "llvm.xor", "fadd": "llvm.fadd",
    "min": "llvm.intr.smin", "max": "llvm.intr.smax", "umin": "llvm.intr.umin", "umax": "llvm.intr.umax",
}  # fmt: skip

# Specials that are words of the thread, of its block, or of its launch.
_SPECIAL = {
    "thread_idx.x": ("thread", layout.T_X), "thread_idx.y": ("thread", layout.T_Y), "thread_idx.z": ("thread", layout.T_Z),
    "lane_id": ("thread", layout.T_LANE), "warp_id": ("thread", layout.T_WARP),
    "block_idx.x": ("block", layout.B_X), "block_idx.y": ("block", layout.B_Y), "block_idx.z": ("block", layout.B_Z),
    "block_dim.x": ("launch", layout.L_DX), "block_dim.y": ("launch", layout.L_DY), "block_dim.z": ("launch", layout.L_DZ),
    "grid_dim.x": ("launch", layout.L_GX), "grid_dim.y": ("launch", layout.L_GY), "grid_dim.z": ("launch", layout.L_GZ),
}  # fmt: skip

PASSES = (
    "arith-expand{include-bf16=true include-f8e8m0=false}",
    *(f"convert-{dialect}-to-llvm" for dialect in ("vector", "math", "arith", "cf")),
    "reconcile-unrealized-casts",
    "ensure-debug-info-scope-on-llvm-func{emission-kind=LineTablesOnly}",
)


class Lowering:
    """Lowers one kernel. `host`: a plain function `void NAME(ptr args, ptr)` that never suspends."""

    def __init__(self, module: Any, name: str, host: bool, lockstep: bool) -> None:
        self.host = host
        self.module = module
        self.i1, self.i8, self.i32, self.i64 = (ir.IntegerType.get_signless(n) for n in (1, 8, 32, 64))
        self.ptr = ir.Type.parse("!llvm.ptr")
        gpu_module, source = module.body.operations[0].operation, kernel_of(module)
        result = "void" if host else "ptr"
        attributes: dict[str, Any] = {
            "sym_name": ir.StringAttr.get(name),
            "function_type": ir.TypeAttr.get(ir.Type.parse(f"!llvm.func<{result} (ptr, ptr)>")),
            "CConv": ir.Attribute.parse("#llvm.cconv<ccc>"),
            "linkage": ir.Attribute.parse("#llvm.linkage<external>"),
        }
        if not host:
            attributes["passthrough"] = ir.ArrayAttr.get([ir.StringAttr.get("presplitcoroutine")])
        self.location = source.location
        self.func = ir.Operation.create(
            "llvm.func", attributes=attributes, regions=1, loc=source.location, ip=ir.InsertionPoint(module.body)
        )
        self.entry = self.func.regions[0].blocks.append(self.ptr, self.ptr, arg_locs=[source.location] * 2)
        self.args, self.thread = self.entry.arguments
        self.blocks = list(source.regions[0].blocks)
        found = partings(source) if lockstep else []
        deepest = max((p.depth for p in found), default=0)
        if deepest > layout.STACK_DEPTH:
            raise CompileError(
                "EP107",
                f"{name}: {deepest} branches around a wait lie in each other; the simulator keeps {layout.STACK_DEPTH} of them for a lane",
                "fewer nested conditions around the wait",
            ).at(shown_places(source.location, name))
        self.partings = {p.block: p for p in found}
        self.fault_exits = fault_exits(source)
        self.joins = {p.join for p in found}
        for block in self.blocks:
            block.append_to(self.func.regions[0])
        self.ip: Any = ir.InsertionPoint(self.entry)
        self.needs: set[str] = set()
        # What the next breakpoint shows, by slot.
        self.shown: list[tuple[int, Any]] = []
        self._prologue()
        for number, block in enumerate(self.blocks):
            self._block(number, block)
        gpu_module.erase()
        del module.operation.attributes["gpu.container_module"]
        for helper in sorted(self.needs):
            _declare(module, helper)

    # ---- emitting

    def op(
        self, name: str, results: list[Any], operands: list[Any], attributes: dict[str, Any] | None = None, successors: Any = None
    ) -> Any:
        made = ir.Operation.create(
            name, results=results, operands=operands, attributes=attributes, successors=successors, loc=self.location, ip=self.ip
        )
        return made.results[0] if results else made

    def constant(self, value: int, kind: Any = None) -> Any:
        kind = kind or self.i64
        return self.op("llvm.mlir.constant", [kind], [], {"value": ir.IntegerAttr.get(kind, value)})

    def gep(self, base: Any, nbytes: int) -> Any:
        indices = {"rawConstantIndices": ir.DenseI32ArrayAttr.get([nbytes]), "elem_type": ir.TypeAttr.get(self.i8)}
        return self.op("llvm.getelementptr", [base.type], [base], indices)

    def word(self, base: Any, index: int) -> Any:
        return self.load(self.gep(base, index * 8), self.i64)

    def set_word(self, base: Any, index: int, value: Any) -> None:
        self.store(value, self.gep(base, index * 8))

    def load(self, pointer: Any, kind: Any, align: int = 0) -> Any:
        return self.op("llvm.load", [kind], [pointer], {"alignment": ir.IntegerAttr.get(self.i64, align)} if align else {})

    def store(self, value: Any, pointer: Any, align: int = 0) -> None:
        self.op("llvm.store", [], [value, pointer], {"alignment": ir.IntegerAttr.get(self.i64, align)} if align else {})

    def pointer(self, word: Any) -> Any:
        return self.op("llvm.inttoptr", [self.ptr], [word])

    def address(self, pointer: Any) -> Any:
        return self.op("llvm.ptrtoint", [self.i64], [pointer])

    def widen(self, value: Any) -> Any:
        """Any scalar's bits in an i64."""
        kind = value.type
        if isinstance(kind, ir.F32Type):
            value = self.op("llvm.bitcast", [self.i32], [value])
        elif isinstance(kind, ir.F64Type):
            return self.op("llvm.bitcast", [self.i64], [value])
        return value if value.type == self.i64 else self.op("llvm.zext", [self.i64], [value])

    def narrow(self, word: Any, kind: Any) -> Any:
        if kind == self.i64:
            return word
        if isinstance(kind, ir.F64Type):
            return self.op("llvm.bitcast", [kind], [word])
        if isinstance(kind, ir.F32Type):
            return self.op("llvm.bitcast", [kind], [self.op("llvm.trunc", [self.i32], [word])])
        return self.op("llvm.trunc", [kind], [word])

    def compare(self, predicate: int, a: Any, b: Any) -> Any:
        return self.op("llvm.icmp", [self.i1], [a, b], {"predicate": ir.IntegerAttr.get(self.i64, predicate)})

    # ---- the coroutine

    def _prologue(self) -> None:
        first = self.blocks[0]
        if self.host:
            self._arguments(first)
            return
        region = self.func.regions[0]
        null = self.op("llvm.mlir.zero", [self.ptr], [])
        false, true = self.constant(0, self.i1), self.constant(-1, self.i1)
        token = ir.Type.parse("!llvm.token")
        self.none = self.op("llvm.mlir.none", [token], [])
        self.false = false
        coroutine = self.op("llvm.intr.coro.id", [token], [self.constant(0, self.i32), null, null, null])
        memory = self._call("malloc", [self.ptr], [self.op("llvm.intr.coro.size", [self.i64], [])])
        handle = self.op("llvm.intr.coro.begin", [self.ptr], [coroutine, memory])
        self.leave = region.blocks.append(self.i8, arg_locs=[self.location])
        free, end = (region.blocks.append(arg_locs=[]) for _ in range(2))
        start = region.blocks.append(arg_locs=[])
        self._suspend_to(start)
        self.ip = ir.InsertionPoint(start)
        self._arguments(first)
        self.ip = ir.InsertionPoint(self.leave)
        destroyed = self.compare(0, self.leave.arguments[0], self.constant(1, self.i8))
        self._cond(destroyed, free, end)
        self.ip = ir.InsertionPoint(free)
        self._call("free", [], [self.op("llvm.intr.coro.free", [self.ptr], [coroutine, handle])])
        self.op("llvm.br", [], [], None, [end])
        self.ip = ir.InsertionPoint(end)
        self.op("llvm.intr.coro.end", [self.i1], [handle, false, self.none])
        self.op("llvm.return", [], [handle])
        # The end of the kernel: one final suspension, after which the scheduler destroys the coroutine.
        self.exit = region.blocks.append(arg_locs=[])
        self.ip = ir.InsertionPoint(self.exit)
        self.set_word(self.thread, layout.T_OP, self.constant(layout.OP_DONE))
        state = self.op("llvm.intr.coro.suspend", [self.i8], [self.none, true])
        self.op("llvm.br", [], [state], None, [self.leave])

    def _arguments(self, first: Any) -> None:
        offset = 0
        values: list[Any] = []
        for argument in first.arguments:
            size = _size(argument.type)
            offset = -(-offset // size) * size
            at = self.gep(self.args, offset)
            values.append(self.load(at, argument.type))
            offset += size
        self.op("llvm.br", [], values, None, [first])

    def _cond(self, condition: Any, then: Any, other: Any, other_values: tuple[Any, ...] = ()) -> None:
        segments = ir.DenseI32ArrayAttr.get([1, 0, len(other_values)])
        self.op("llvm.cond_br", [], [condition, *other_values], {"operandSegmentSizes": segments}, [then, other])

    def _suspend_to(self, block: Any) -> None:
        state = self.op("llvm.intr.coro.suspend", [self.i8], [self.none, self.false])
        self._cond(self.compare(0, state, self.constant(0, self.i8)), block, self.leave, (state,))

    def suspend(self, operation: int, *words: Any, site: int | None = -1) -> None:
        """Tells the scheduler what the thread waits for, and goes on in a new block once it may. Without a site the last one stays."""
        for index, word in enumerate(words):
            self.set_word(self.thread, layout.T_A0 + index, word)
        if site is not None:
            self.set_word(self.thread, layout.T_SITE, self.constant(site))
        self.set_word(self.thread, layout.T_OP, self.constant(operation))
        after = self.current.create_after()
        self._suspend_to(after)
        self.ip = ir.InsertionPoint(after)
        self.current = after

    def result(self) -> Any:
        return self.word(self.thread, layout.T_RESULT)

    def end_unless_opened(self) -> None:
        """After a block barrier: the thread ends where the barrier opened without one that left through a fault."""
        after = self.current.create_after()
        self._cond(self.compare(0, self.result(), self.constant(0)), after, self.exit)
        self.ip = ir.InsertionPoint(after)
        self.current = after

    def _call(self, name: str, results: list[Any], operands: list[Any]) -> Any:
        self.needs.add(name)
        attributes = {
            "callee": ir.FlatSymbolRefAttr.get(name),
            "operandSegmentSizes": ir.DenseI32ArrayAttr.get([len(operands), 0]),
            "op_bundle_sizes": ir.DenseI32ArrayAttr.get([]),
        }
        return self.op("llvm.call", results, operands, attributes)

    # ---- operations

    def _block(self, number: int, block: Any) -> None:
        self.current = block
        operations = list(block.operations)
        if number in self.joins:
            self.ip = ir.InsertionPoint.at_block_begin(block)
            self.suspend(layout.OP_JOIN, self.constant(number), site=None)
        if number in self.fault_exits:
            self.ip = ir.InsertionPoint.at_block_begin(block)
            self.set_word(self.pointer(self.word(self.thread, layout.T_BLOCK)), layout.B_FAULTED, self.constant(1))
        for view in operations:
            operation = view.operation
            self.location = operation.location
            if operation.name == "cf.cond_br" and number in self.partings:
                self.ip = ir.InsertionPoint(operation) if self.current == block else ir.InsertionPoint(self.current)
                self._part(self.partings[number], operation.operands[0])
                self.current.append(operation)
            elif operation.name == "gpu.return":
                self.ip = ir.InsertionPoint(operation) if self.current == block else ir.InsertionPoint(self.current)
                self.op("llvm.return", [], []) if self.host else self.op("llvm.br", [], [], None, [self.exit])
                operation.erase()
            elif operation.name.startswith("ep."):
                self.ip = ir.InsertionPoint(operation) if self.current == block else ir.InsertionPoint(self.current)
                value = self.emit(operation)
                if operation.results:
                    operation.results[0].replace_all_uses_with(value)
                operation.erase()
            else:
                if self.current != block:
                    self.current.append(operation)
                self.passed(operation)

    def emit(self, operation: Any) -> Any:
        """One operation of the `ep` dialect."""
        return OPERATIONS[operation.name](self, operation)

    def passed(self, operation: Any) -> None:
        """An operation of another dialect, which stays as it is."""

    def _part(self, parting: Parting, condition: Any) -> None:
        """The wave meets before a branch and then runs one side after the other."""
        direction = self.op("llvm.xor", [self.i64], [self.op("llvm.zext", [self.i64], [condition]), self.constant(1)])
        self.suspend(layout.OP_SPLIT, self.constant(parting.join), direction, self.constant(parting.first), site=None)


def _size(kind: Any) -> int:
    if isinstance(kind, ir.IntegerType):
        return max(1, kind.width // 8)
    return {"f16": 2, "bf16": 2, "f32": 4, "f64": 8}.get(str(kind), 8)


_EXTERNAL = {"malloc": "!llvm.func<ptr (i64)>", "free": "!llvm.func<void (ptr)>"}


def _declare(module: Any, name: str) -> None:
    attributes = {
        "sym_name": ir.StringAttr.get(name),
        "function_type": ir.TypeAttr.get(ir.Type.parse(_EXTERNAL[name])),
        "CConv": ir.Attribute.parse("#llvm.cconv<ccc>"),
        "linkage": ir.Attribute.parse("#llvm.linkage<external>"),
    }
    ir.Operation.create("llvm.func", attributes=attributes, regions=1, ip=ir.InsertionPoint.at_block_begin(module.body))


def _text(op: Any, name: str) -> str:
    return op.attributes[name].value


def _site(op: Any) -> int:
    return op.attributes["site"].value if "site" in op.attributes else -1


def _load(e: Lowering, op: Any) -> Any:
    return e.load(op.operands[0], op.results[0].type)


def _store(e: Lowering, op: Any) -> None:
    e.store(op.operands[0], op.operands[1])


def _rmw(e: Lowering, op: Any) -> Any:
    pointer, value = op.operands
    old = e.load(pointer, value.type)
    kind = _text(op, "op")
    e.store(value if kind == "xchg" else e.op(_RMW[kind], [value.type], [old, value]), pointer)
    return old


def _cas(e: Lowering, op: Any) -> Any:
    pointer, expected, desired = op.operands
    old = e.load(pointer, expected.type)
    e.store(e.op("llvm.select", [old.type], [e.compare(0, old, expected), desired, old]), pointer)
    return old


def _nothing(e: Lowering, op: Any) -> None:
    """A fence orders accesses that one host thread makes in order anyway."""


def _barrier(e: Lowering, op: Any) -> None:
    e.suspend(layout.OP_BARRIER, site=_site(op))
    e.end_unless_opened()


def _named(operation: int) -> Callable[[Lowering, Any], None]:
    def emit(e: Lowering, op: Any) -> None:
        e.suspend(operation, e.widen(op.operands[0]), e.widen(op.operands[1]), site=_site(op))

    return emit


def _warp_sync(e: Lowering, op: Any) -> None:
    e.suspend(layout.OP_SYNC, op.operands[0], site=_site(op))


def _shuffle(e: Lowering, op: Any) -> Any:
    value, lane, mask = op.operands
    kind = e.constant(layout.SHUFFLE_KINDS.index(_text(op, "kind")))
    e.suspend(layout.OP_SHUFFLE, mask, kind, e.op("llvm.sext", [e.i64], [lane]), e.widen(value), site=_site(op))
    return e.narrow(e.result(), value.type)


def _vote(e: Lowering, op: Any) -> Any:
    predicate, mask = op.operands
    kind = e.constant(layout.VOTE_KINDS.index(_text(op, "kind")))
    e.suspend(layout.OP_VOTE, mask, kind, e.op("llvm.zext", [e.i64], [predicate]), site=_site(op))
    return e.narrow(e.result(), op.results[0].type)


def _elect(e: Lowering, op: Any) -> Any:
    e.suspend(layout.OP_ELECT, op.operands[0], site=_site(op))
    return e.narrow(e.result(), e.i1)


def _special(e: Lowering, op: Any) -> Any:
    name = _text(op, "name")
    if name in ("clock", "globaltimer"):
        launch = e.pointer(e.word(e.thread, layout.T_LAUNCH))
        return e.word(e.pointer(e.word(launch, layout.L_ENGINE)), layout.E_TIME)
    where, index = _SPECIAL[name]
    base = e.thread if where == "thread" else e.pointer(e.word(e.thread, layout.T_BLOCK if where == "block" else layout.T_LAUNCH))
    return e.narrow(e.word(base, index), e.i32)


def _shared(e: Lowering, op: Any) -> Any:
    base = e.word(e.pointer(e.word(e.thread, layout.T_BLOCK)), layout.B_SHARED)
    at = e.op("llvm.add", [e.i64], [base, e.constant(op.attributes["offset"].value)])
    return e.op("llvm.inttoptr", [op.results[0].type], [at])


def _sleep(e: Lowering, op: Any) -> None:
    launch = e.pointer(e.word(e.thread, layout.T_LAUNCH))
    now = e.word(e.pointer(e.word(launch, layout.L_ENGINE)), layout.E_TIME)
    e.suspend(layout.OP_SLEEP, e.op("llvm.add", [e.i64], [now, e.widen(op.operands[0])]), site=_site(op))


def _poll(e: Lowering, op: Any) -> Any:
    pointer, value, _, timeout = op.operands
    bits = e.constant(op.attributes["bits"].value)
    e.suspend(layout.OP_POLL, e.address(pointer), value, bits, timeout, site=_site(op))
    return e.narrow(e.result(), e.i1)


def _yield(e: Lowering, op: Any) -> None:
    if not e.host:
        e.suspend(layout.OP_YIELD, e.constant(op.attributes["bounded"].value), site=_site(op))


def _trap(e: Lowering, op: Any) -> None:
    e.suspend(layout.OP_TRAP, site=_site(op))


def _debug_value(e: Lowering, op: Any) -> None:
    e.shown.append((op.attributes["slot"].value, op.operands[0]))


def _breakpoint(e: Lowering, op: Any) -> None:
    """Calls the debugger, without suspending: stopping a thread changes no schedule. The thread ends where the debugger says so."""
    shown, e.shown = e.shown, []
    engine = e.pointer(e.word(e.pointer(e.word(e.thread, layout.T_LAUNCH)), layout.L_ENGINE))
    after = e.current.create_after()
    stop, ended = (after.create_before() for _ in range(2))
    if _text(op, "kind") == "line":
        stepped = e.word(engine, layout.E_STEPPED)
        mine = e.compare(0, stepped, e.address(e.thread))
        e._cond(e.op("llvm.or", [e.i1], [mine, e.compare(0, stepped, e.constant(layout.EVERY_THREAD))]), stop, after)
    else:
        e.op("llvm.br", [], [], None, [stop])
    e.ip = ir.InsertionPoint(stop)
    room = e.pointer(e.word(engine, layout.E_SHOWN))
    for slot, value in shown:
        e.store(value, e.gep(room, slot * layout.SLOT_BYTES))
    attributes = {"operandSegmentSizes": ir.DenseI32ArrayAttr.get([3, 0]), "op_bundle_sizes": ir.DenseI32ArrayAttr.get([])}
    hook = e.pointer(e.word(engine, layout.E_HOOK))
    answer = e.op("llvm.call", [e.i64], [hook, e.thread, e.constant(_site(op))], attributes)
    e._cond(e.compare(0, answer, e.constant(0)), after, ended)
    e.ip = ir.InsertionPoint(ended)
    e.set_word(e.thread, layout.T_OP, e.constant(layout.OP_TRAP))
    e._suspend_to(after)
    e.ip = ir.InsertionPoint(after)
    e.current = after


# ---- the copy engine: copies are made at once by the issuing thread; a barrier word counts arrivals and bytes.
# Word: bits 0-15 arrivals still missing, 16-31 arrivals of a phase, 32-62 bytes still missing (biased), 63 the current phase's parity.

_BYTES = 1 << 32
_COUNT = (1 << 16) - 1
_BIAS = 1 << 29


def _mbarrier_update(e: Lowering, pointer: Any, arrivals: Any, nbytes: Any) -> None:
    """Takes `arrivals` and adds `nbytes` expected (negative: arrived); completes the phase where nothing is missing."""
    word = e.load(pointer, e.i64)
    moved = e.op(
        "llvm.add", [e.i64], [e.op("llvm.sub", [e.i64], [word, arrivals]), e.op("llvm.mul", [e.i64], [nbytes, e.constant(_BYTES)])]
    )
    missing = e.op("llvm.and", [e.i64], [moved, e.constant(_COUNT)])
    pending = e.op("llvm.and", [e.i64], [e.op("llvm.lshr", [e.i64], [moved, e.constant(32)]), e.constant((1 << 31) - 1)])
    both = e.op("llvm.and", [e.i1], [e.compare(0, missing, e.constant(0)), e.compare(0, pending, e.constant(_BIAS))])
    total = e.op("llvm.and", [e.i64], [e.op("llvm.lshr", [e.i64], [moved, e.constant(16)]), e.constant(_COUNT)])
    fresh = e.op("llvm.xor", [e.i64], [e.op("llvm.or", [e.i64], [moved, total]), e.constant(-(1 << 63))])
    e.store(e.op("llvm.select", [e.i64], [both, fresh, moved]), pointer)


def _mbarrier_init(e: Lowering, op: Any) -> None:
    pointer, count = op.operands
    wide = e.widen(count)
    both = e.op("llvm.or", [e.i64], [wide, e.op("llvm.shl", [e.i64], [wide, e.constant(16)])])
    e.store(e.op("llvm.or", [e.i64], [both, e.constant(_BIAS * _BYTES)]), pointer)


def _mbarrier_arrive(e: Lowering, op: Any) -> None:
    _mbarrier_update(e, op.operands[0], e.constant(1), e.constant(0))


def _mbarrier_expect(e: Lowering, op: Any) -> None:
    _mbarrier_update(e, op.operands[0], e.constant(1), e.widen(op.operands[1]))


def _mbarrier_test(e: Lowering, op: Any) -> Any:
    pointer, parity = op.operands
    current = e.op("llvm.lshr", [e.i64], [e.load(pointer, e.i64), e.constant(63)])
    return e.compare(1, current, e.widen(parity))


def _copy(e: Lowering, dst: Any, src: Any, nbytes: Any) -> Any:
    wide = e.widen(nbytes)
    e.op("llvm.intr.memcpy", [], [dst, src, wide], {"isVolatile": ir.BoolAttr.get(False)})
    return wide


def _bulk_load(e: Lowering, op: Any) -> None:
    dst, src, nbytes, barrier = op.operands
    wide = _copy(e, dst, src, nbytes)
    _mbarrier_update(e, barrier, e.constant(0), e.op("llvm.sub", [e.i64], [e.constant(0), wide]))


def _bulk_store(e: Lowering, op: Any) -> None:
    _copy(e, *op.operands)


OPERATIONS: dict[str, Callable[[Lowering, Any], Any]] = {
    "ep.load": _load,
    "ep.store": _store,
    "ep.atomic_rmw": _rmw,
    "ep.reduce": lambda e, op: (_rmw(e, op), None)[1],
    "ep.atomic_cas": _cas,
    "ep.fence": _nothing,
    "ep.proxy_fence": _nothing,
    "ep.barrier": _barrier,
    "ep.named_barrier": _named(layout.OP_NAMED),
    "ep.named_arrive": _named(layout.OP_ARRIVE),
    "ep.warp_sync": _warp_sync,
    "ep.shuffle": _shuffle,
    "ep.vote": _vote,
    "ep.elect": _elect,
    "ep.special": _special,
    "ep.shared": _shared,
    "ep.sleep": _sleep,
    "ep.poll": _poll,
    "ep.yield": _yield,
    "ep.trap": _trap,
    "ep.debug_value": _debug_value,
    "ep.breakpoint": _breakpoint,
    "ep.mbarrier_init": _mbarrier_init,
    "ep.mbarrier_arrive": _mbarrier_arrive,
    "ep.mbarrier_expect": _mbarrier_expect,
    "ep.mbarrier_test": _mbarrier_test,
    "ep.bulk_load": _bulk_load,
    "ep.bulk_store": _bulk_store,
    "ep.bulk_commit": _nothing,
    "ep.bulk_wait": _nothing,
}


def steps(target: Target, name: str, host: bool = False, lower: Callable[..., Any] = Lowering) -> tuple[Step, ...]:
    """The passes from `ep` to the LLVM dialect for this machine, in order. `lower` is called as `Lowering` is."""

    def coroutines(module: Any) -> None:
        with module.context, ir.Location.unknown():
            lower(module, name, host, target.vendor == "amd" and not host)

    return (Step("ep-to-coroutines", coroutines), *(upstream(each) for each in PASSES))


def compile_module(
    module: Any, target: Target, name: str, host: bool = False, lower: Callable[..., Any] = Lowering, watch: Watch | None = None
) -> Code:
    """Lowers a built module and compiles it for this machine."""
    watch = watch or Watch()
    # What is stepped through has a stop at every line with every variable: optimising that takes long and helps nobody.
    level = 0 if STOPS in kernel_of(module).attributes else 2
    run_steps(module, steps(target, name, host, lower), watch)
    watch.begin("llvm")
    return emit_host(translate(module), watch, level)


def kernel_of(module: Any) -> Any:
    """The one `gpu.func` of a module as built."""
    (found,) = (op.operation for op in module.body.operations[0].operation.regions[0].blocks[0].operations)
    return found


def translate(module: Any) -> str:
    """LLVM IR text of a lowered module."""
    from mlir.dialects.llvm import translate_module_to_llvmir  # pyright: ignore[reportAttributeAccessIssue]

    with module.context:
        return translate_module_to_llvmir(module.operation)


def emit_host(text: str, watch: Watch | None = None, level: int = 2) -> Code:
    """LLVM IR to an object file for this machine, optimised to a level from 0 to 3. Floating point is not contracted.

    Raises RuntimeError for a text that is no IR.
    """
    import llvmlite.binding as llvm

    watch = watch or Watch()
    watch.begin("llvm")
    text = watch.end("llvm", lambda: text) or text
    watch.begin("llvm-opt")
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    unit = llvm.parse_assembly(text)
    triple = llvm.get_process_triple()
    machine = llvm.Target.from_triple(triple).create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=level, reloc="default", codemodel="jitdefault"
    )
    unit.triple = triple
    unit.data_layout = str(machine.target_data)
    passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=level))
    passes.getModulePassManager().run(unit, passes)
    optimised = str(unit)
    other = watch.end("llvm-opt", lambda: optimised)
    if other is not None:
        optimised, unit = other, llvm.parse_assembly(other)
    watch.begin("asm")
    # Code generation rewrites the module, so a second emission needs a copy of its own.
    watch.end("asm", lambda: machine.emit_assembly(unit.clone()))
    return Code(machine.emit_object(unit), {"llvm": text, "llvm-opt": optimised})
