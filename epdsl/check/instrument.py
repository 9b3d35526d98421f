"""The simulator's lowering with events: every access and every ordering operation is told to the checker's engine."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from epdsl_runtime import sim_layout as sim
from mlir import ir

from epdsl.ir import dialect
from epdsl.ir.errors import CompileError
from epdsl.ir.locations import places_of, shown_places
from epdsl.ir.steps import Watch
from epdsl.lower_sim import OPERATIONS, Code, Lowering, compile_module, kernel_of

from . import layout as check

if TYPE_CHECKING:
    from epdsl.compiler import CompileRequest

_ORDER = {name: number for number, name in enumerate(dialect.ORDERS)}
_SCOPE = {name: number for number, name in enumerate(dialect.SCOPES)}
# No event of its own: the engine only settles what came before.
_IDLE = 127
# Attributes that `survey` sets.
NUMBER, WAIT, ACQUIRES, ADDRESS = "check.number", "check.wait", "check.acquires", "check.address"
_ARITHMETIC = ("arith.addi", "arith.subi", "arith.muli")


# Operations that read a word and write it in one step.
UPDATES = ("ep.atomic_rmw", "ep.reduce", "ep.atomic_cas")


@dataclass(frozen=True)
class AccessSite:
    """A place in a kernel's source that a finding can name.

    operation  "ep.load", ...; `order` and `scope` are empty where it has none
    places     (file, line, column) from the operation outwards through the calls it was inlined by
    number     of the operation in the module, counting from 0
    wait       it belongs to an ep.wait
    detail     "acquire" of a wait that acquires; what a read-modify-write does; "reset" of a plain store of the constant 0
    """

    operation: str
    order: str
    scope: str
    places: tuple[tuple[str, int, int], ...]
    number: int
    wait: bool = False
    detail: str = ""


def survey(function: Any) -> None:
    """Numbers the operations, and marks those of waits and the 32-bit arithmetic that addresses are made of."""
    word = ir.IntegerType.get_signless(64)
    operations = [view.operation for block in function.regions[0].blocks for view in block.operations]
    polled = {(op.operands[0], str(op.location)) for op in operations if op.name == "ep.poll"}
    places = {place for _, place in polled}
    loaded = {(op.operands[0], str(op.location)) for op in operations if op.name == "ep.load"}
    fenced = {str(op.location) for op in operations if op.name == "ep.fence"} & places
    for number, operation in enumerate(operations):
        operation.attributes[NUMBER] = ir.IntegerAttr.get(word, number)
        place = str(operation.location)
        load = operation.name == "ep.load" and (operation.operands[0], place) in polled
        poll = operation.name == "ep.poll" and (operation.operands[0], place) in loaded
        if load or poll or (operation.name == "ep.fence" and place in places):
            operation.attributes[WAIT] = ir.UnitAttr.get()
            if place in fenced:
                operation.attributes[ACQUIRES] = ir.UnitAttr.get()
        if operation.name == "llvm.getelementptr" and len(operation.operands) > 1:
            _mark_arithmetic(operation.operands[1])


def _mark_arithmetic(offset: Any) -> None:
    work, done = [(offset, False)], set()
    while work:
        value, narrow = work.pop()
        operation = getattr(value.owner, "operation", value.owner)
        if (value, narrow) in done or not isinstance(operation, ir.Operation):
            continue
        done.add((value, narrow))
        if operation.name == "arith.extsi":
            work.append((operation.operands[0], True))
        elif operation.name in _ARITHMETIC:
            if narrow:
                operation.attributes[ADDRESS] = ir.UnitAttr.get()
            work += [(operand, narrow) for operand in operation.operands]


def _is_zero(value: Any) -> bool:
    operation = getattr(value.owner, "operation", value.owner)
    if not isinstance(operation, ir.Operation) or operation.name not in ("arith.constant", "llvm.mlir.constant"):
        return False
    return str(operation.attributes["value"]).startswith("0 ")


class CheckedLowering(Lowering):
    """Lowers one kernel and tells the engine what each thread does. `table` describes its sites; site 0 is none."""

    def __init__(self, module: Any, name: str, host: bool, lockstep: bool) -> None:
        self.table: list[AccessSite] = [AccessSite("", "", "", (), -1)]
        self.kernel = name
        survey(kernel_of(module))
        super().__init__(module, name, host, lockstep)

    # ---- events

    def site_of(self, operation: Any) -> int:
        attributes = operation.attributes
        detail = "acquire" if ACQUIRES in attributes else attributes["op"].value if "op" in attributes else ""
        if operation.name == "ep.store" and _is_zero(operation.operands[0]):
            detail = "reset"
        order = attributes["order"].value if "order" in attributes else ""
        scope = attributes["scope"].value if "scope" in attributes else ""
        made = AccessSite(operation.name, order, scope, places_of(operation.location), attributes[NUMBER].value, WAIT in attributes, detail)
        self.table.append(made)
        return len(self.table) - 1

    def info(self, kind: int, site: int, size: int = 0, order: str = "plain", scope: str = "none", flags: int = 0) -> int:
        return (
            kind
            | size << check.INFO_SIZE
            | _ORDER[order] << check.INFO_ORDER
            | _SCOPE[scope] << check.INFO_SCOPE
            | flags << check.INFO_FLAGS
            | site << check.INFO_SITE
        )

    def known(self) -> Any:
        """What the engine knows of the thread."""
        return self.pointer(self.word(self.thread, sim.T_CHECK))

    def event(self, function: int, address: Any, info: Any, value: Any = None, **more: Any) -> Any:
        """Calls the engine; returns the thread's words there, whose result word holds the answer."""
        x = self.known()
        self.set_word(x, check.X_ADDRESS, address if address is not None else self.constant(0))
        self.set_word(x, check.X_INFO, self.constant(info) if isinstance(info, int) else info)
        self.set_word(x, check.X_VALUE, value if value is not None else self.constant(0))
        for name, word in more.items():
            self.set_word(x, getattr(check, name), word)
        null = self.op("llvm.mlir.zero", [self.ptr], [])
        attributes = {
            "operandSegmentSizes": ir.DenseI32ArrayAttr.get([3, 0]),
            "op_bundle_sizes": ir.DenseI32ArrayAttr.get([]),
        }
        self.op("llvm.call", [], [self.pointer(self.word(x, function)), x, null], attributes)
        return x

    def sync(self, kind: int, operation: Any, address: Any = None, value: Any = None, **fields: Any) -> Any:
        """An event of an operation that orders."""
        attributes = operation.attributes
        order = attributes["order"].value if "order" in attributes else "plain"
        scope = attributes["scope"].value if "scope" in attributes else "none"
        site = fields.pop("site", None) or self.site_of(operation)
        return self.event(check.X_SYNC, address, self.info(kind, site, fields.pop("size", 0), order, scope, fields.pop("flags", 0)), value)

    def answer(self, x: Any) -> Any:
        return self.word(x, check.X_RESULT)

    def typed(self, word: Any, like: Any) -> Any:
        return self.op("llvm.inttoptr", [like.type], [word])

    def plain(self, operation: Any, pointer: Any, kind: int, nbytes: int) -> Any:
        """Checks a plain access; returns the pointer to use."""
        info = self.info(kind, self.site_of(operation))
        return self.usable(self.event(check.X_ACCESS, self.address(pointer), info, self.constant(nbytes)), pointer)

    def usable(self, x: Any, pointer: Any) -> Any:
        """The pointer that the engine answered, in place of `pointer`; the thread ends here where it answered none."""
        answer = self.answer(x)
        self.stop_without(answer)
        return self.typed(answer, pointer)

    def stop_without(self, word: Any) -> None:
        """Ends the thread where the word is 0."""
        after = self.current.create_after()
        self._cond(self.compare(0, word, self.constant(0)), self.stopped, after)
        self.ip = ir.InsertionPoint(after)
        self.current = after

    # ---- the coroutine's ends

    def _arguments(self, first: Any) -> None:
        self.event(check.X_SYNC, None, check.KIND_START)
        super()._arguments(first)

    def _prologue(self) -> None:
        super()._prologue()
        saved = self.ip
        self.ip = ir.InsertionPoint.at_block_begin(self.exit)
        self.table.append(AccessSite("gpu.return", "", "", places_of(self.location), -1))
        self.event(check.X_SYNC, None, self.info(check.KIND_EXIT, len(self.table) - 1))
        # Where a thread goes that the engine ends.
        self.stopped = self.func.regions[0].blocks.append(arg_locs=[])
        self.ip = ir.InsertionPoint(self.stopped)
        self.set_word(self.thread, sim.T_OP, self.constant(sim.OP_TRAP))
        self._suspend_to(self.exit)
        self.ip = saved

    # ---- operations

    def emit(self, operation: Any) -> Any:
        special = _EVENTS.get(operation.name)
        return special(self, operation) if special is not None else super().emit(operation)

    def passed(self, operation: Any) -> None:
        if ADDRESS not in operation.attributes:
            return
        self.ip = ir.InsertionPoint(self.current) if self.current != operation.block else ir.InsertionPoint.after(operation)
        a, b = (self.op("llvm.sext", [self.i64], [v]) for v in operation.operands)
        wide = self.op({"arith.addi": "llvm.add", "arith.subi": "llvm.sub", "arith.muli": "llvm.mul"}[operation.name], [self.i64], [a, b])
        wrong = self.compare(1, wide, self.op("llvm.sext", [self.i64], [operation.results[0]]))
        x = self.known()
        before = self.word(x, check.X_OVERFLOW)
        site = self.constant(self.site_of(operation) + 1)
        # The first one before a memory access is what explains the others.
        fresh = self.op("llvm.and", [self.i1], [wrong, self.compare(0, before, self.constant(0))])
        self.set_word(x, check.X_OVERFLOW, self.op("llvm.select", [self.i64], [fresh, site, before]))

    def pause(self) -> None:
        """Lets other threads go first, so that schedules differ in the order of atomics."""
        self.suspend(sim.OP_READY)


