"""From a kernel's source to a checked module of the `ep` dialect."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from epdsl_runtime.artifact import Site

from epdsl.compiler import CompileRequest, slot_types, tag_of
from epdsl.env import VERIFY
from epdsl.ir.builder import Builder
from epdsl.ir.dialect import STOPS
from epdsl.ir.pretty import pretty
from epdsl.ir.steps import bytecode_text, module_text
from epdsl.ir.types import I1, I32, U64, ArrayType, PeersType, PtrType, ScalarType, StructType, Type
from epdsl.ir.verify import verify
from epdsl.lang.arithmetic import convert
from epdsl.lang.errors import CompileError
from epdsl.lang.interpreter import Interpreter, lookup_in
from epdsl.lang.source import Source, parameter_nodes, source_of
from epdsl.lang.tracer import Binding
from epdsl.lang.values import ArrayValue, PeersValue, StructValue, Value


@dataclass(frozen=True)
class Built:
    """The module as built, and what the artifact needs to know.

    bytecode   the module before anything was lowered, values named after variables
    sources    the functions that were interpreted, the kernel's own first
    annotated  names that annotations inside them mention
    """

    module: Any = field(repr=False)
    bytecode: bytes = field(repr=False)
    shared_bytes: int
    sites: tuple[Site, ...]
    param_align: dict[str, int]
    sources: tuple[Source, ...]
    annotated: frozenset[str]
    apply_names: Callable[[], Callable[[], None]]

    @functools.cached_property
    def text(self) -> str:
        """The module's text as it was built, whatever has been lowered since."""
        return bytecode_text(self.bytecode)

    def keep_names(self) -> None:
        """Names values after variables in everything that is printed from now on."""
        self.apply_names()

    def located_text(self) -> str:
        """The module's text with locations, in the lines they belong to."""
        undo = self.apply_names()
        try:
            return module_text(self.module, locations=True, in_place=True)
        finally:
            undo()

    def pretty(self) -> str:
        """The module in the form that is easiest to read (`epdsl.ir.pretty`)."""
        undo = self.apply_names()
        try:
            (function,) = (op.operation for op in self.module.body.operations[0].operation.regions[0].blocks[0].operations)
            return pretty(function)
        finally:
            undo()

    def source_text(self) -> str:
        """What was interpreted, as it is in its files, each function under a line that says where it is."""
        found: dict[str, None] = {}
        for source in self.sources:
            first = min([source.node.lineno, *(d.lineno for d in source.node.decorator_list)])
            lines = source.lines[first - 1 : source.node.end_lineno]
            found.setdefault(f"# {source.file}:{first} {source.name}\n{''.join(lines)}")
        return "\n".join(found)


def build(request: CompileRequest) -> Built:
    """Interprets the kernel. Raises CompileError with the line at fault."""
    built, breakpoints = _build(request, stops_at_lines=False)
    # A thread that stops at one may be stepped from there, also through lines before it.
    return _build(request, stops_at_lines=True)[0] if breakpoints else built


def _build(request: CompileRequest, stops_at_lines: bool) -> tuple[Built, int]:
    """The kernel, and how many times it has breakpoint()."""
    source = source_of(request.function)
    nodes = parameter_nodes(source.node)
    try:
        arguments = request.arguments
        slots = [slot for name, kind in arguments.items() for slot in slot_types(name, kind)]
    except CompileError as error:
        found = (source.place(node) for name, node in nodes.items() if f"parameter {name}: " in error.message)
        raise error.at(tuple(found)) from None
    if request.max_threads is not None and request.max_threads % request.target.warp_size:
        raise CompileError(
            "EP062",
            f"{request.name}: max_threads {request.max_threads} is not a whole number of warps of {request.target.warp_size}",
            f"a multiple of {request.target.warp_size}",
        ).at((source.place(source.node),))
    builder = Builder(request.name, slots, (source.file, source.node.lineno, source.node.col_offset + 1))
    builder.verifies = VERIFY.get()
    *registers, last = builder.entry.arguments
    interpreter = Interpreter(builder, request.target, Value(PtrType(U64), last), request.max_threads)
    builder.names.append((last, "context"))
    interpreter.site_tag = tag_of(request)
    interpreter.stops_at_lines = stops_at_lines
    env = interpreter.enter(source, lookup_in(request.function), request.function.__code__)
    supply = iter(zip(slots, registers, strict=True))
    for name, kind in arguments.items():
        env[name] = Binding(_parameter(builder, kind, supply), nodes[name])
        interpreter.named(name, env[name].value)
    constants = dict(request.constants)
    if request.instance is not None:
        constants[next(iter(nodes))] = request.instance
    for name, value in constants.items():
        env[name] = Binding(value, nodes[name])
    interpreter.run()
    interpreter.settle_shared()
    builder.set_func_attribute("ep.shared_bytes", interpreter.shared_bytes)
    if request.max_threads is not None:
        builder.set_func_attribute("ep.max_threads", request.max_threads)
    if stops_at_lines:
        builder.set_func_attribute(STOPS, 1)
    if VERIFY.get():
        builder.module.operation.verify()
    verify(builder.func, builder.barriers, lambda operation: interpreter.places_of(builder.origin_of(operation)))
    built = Built(
        builder.module,
        builder.named_bytecode(),
        interpreter.shared_bytes,
        interpreter.sites,
        interpreter.param_align,
        tuple(interpreter.sources),
        frozenset(interpreter.annotated),
        builder.apply_names,
    )
    return built, interpreter.breakpoints


def _parameter(builder: Builder, kind: Type, supply: Iterator[tuple[tuple[str, Type], Any]]) -> Any:
    match kind:
        case ScalarType(kind="b"):
            _, register = next(supply)
            byte = Value(I32, builder.op("arith.extui", [builder.i32], [register]))
            return convert(builder, byte, I1)
        case ScalarType():
            return Value(kind, next(supply)[1])
        case PtrType():
            (name, _), register = next(supply)
            return Value(kind, register, root=name)
        case PeersType(elem=elem):
            table = Value(PtrType(PtrType(elem, peer=True)), next(supply)[1])
            return PeersValue(kind, table, Value(I32, next(supply)[1]))
        case StructType(fields=fields):
            return StructValue(kind, {name: _parameter(builder, inner, supply) for name, inner in fields})
        case ArrayType(elem=elem, n=n):
            return ArrayValue(kind, tuple(_parameter(builder, elem, supply) for _ in range(n)))
        case _:
            raise CompileError("EP022", f"{kind} cannot be passed to a kernel")
