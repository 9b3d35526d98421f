"""From a kernel's source to a checked module of the `ep` dialect."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from epdsl_runtime.artifact import Site

from epdsl.compiler import CompileRequest, slot_types, tag_of
from epdsl.env import VERIFY
from epdsl.ir.builder import Builder
from epdsl.ir.types import I1, I32, U64, ArrayType, PeersType, PtrType, ScalarType, StructType, Type
from epdsl.ir.verify import verify
from epdsl.lang.arithmetic import convert
from epdsl.lang.errors import CompileError
from epdsl.lang.interpreter import Interpreter, lookup_in
from epdsl.lang.source import source_of
from epdsl.lang.tracer import Binding, Env
from epdsl.lang.values import ArrayValue, PeersValue, StructValue, Value


@dataclass(frozen=True)
class Built:
    """The module as built, its text, and what the artifact needs to know."""

    module: Any
    text: str
    shared_bytes: int
    sites: tuple[Site, ...]
    param_align: dict[str, int]


def build(request: CompileRequest) -> Built:
    """Interprets the kernel. Raises CompileError with the line at fault."""
    arguments = request.arguments
    slots = [slot for name, kind in arguments.items() for slot in slot_types(name, kind)]
    builder = Builder(request.name, slots)
    registers = list(builder.entry.arguments)
    context = Value(PtrType(U64), registers.pop())
    source = source_of(request.function)
    builder.location = builder.file_location(source.file, source.node.lineno, source.indent + 1)  # pyright: ignore[reportAttributeAccessIssue]
    env: Env = {}
    supply = iter(zip(slots, registers, strict=True))
    self_name = next(iter(request.function.__code__.co_varnames), "self")
    if request.instance is not None:
        env[self_name] = Binding(request.instance, source.node)
    for name, kind in arguments.items():
        env[name] = Binding(_parameter(builder, kind, supply), source.node)
    for name, value in request.constants.items():
        env[name] = Binding(value, source.node)
    interpreter = Interpreter(builder, request.target, context, request.max_threads)
    interpreter.site_tag = tag_of(request)
    interpreter.run_kernel(source, lookup_in(request.function), env, request.function.__code__)
    builder.set_func_attribute("ep.shared_bytes", interpreter.shared_bytes)
    if request.max_threads is not None:
        builder.set_func_attribute("ep.max_threads", request.max_threads)
    if request.max_threads is not None and request.max_threads % request.target.warp_size:
        raise CompileError(
            f"{request.name}: max_threads {request.max_threads} is not a whole number of warps of {request.target.warp_size}",
            f"a multiple of {request.target.warp_size}",
        )
    if VERIFY.get():
        builder.module.operation.verify()
    verify(builder.func, lambda operation: interpreter.places_of(builder.origin_of(operation)))
    return Built(builder.module, builder.text(), interpreter.shared_bytes, tuple(interpreter.sites), interpreter.param_align)


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
            raise CompileError(f"{kind} cannot be passed to a kernel")
