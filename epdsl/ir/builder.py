"""Builds one kernel as an MLIR module: blocks, operations, locations. The only file of the front end that touches MLIR."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from mlir import ir

from . import dialect
from .steps import bytecode
from .types import F8E4M3, F8E5M2, PtrType, ScalarType, Type, VecType

IrValue = Any
IrBlock = Any

_ICMP = {"==": (0, 0), "!=": (1, 1), "<": (2, 6), "<=": (3, 7), ">": (4, 8), ">=": (5, 9)}
_REPORTED = ("ep.barrier", "cf.cond_br")
_FCMP = {"==": 1, ">": 2, ">=": 3, "<": 4, "<=": 5, "!=": 13}


class Builder:
    """One module with one `gpu.func`.

    slots   the kernel's parameters
    place   file, line and column of the kernel
    locate  gives the MLIR location of the next operations
    origin  gives what the front end knows of their place; kept for those that `verify` reports on
    names   values and the variables they were assigned to, in order
    verifies  whether MLIR verifies each operation when it is made, so that a wrong one is found at its line
    """

    def __init__(self, name: str, slots: Sequence[tuple[str, Type]], place: tuple[str, int, int]) -> None:
        self.context = dialect.context()
        self._files: dict[tuple[str, int, int], Any] = {}
        self._types: dict[Type, Any] = {}
        self._attributes: dict[tuple[str | int, Any], Any] = {}
        start = self.file_location(*place)
        self.locate: Callable[[], Any] = lambda: start
        self.origin: Callable[[], Any] = lambda: None
        self._origins: dict[Any, Any] = {}
        self.barriers: list[Any] = []
        self._ended: IrBlock | None = None
        self._ip: Any = None
        self.names: list[tuple[Any, str]] = []
        self.verifies = False
        with self.context, start:
            self.module = ir.Module.parse("module attributes {gpu.container_module} { gpu.module @kernel_module { } }")
            self.gpu_module = self.module.body.operations[0].operation
            self.i1, self.i8, self.i32, self.i64 = (ir.IntegerType.get_signless(n) for n in (1, 8, 32, 64))
            self._scalars = {
                "f16": ir.F16Type.get(),
                "bf16": ir.BF16Type.get(),
                "f32": ir.F32Type.get(),
                "f64": ir.F64Type.get(),
            }
            self.ptr_global = ir.Type.parse("!llvm.ptr<1>")
            self.ptr_shared = ir.Type.parse("!llvm.ptr<3>")
            arguments = [self.type(kind) for _, kind in slots] + [self.ptr_global]
            self.func = ir.Operation.create(
                "gpu.func",
                attributes={
                    "sym_name": ir.StringAttr.get(name),
                    "function_type": ir.TypeAttr.get(ir.FunctionType.get(arguments, [])),
                    "gpu.kernel": ir.UnitAttr.get(),
                },
                regions=1,
                ip=ir.InsertionPoint.at_block_begin(self.gpu_module.regions[0].blocks[0]),
            )
            self.region = self.func.regions[0]
            self.entry = self.region.blocks.append(*arguments, arg_locs=[self.locate()] * len(arguments))
        self.block: IrBlock | None = self.entry

    # ---- types, attributes, locations

    def type(self, kind: Type) -> Any:
        """The MLIR type that carries a value of `kind`."""
        found = self._types.get(kind)
        if found is None:
            with self.context:
                match kind:
                    case ScalarType():
                        if kind.is_float and kind not in (F8E4M3, F8E5M2):
                            found = self._scalars[kind.name]
                        else:
                            found = ir.IntegerType.get_signless(kind.bits)
                    case VecType(elem=elem, n=n):
                        with ir.Location.unknown():
                            found = ir.VectorType.get([n], self.type(elem))
                    case PtrType(space="shared"):
                        found = self.ptr_shared
                    case PtrType():
                        found = self.ptr_global
                    case _:
                        raise TypeError(f"{kind} is not carried in one register")
            self._types[kind] = found
        return found

    def string(self, text: str) -> Any:
        return self._attribute(("s", text), lambda: ir.StringAttr.get(text, self.context))

    def integer(self, value: int, bits: int = 32) -> Any:
        kind = self.i32 if bits == 32 else self.i64
        return self._attribute((bits, value), lambda: ir.IntegerAttr.get(kind, value))

    def _attribute(self, key: tuple[str | int, Any], make: Any) -> Any:
        found = self._attributes.get(key)
        if found is None:
            found = self._attributes[key] = make()
        return found

    def file_location(self, file: str, line: int, column: int) -> Any:
        key = (file, line, column)
        found = self._files.get(key)
        if found is None:
            found = self._files[key] = ir.Location.file(file, line, column, context=self.context)
        return found

    def call_location(self, callee: Any, callers: Sequence[Any]) -> Any:
        return ir.Location.callsite(callee, list(callers), context=self.context) if callers else callee

    # ---- blocks

    def new_block(self, types: Sequence[Type] = ()) -> IrBlock:
        kinds = [self.type(t) for t in types]
        return self.region.blocks.append(*kinds, arg_locs=[self.locate()] * len(kinds))

    def branch(self, target: IrBlock, arguments: Sequence[IrValue] = ()) -> None:
        self.op("cf.br", (), list(arguments), successors=[target])
        self.block = None

    def cond_branch(self, condition: IrValue, then: IrBlock, other: IrBlock, fault: bool = False) -> None:
        """Branches without block arguments. `fault`: the first side is the way out of a failed wait or assert."""
        attributes: dict[str, Any] = {"operandSegmentSizes": self._attribute(("seg", 3), self._segments)}
        if fault:
            attributes["ep.fault"] = self._attribute(("unit", 0), lambda: ir.UnitAttr.get(self.context))
        self.op("cf.cond_br", (), [condition], attributes, successors=[then, other])
        self.block = None

    def _segments(self) -> Any:
        with self.context:
            return ir.DenseI32ArrayAttr.get([1, 0, 0])

    # ---- operations

    def origin_of(self, operation: Any) -> Any:
        """What `origin` gave when a barrier or branch was made."""
        return self._origins[operation]

    def op(
        self,
        name: str,
        results: Sequence[Any],
        operands: Sequence[IrValue],
        attributes: dict[str, Any] | None = None,
        successors: Sequence[IrBlock] | None = None,
    ) -> Any:
        """Appends an operation to the current block. Returns its only result, or None.

        Raises MLIRError where it verifies and MLIR finds fault.
        """
        assert self.block is not None
        made = ir.Operation.create(
            name,
            results=results,
            operands=operands,
            attributes=attributes,
            successors=successors,
            loc=self.locate(),
            ip=self._end(self.block),
        )
        if name in _REPORTED:
            self._origins[made] = self.origin()
            if name == "ep.barrier":
                self.barriers.append(made)
        if self.verifies:
            made.verify()
        return made.result if results else None

    def _end(self, block: IrBlock) -> Any:
        """The insertion point at the end of a block."""
        if block is not self._ended:
            self._ended, self._ip = block, ir.InsertionPoint(block)
        return self._ip

    def constant(self, kind: ScalarType, number: bool | int | float) -> IrValue:
        # 0.0 and -0.0 are equal.
        key = (kind, number if type(number) is int else repr(number))
        mlir_type = self.type(kind)
        if kind.is_float and kind not in (F8E4M3, F8E5M2):
            attribute = self._attribute(
                ("constant", key), lambda: ir.FloatAttr.get(mlir_type, float(number), loc=ir.Location.unknown(self.context))
            )
        else:
            value = int(number)
            if kind.kind == "u" and value > ScalarType("", "i", kind.bits).max:
                value -= 1 << kind.bits
            if kind.kind == "b":
                value = -1 if number else 0
            attribute = self._attribute(("constant", key), lambda: ir.IntegerAttr.get(mlir_type, value))
        return self.op("arith.constant", [mlir_type], [], {"value": attribute})

    def ep(self, name: str, results: Sequence[Type], operands: Sequence[IrValue], /, **attributes: str | int | Any) -> Any:
        """An operation of the `ep` dialect; strings and integers become attributes."""
        made = {k: self.string(v) if isinstance(v, str) else self.integer(v) if isinstance(v, int) else v for k, v in attributes.items()}
        return self.op(f"ep.{name}", [self.type(t) for t in results], operands, made)

    def inline_asm(self, text: str, constraints: str, result: Type | None, operands: Sequence[IrValue]) -> Any:
        attributes = {
            "asm_string": self.string(text),
            "constraints": self.string(constraints),
            "has_side_effects": ir.UnitAttr.get(self.context),
        }
        return self.op("llvm.inline_asm", [self.type(result)] if result is not None else [], operands, attributes)

    def compare(self, operator: str, kind: ScalarType, a: IrValue, b: IrValue) -> IrValue:
        if kind.is_float:
            predicate, name = _FCMP[operator], "arith.cmpf"
        else:
            signed, unsigned = _ICMP[operator]
            predicate, name = (signed if kind.kind == "i" else unsigned), "arith.cmpi"
        return self.op(name, [self.i1], [a, b], {"predicate": self.integer(predicate, 64)})

    def select(self, condition: IrValue, a: IrValue, b: IrValue) -> IrValue:
        return self.op("arith.select", [a.type], [condition, a, b])

    def gep(self, pointer: IrValue, offset: IrValue) -> IrValue:
        """`pointer` plus `offset` bytes (an i64)."""
        return self.op(
            "llvm.getelementptr",
            [pointer.type],
            [pointer, offset],
            {
                "rawConstantIndices": self._attribute(("gep", 0), self._dynamic_index),
                "elem_type": self._attribute(("gep", 1), lambda: ir.TypeAttr.get(self.i8, context=self.context)),
            },
        )

    def _dynamic_index(self) -> Any:
        with self.context:
            return ir.DenseI32ArrayAttr.get([-2147483648])

    def set_func_attribute(self, name: str, value: int) -> None:
        self.func.attributes[name] = self.integer(value, 64)

    def finish(self) -> None:
        """Ends the kernel at the current block."""
        self.op("gpu.return", (), [])
        self.block = None

    def apply_names(self) -> Callable[[], None]:
        """Puts variables' names into locations, where a printer finds them; the first name of a value counts. Returns what undoes it."""
        first: dict[Any, str] = {}
        for value, name in self.names:
            first.setdefault(value, name)
        places: list[tuple[Callable[[Any], None], Any]] = []
        for value, name in first.items():
            if isinstance(value, ir.BlockArgument):
                put = value.set_location
            else:
                put = functools.partial(setattr, value.owner, "location")
            places.append((put, value.location))
            put(ir.Location.name(name, value.location, context=self.context))

        def undo() -> None:
            for put, location in places:
                put(location)

        return undo

    def named_bytecode(self) -> bytes:
        """The module as bytecode, values named after variables."""
        undo = self.apply_names()
        try:
            return bytecode(self.module)
        finally:
            undo()
