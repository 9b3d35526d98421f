"""The pipeline: a kernel and a target become an artifact."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from epdsl_runtime.artifact import Artifact, Param, site_tag

from epdsl.ir.steps import Watch, replace
from epdsl.ir.types import I32, U8, U64, ArrayType, PeersType, PtrType, ScalarType, StructType, Type, VecType
from epdsl.lang.errors import CompileError
from epdsl.lang.types import ConstAnnotation, as_type
from epdsl.stages import StageTexts
from epdsl.targets import Target

if TYPE_CHECKING:
    from epdsl.build import Built


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
    blocks: int | None = None

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
                    raise CompileError(error.code, f"{self.name}: parameter {name}: {error.message}", error.fix) from None
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
            raise CompileError("EP022", f"parameter {name}: {kind} cannot be passed to a kernel", "a pointer, a struct or scalars")


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
            raise CompileError("EP022", f"parameter {name}: {kind} cannot be passed to a kernel")


def _elem_name(kind: Type) -> str:
    return "u64" if isinstance(kind, PtrType) else str(kind)


@contextmanager
def collector_paused() -> Iterator[None]:
    """Building makes many objects that all live to its end; looking for garbage among them costs a fifth of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@dataclass(frozen=True)
class Code:
    """What the passes and the code generator made of a built kernel.

    shared_bytes  block-shared memory the lowering needs beyond the kernel's own
    """

    binary: bytes = field(repr=False)
    texts: Mapping[str, str] = field(repr=False)
    shared_bytes: int = 0


@collector_paused()
def compile_kernel(request: CompileRequest, change: Callable[[Any], None] | None = None, watch: Watch | None = None) -> Artifact:
    """Builds, checks, lowers and emits one kernel, whatever the cache has. Raises CompileError with the line at fault.

    change  is given the module as built, before it is lowered
    watch   is shown every stage
    """
    from epdsl.build import build

    watch = watch or Watch()
    watch.begin("ep")
    built = build(request)
    if change is not None:
        change(built.module)
    return artifact_of(request, built, emit(request, built, watch, change))


def emit(request: CompileRequest, built: Built, watch: Watch, change: Callable[[Any], None] | None = None) -> Code:
    """Lowers a built kernel, in place, and generates its code. Raises CompileError naming the pass that failed."""
    from mlir.ir import MLIRError  # pyright: ignore[reportAttributeAccessIssue]

    from epdsl.codegen import CodegenError
    from epdsl.lowering import LoweringError

    try:
        watch.opened(request, built)
        watch.end("source", built.source_text)
        watch.end("ep-pretty", built.pretty)
        other = watch.end("ep", built.located_text if watch.locations else lambda: built.text)
        if watch.names and not request.target.checked:
            built.keep_names()
        if other is not None:
            replace(built.module, other)
        return _emit(request, built.module, watch)
    except (LoweringError, CodegenError, MLIRError, RuntimeError) as error:
        from epdsl.reproducer import failed

        raise failed(request, watch, built, change, error) from error


def _emit(request: CompileRequest, module: Any, watch: Watch) -> Code:
    target = request.target
    if target.simulated:
        from epdsl_runtime.sim_code import pack

        from epdsl import lower_sim
        from epdsl.sim.scheduler import scheduler_object

        if target.checked:
            from epdsl.check.instrument import compile_checked

            code = compile_checked(module, request, watch)
        else:
            code = lower_sim.compile_module(module, target, request.name, watch=watch)
        return Code(pack(code.binary, scheduler_object()), code.texts)
    from epdsl import codegen

    # Each brings a dialect that the other has no use for.
    lowering = importlib.import_module(f"epdsl.lower_{'nvvm' if target.vendor == 'nvidia' else 'rocdl'}")
    shared = lowering.lower(module, target, watch)
    code = codegen.emit(module, target, watch=watch)
    return Code(code.binary, code.texts, shared)


def artifact_of(request: CompileRequest, built: Built, code: Code) -> Artifact:
    """What a launch needs of a built kernel and its code."""
    target = request.target
    return Artifact(
        name=request.name,
        target=target.name,
        vendor=target.vendor,
        warp_size=target.warp_size,
        params=tuple(describe_param(name, kind, built.param_align) for name, kind in request.arguments.items()),
        shared_bytes=built.shared_bytes + code.shared_bytes,
        sites=built.sites,
        binary=code.binary,
        max_threads=request.max_threads,
        blocks=request.blocks,
        texts=StageTexts(("ep", *code.texts), lambda: {"ep": built.text, **code.texts}, request),
        constants=request.constant_texts,
    )


def tag_of(request: CompileRequest) -> int:
    return site_tag(request.name, request.target.name, request.constant_texts)
