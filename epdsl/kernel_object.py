"""`@ep.kernel`: a function that is compiled for a target and launched."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, overload

from epdsl_runtime.artifact import Artifact
from epdsl_runtime.binding import number_of
from epdsl_runtime.errors import ArgumentTypeError, CodedError, shown
from epdsl_runtime.launch import Launcher, Prepared, device_of, launcher

from epdsl.artifact_cache import compiled
from epdsl.compiler import CompileRequest
from epdsl.env import ARCH, DUMP, OVERRIDE_DIR
from epdsl.lang.errors import CompileError
from epdsl.lang.source import keep_source, parameter_nodes, source_of
from epdsl.lang.types import ConstAnnotation, keep_annotations, resolve_annotations
from epdsl.targets import parse_target

_TOGETHER = 8
"""Threads that compile: Python runs one of them and LLVM another, the others have been built and wait for LLVM. Each keeps a module."""

Limit = int | Callable[[Any], int] | None


def _told_apart(consts: Mapping[str, Any]) -> list[tuple[str, type, Any]]:
    """Constants as part of a key: 1, True and 1.0 are equal and not the same constant."""
    return sorted((name, type(value), value) for name, value in consts.items())


class Kernel:
    """A kernel. On a frozen dataclass it is a family: each instance is a kernel of its own, its fields compile-time constants.

    max_threads   the largest block it will be launched with, when known: a number, or a function of the dataclass instance
    blocks        the blocks of every launch, likewise: a kernel whose blocks count one another refuses another grid
    """

    def __init__(self, function: Callable[..., Any], max_threads: Limit = None, instance: Any = None, blocks: Limit = None) -> None:
        self.function = function
        self.max_threads = max_threads
        self.instance = instance
        self.blocks = blocks
        functools.update_wrapper(self, function)
        self._compiled: dict[Any, Artifact] = {}
        self._bound: dict[Any, Kernel] = {}
        # Ranks that are threads compile a kernel once.
        self._compiling = threading.RLock()

    def __get__(self, instance: Any, owner: Any = None) -> Kernel:
        if instance is None:
            return self
        if not dataclasses.is_dataclass(instance) or not getattr(instance, "__dataclass_params__").frozen:  # noqa: B009
            raise CompileError(
                "EP034",
                f"{self.function.__qualname__} is a kernel of {type(instance).__name__}, whose fields may change",
                "@dataclass(frozen=True) above the class",
            )
        found = self._bound.get(instance)
        if found is None:
            found = self._bound.setdefault(instance, Kernel(self.function, self.max_threads, instance, self.blocks))
        return found

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        raise CompileError("EP013", f"{self.name} is a kernel", f"{self.function.__name__}.launch(rank, grid=..., block=..., args=(...))")

    def __getitem__(self, shape: Any) -> None:
        self()

    def __repr__(self) -> str:
        return f"<ep.kernel {self.name}>"

    @property
    def name(self) -> str:
        """The symbol it gets in a binary."""
        return self.function.__qualname__.replace("<locals>.", "").replace(".", "_")

    @functools.cached_property
    def parameters(self) -> dict[str, Any]:
        """Parameter names and their annotations, without `self`."""
        declared = inspect.signature(self.function).parameters
        names = list(declared)
        if self.instance is not None:
            names = names[1:]
        self._refuse_what_a_launch_cannot_give([declared[name] for name in names])
        annotations = resolve_annotations(self.function, {n: a for n, a in self.function.__annotations__.items() if n in names})
        for name in names:
            if name not in annotations:
                source = source_of(self.function)
                error = CompileError(
                    "EP021", f"{self.name}: parameter {name} has no type", f"{name}: ep.Ptr[ep.f32], ep.i32, ep.Const[int], ..."
                )
                raise error.at((source.place(parameter_nodes(source.node)[name]),))
        return {name: annotations[name] for name in names}

    def _refuse_what_a_launch_cannot_give(self, declared: Iterable[inspect.Parameter]) -> None:
        for one in declared:
            if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD):
                problem = f"{self.name}: a kernel has a fixed number of parameters, and {str(one).partition(':')[0]} takes any"
                fix = "a parameter for each, or one of type ep.Array[T, N] or of an @ep.struct"
            elif one.default is not one.empty:
                problem = f"{self.name}: parameter {one.name} has a default, and a launch gives every argument"
                fix = f"{one.name} without a default, and its value in args=(...)"
            else:
                continue
            source = source_of(self.function)
            raise CompileError("EP008", problem, fix).at((source.place(parameter_nodes(source.node)[one.name]),))

    @functools.cached_property
    def constant_names(self) -> tuple[str, ...]:
        return tuple(n for n, a in self.parameters.items() if isinstance(a, ConstAnnotation))

    def request(self, target: str, **consts: Any) -> CompileRequest:
        """What `compile` compiles. Raises CompileError for wrong constants, ValueError for an unknown target."""
        where = parse_target(target)
        absent = [n for n in self.constant_names if n not in consts]
        unknown = [n for n in consts if n not in self.constant_names]
        if absent or unknown:
            names = "".join(f", {n}=..." for n in self.constant_names)
            raise CompileError("EP033", f"{self.name}: constants missing {absent}, unknown {unknown}", f"compile(target{names})")
        limit, blocks = (given(self.instance) if callable(given) else given for given in (self.max_threads, self.blocks))
        return CompileRequest(self.name, self.function, self.instance, self.parameters, consts, where, limit, blocks)

    def compile(self, target: str, **consts: Any) -> Artifact:
        """Compiles for a target ("sm_90", "gfx942", "sim", ...); `consts` gives the `ep.Const` parameters.

        What an earlier run compiled from the same sources is taken from the cache (`epdsl cache`).
        Raises CompileError with the line at fault, ValueError for an unknown target.
        """
        key = (parse_target(target).name, *_told_apart(consts))
        with self._compiling:
            found = self._compiled.get(key)
            if found is not None:
                return found
            request = self.request(target, **consts)
            if request.target.checked:
                from epdsl.check.mutate import remember

                remember(request)
            try:
                found = self._compiled[key] = compiled(request)
            except CompileError as error:
                raise shown(error) from error.__cause__
            return found

    def launcher(self, device: Any, args: Sequence[Any]) -> tuple[Launcher, Sequence[Any]]:
        """The kernel loaded on a rank's or device's device, compiled for the constants among `args`, and the other arguments."""
        names = self.parameters
        if number_of(args) != len(names):
            raise ArgumentTypeError("EP207", f"{self.name} takes {len(names)} arguments ({', '.join(names)}), got {len(args)}")
        owner = device_of(device)
        info = owner.info
        target = info.target if info.kind == "sim" else ARCH.get() or info.target
        constants = self.constant_names
        consts: dict[str, Any] = {}
        rest = args
        if constants:
            given = dict(zip(names, args, strict=True))
            consts = {name: given.pop(name) for name in constants}
            rest = list(given.values())
        key = ("as the device names it", target, *_told_apart(consts))
        found = self._compiled.get(key)
        if found is None:
            found = self.compile(target, **consts)
            if not parse_target(target).checked:
                self._compiled[key] = found
        return launcher(owner, found), rest

    def launch(
        self,
        device: Any,
        *,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        args: Sequence[Any] = (),
        shared_bytes: int = 0,
        stream: Any = None,
        cooperative: bool = False,
    ) -> None:
        """Starts the kernel on a rank's device (or a device) and returns at once.

        grid, block    blocks and threads: a number or up to three
        args           one per parameter, `ep.Const` ones included
        shared_bytes   dynamic shared memory beyond the kernel's own
        cooperative    refuse a grid that cannot be resident as a whole (its blocks wait for each other)
        Raises LaunchError, TypeError or ValueError before anything is started.
        """
        try:
            loaded, rest = self.launcher(device, args)
            loaded.launch(grid=grid, block=block, args=rest, shared_bytes=shared_bytes, stream=stream, cooperative=cooperative)
        except CodedError as error:
            raise shown(error) from error.__cause__

    def prepare(
        self,
        device: Any,
        *,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        args: Sequence[Any] = (),
        shared_bytes: int = 0,
        stream: Any = None,
        cooperative: bool = False,
    ) -> Prepared:
        """A launch bound and checked once, to be repeated: `prepared()`, `prepared.set(name=value)()`."""
        try:
            loaded, rest = self.launcher(device, args)
            return loaded.prepare(grid=grid, block=block, args=rest, shared_bytes=shared_bytes, stream=stream, cooperative=cooperative)
        except CodedError as error:
            raise shown(error) from error.__cause__


def compile_all(kernels: Iterable[Kernel], targets: Iterable[str]) -> Iterator[Artifact]:
    """`kernel.compile(target)` of every kernel for each target in turn, in that order. LLVM works on one while others are built.

    Raises what `compile` raises, at the place of the kernel it is of.
    """
    family = tuple(kernels)
    pairs = [(kernel, target) for target in targets for kernel in family]
    if DUMP.get() or OVERRIDE_DIR.get():
        # Files are named after the rank, and a rank may be a thread.
        yield from (kernel.compile(target) for kernel, target in pairs)
        return
    with ThreadPoolExecutor(_TOGETHER, "epdsl-compile") as pool:
        yield from pool.map(lambda pair: pair[0].compile(pair[1]), pairs)


@overload
def kernel(function: Callable[..., Any], /) -> Kernel: ...
@overload
def kernel(*, max_threads: Limit = None, blocks: Limit = None) -> Callable[[Callable[..., Any]], Kernel]: ...
def kernel(function: Callable[..., Any] | None = None, /, *, max_threads: Limit = None, blocks: Limit = None) -> Any:
    """Makes a kernel of a function: `@ep.kernel` or `@ep.kernel(max_threads=256, blocks=8)`."""
    if function is None:
        return lambda f: _made(f, max_threads, blocks)  # pyright: ignore[reportUnknownLambdaType]
    return _made(function, max_threads, blocks)


def _made(function: Callable[..., Any], max_threads: Limit, blocks: Limit) -> Kernel:
    keep_annotations(function)
    keep_source(function)
    return Kernel(function, max_threads, blocks=blocks)
