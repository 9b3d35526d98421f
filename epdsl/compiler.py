"""The pipeline: a kernel and a target become an artifact."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from epdsl_runtime.artifact import Artifact, Param, site_tag

from epdsl.ir.types import I32, U8, U64, ArrayType, PeersType, PtrType, ScalarType, StructType, Type, VecType
from epdsl.lang.errors import CompileError
from epdsl.lang.types import ConstAnnotation, as_type
from epdsl.targets import Target


@dataclass(frozen=True)
class CompileRequest:
    """A kernel, its compile-time arguments and a target."""

    name: str
    function: Callable[..., Any]
    instance: Any
    parameters: Mapping[str, Any]
    constants: Mapping[str, Any]
    target: Target
    max_threads: int | None = None

    @property
    def constant_texts(self) -> dict[str, str]:
        own = {} if self.instance is None else {"self": repr(self.instance)}
        return {**own, **{name: repr(value) for name, value in self.constants.items()}}

    @property
    def arguments(self) -> dict[str, Type]:
        """The run-time parameters and their types."""
        found: dict[str, Type] = {}
        for name, annotation in self.parameters.items():
            if not isinstance(annotation, ConstAnnotation):
                try:
                    found[name] = as_type(annotation)
                except CompileError as error:
                    raise CompileError(f"{self.name}: parameter {name}: {error.message}", error.fix) from None
        return found


def slot_types(name: str, kind: Type) -> Iterator[tuple[str, Type]]:
    """The registers a parameter is passed in. Matches `epdsl_runtime.artifact.Param.slots`."""
    match kind:
        case ScalarType(kind="b"):
            yield name, U8
        case ScalarType() | PtrType():
            yield name, kind
        case PeersType():
            yield f"{name}.table", PtrType(U64)
            yield f"{name}.size", I32
        case StructType(fields=fields):
            for member, inner in fields:
                yield from slot_types(f"{name}.{member}", inner)
        case ArrayType(elem=elem, n=n):
            for index in range(n):
                yield from slot_types(f"{name}[{index}]", elem)
        case VecType():
            raise CompileError(f"parameter {name}: {kind} cannot be passed to a kernel", "a pointer, a struct or scalars")


def describe_param(name: str, kind: Type, align: Mapping[str, int], path: str = "") -> Param:
    """A parameter as the runtime binds it."""
    path = path or name
    match kind:
        case ScalarType():
            return Param(name, "scalar", kind.name, kind.nbytes)
        case PtrType(elem=elem, peer=peer):
            return Param(name, "pointer", _elem_name(elem), elem.nbytes, max(elem.align, align.get(path, 1)), peer)
        case PeersType(elem=elem):
            return Param(name, "peers", _elem_name(elem), elem.nbytes, elem.align, True)
        case StructType(fields=fields):
            members = tuple(describe_param(n, k, align, f"{path}.{n}") for n, k in fields)
            return Param(name, "struct", kind.name, kind.nbytes, fields=members)
        case ArrayType(elem=elem, n=n):
            return Param(name, "array", _elem_name(elem), elem.nbytes, fields=(describe_param("", elem, align, path),), count=n)
        case VecType():
            raise CompileError(f"parameter {name}: {kind} cannot be passed to a kernel")


def _elem_name(kind: Type) -> str:
    return "u64" if isinstance(kind, PtrType) else str(kind)


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Building makes many objects that all live to its end; looking for garbage among them costs a fifth of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@_collector_paused()
def compile_kernel(request: CompileRequest, change: Callable[[Any], None] | None = None) -> Artifact:
    """Builds, checks, lowers and emits one kernel. Raises CompileError with the line at fault.

    change  is given the module as built, before it is lowered
    """
    from epdsl.build import build

    built = build(request)
    if change is not None:
        change(built.module)
    texts = {"ep": built.text}
    target = request.target
    if target.simulated:
        from epdsl_runtime.sim_code import pack

        from epdsl import lower_sim
        from epdsl.sim.scheduler import scheduler_object

        shared = built.shared_bytes
        if target.checked:
            from epdsl.check.instrument import compile_checked

            code = compile_checked(built.module, request)
        else:
            code = lower_sim.compile_module(built.module, target, request.name)
        code = lower_sim.Code(pack(code.binary, scheduler_object()), code.texts)
    else:
        from epdsl import codegen, lower_nvvm, lower_rocdl

        lowering = lower_nvvm if target.vendor == "nvidia" else lower_rocdl
        shared = built.shared_bytes + lowering.lower(built.module, target)
        code = codegen.emit(built.module, target)
    params = tuple(describe_param(name, kind, built.param_align) for name, kind in request.arguments.items())
    return Artifact(
        name=request.name,
        target=target.name,
        vendor=target.vendor,
        warp_size=target.warp_size,
        params=params,
        shared_bytes=shared,
        sites=built.sites,
        binary=code.binary,
        max_threads=request.max_threads,
        texts={**texts, **code.texts},
        constants=request.constant_texts,
    )


def tag_of(request: CompileRequest) -> int:
    return site_tag(request.name, request.target.name, request.constant_texts)