def _nbytes(kind: Any) -> int:
    if isinstance(kind, ir.VectorType):
        return kind.shape[0] * _nbytes(kind.element_type)
    if isinstance(kind, ir.IntegerType):
        return max(1, kind.width // 8)
    return {"f16": 2, "bf16": 2, "f32": 4, "f64": 8}.get(str(kind), 8)


def _load(e: CheckedLowering, op: Any) -> Any:
    kind, pointer = op.results[0].type, op.operands[0]
    if op.attributes["order"].value == "plain":
        return e.load(e.plain(op, pointer, check.KIND_LOAD, _nbytes(kind)), kind)
    e.pause()
    flags = check.FLAG_WAIT if WAIT in op.attributes else 0
    x = e.sync(check.KIND_ATOMIC_LOAD, op, e.address(pointer), size=_nbytes(kind), flags=flags)
    return e.narrow(e.answer(x), kind)


def _store(e: CheckedLowering, op: Any) -> None:
    value, pointer = op.operands
    if op.attributes["order"].value == "plain":
        e.store(value, e.plain(op, pointer, check.KIND_STORE, _nbytes(value.type)))
        return
    e.pause()
    x = e.sync(check.KIND_ATOMIC_STORE, op, e.address(pointer), e.widen(value), size=_nbytes(value.type))
    e.store(value, e.usable(x, pointer))


def _rmw(e: CheckedLowering, op: Any) -> Any:
    from epdsl.lower_sim import _RMW

    pointer, value = op.operands
    size, site, address = _nbytes(value.type), e.site_of(op), e.address(pointer)
    e.pause()
    usable = e.usable(e.sync(check.KIND_PROBE, op, address, site=site, size=size), pointer)
    old = e.load(usable, value.type)
    kind = op.attributes["op"].value
    new = value if kind == "xchg" else e.op(_RMW[kind], [value.type], [old, value])
    flags = check.FLAG_NO_RESULT if op.name == "ep.reduce" else 0
    e.sync(check.KIND_RMW, op, address, e.widen(new), site=site, size=size, flags=flags)
    e.store(new, usable)
    return old


def _cas(e: CheckedLowering, op: Any) -> Any:
    pointer, expected, desired = op.operands
    size, site, address = _nbytes(desired.type), e.site_of(op), e.address(pointer)
    e.pause()
    usable = e.usable(e.sync(check.KIND_PROBE, op, address, site=site, size=size), pointer)
    old = e.load(usable, desired.type)
    same = e.compare(0, old, expected)
    base = e.info(check.KIND_CAS, site, size, op.attributes["order"].value, op.attributes["scope"].value)
    info = e.op("llvm.select", [e.i64], [same, e.constant(base | check.FLAG_CHANGED << check.INFO_FLAGS), e.constant(base)])
    e.event(check.X_SYNC, address, info, e.widen(desired))
    e.store(e.op("llvm.select", [old.type], [same, desired, old]), usable)
    return old


def _fence(e: CheckedLowering, op: Any) -> None:
    if WAIT not in op.attributes:
        e.pause()
    e.sync(check.KIND_FENCE, op)


def _proxy_fence(e: CheckedLowering, op: Any) -> None:
    e.sync(check.KIND_PROXY_FENCE, op, None, e.constant(("shared", "global").index(op.attributes["space"].value)))


def _barrier(e: CheckedLowering, op: Any) -> None:
    site = e.site_of(op)
    e.sync(check.KIND_BARRIER_ARRIVE, op, site=site)
    e.suspend(sim.OP_BARRIER, site=op.attributes["site"].value if "site" in op.attributes else -1)
    e.sync(check.KIND_BARRIER_LEAVE, op, site=site)
    e.end_unless_opened()


def _named(e: CheckedLowering, op: Any) -> None:
    site = e.site_of(op)
    number, wanted = (e.widen(v) for v in op.operands)
    flags = check.FLAG_ARRIVE if op.name == "ep.named_arrive" else 0
    e.sync(check.KIND_NAMED_ARRIVE, op, number, wanted, site=site, flags=flags)
    OPERATIONS[op.name](e, op)
    if op.name == "ep.named_barrier":
        e.sync(check.KIND_NAMED_LEAVE, op, number, wanted, site=site)


def _warp_sync(e: CheckedLowering, op: Any) -> None:
    site = e.site_of(op)
    e.sync(check.KIND_WARP_ARRIVE, op, None, op.operands[0], site=site)
    OPERATIONS[op.name](e, op)
    e.sync(check.KIND_WARP_LEAVE, op, site=site)


def _unwidened(value: Any) -> Any:
    operation = getattr(value.owner, "operation", value.owner)
    return operation.operands[0] if isinstance(operation, ir.Operation) and operation.name in ("arith.extui", "arith.extsi") else value


def _compared(e: CheckedLowering, poll: Any) -> Any:
    """What a wait compares what it has seen with: the other side of the comparison that branches to the poll; None without one."""
    seen = _unwidened(poll.operands[1])
    for block in e.func.regions[0].blocks:
        last = block.operations[len(block.operations) - 1].operation
        if last.name == "cf.cond_br" and poll.block in last.successors:
            comparison = getattr(last.operands[0].owner, "operation", None)
            if comparison is not None and comparison.name == "arith.cmpi":
                left, right = (_unwidened(operand) for operand in comparison.operands)
                if seen in (left, right) and left != right:
                    return right if left == seen else left
    return None


def _poll(e: CheckedLowering, op: Any) -> Any:
    if WAIT in op.attributes:
        # 0: the load before this knows no such word, so nobody may look at it again.
        e.stop_without(e.word(e.known(), check.X_WAIT_OBJECT))
    x = e.known()
    e.set_word(x, check.X_WAIT_OBJECT, e.constant(0))
    against = _compared(e, op)
    e.set_word(x, check.X_COMPARES, e.constant(1 if against is not None else 0))
    if against is not None:
        e.set_word(x, check.X_COMPARED, e.widen(against))
    return OPERATIONS[op.name](e, op)


def _trap(e: CheckedLowering, op: Any) -> None:
    OPERATIONS[op.name](e, op)


def _phase(e: CheckedLowering, op: Any, pointer: Any, arrives: int, update: Any) -> None:
    """Tells the engine of an arrival at a barrier of the copy engine, and whether it completed a phase."""
    before = e.load(pointer, e.i64)
    update()
    after = e.load(pointer, e.i64)
    top = e.constant(63)
    flipped = e.op("llvm.lshr", [e.i64], [e.op("llvm.xor", [e.i64], [before, after]), top])
    parity = e.op("llvm.lshr", [e.i64], [before, top])
    value = e.op(
        "llvm.or",
        [e.i64],
        [
            e.op("llvm.shl", [e.i64], [flipped, e.constant(1)]),
            e.op("llvm.or", [e.i64], [e.op("llvm.shl", [e.i64], [parity, e.constant(2)]), e.constant(arrives)]),
        ],
    )
    e.sync(check.KIND_PHASE, op, e.address(pointer), value)


def _mbarrier_init(e: CheckedLowering, op: Any) -> None:
    e.sync(check.KIND_PHASE_MAKE, op, e.address(op.operands[0]))
    OPERATIONS[op.name](e, op)


def _mbarrier_arrive(e: CheckedLowering, op: Any) -> None:
    _phase(e, op, op.operands[0], 1, lambda: OPERATIONS[op.name](e, op))


def _mbarrier_test(e: CheckedLowering, op: Any) -> Any:
    done = OPERATIONS[op.name](e, op)
    info = e.info(check.KIND_PHASE_TEST, e.site_of(op))
    chosen = e.op("llvm.select", [e.i64], [done, e.constant(info), e.constant(_IDLE)])
    e.event(check.X_SYNC, e.address(op.operands[0]), chosen, e.widen(op.operands[1]))
    return done


def _bulk(e: CheckedLowering, op: Any, kind: int) -> None:
    from epdsl.lower_sim import _copy, _mbarrier_update

    dst, src, nbytes = list(op.operands)[:3]
    barrier = op.operands[3] if len(op.operands) > 3 else None
    wide = e.widen(nbytes)
    where = e.address(barrier) if barrier is not None else e.constant(0)
    info = e.info(kind, e.site_of(op))
    x = e.event(check.X_SYNC, e.address(dst), info, wide, X_OLD=e.address(src), X_BARRIER=where)
    _copy(e, dst, src, e.answer(x))
    if barrier is not None:
        _phase(e, op, barrier, 0, lambda: _mbarrier_update(e, barrier, e.constant(0), e.op("llvm.sub", [e.i64], [e.constant(0), wide])))


def _bulk_commit(e: CheckedLowering, op: Any) -> None:
    e.sync(check.KIND_BULK_COMMIT, op)


def _bulk_wait(e: CheckedLowering, op: Any) -> None:
    full = e.constant(1 if op.attributes["read"].value == "full" else 0)
    pending = op.attributes["pending"].value
    if pending >= check.BULK_GROUPS:
        raise CompileError(
            "EP108",
            f"ep.bulk_wait({pending}): the checker follows {check.BULK_GROUPS} groups of bulk copies",
            f"leave at most {check.BULK_GROUPS - 1} on their way",
        ).at(shown_places(op.location, e.kernel))
    e.sync(check.KIND_BULK_WAIT, op, e.constant(pending), full)


_EVENTS: dict[str, Any] = {
    "ep.load": _load,
    "ep.store": _store,
    "ep.atomic_rmw": _rmw,
    "ep.reduce": lambda e, op: (_rmw(e, op), None)[1],
    "ep.atomic_cas": _cas,
    "ep.fence": _fence,
    "ep.proxy_fence": _proxy_fence,
    "ep.barrier": _barrier,
    "ep.named_barrier": _named,
    "ep.named_arrive": _named,
    "ep.warp_sync": _warp_sync,
    "ep.poll": _poll,
    "ep.mbarrier_init": _mbarrier_init,
    "ep.mbarrier_arrive": _mbarrier_arrive,
    "ep.mbarrier_expect": _mbarrier_arrive,
    "ep.mbarrier_test": _mbarrier_test,
    "ep.bulk_load": lambda e, op: _bulk(e, op, check.KIND_BULK_LOAD),
    "ep.bulk_store": lambda e, op: _bulk(e, op, check.KIND_BULK_STORE),
    "ep.bulk_commit": _bulk_commit,
    "ep.bulk_wait": _bulk_wait,
}


def compile_checked(module: Any, request: CompileRequest, watch: Watch | None = None) -> Code:
    """Lowers with events. The code's texts have "sites": the table of places as JSON."""
    tables: list[list[AccessSite]] = []

    def lower(*args: Any) -> None:
        tables.append(CheckedLowering(*args).table)

    code = compile_module(module, request.target, request.name, lower=lower, watch=watch)
    return Code(code.binary, {**code.texts, "sites": json.dumps([asdict(site) for site in tables[0]])})


def read_sites(text: str) -> list[AccessSite]:
    """The table that `compile_checked` wrote."""
    return [AccessSite(**{**site, "places": tuple(tuple(place) for place in site["places"])}) for site in json.loads(text)]
