"""`@ep.kernel`: a function that is compiled for a target and launched."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import threading
from collections.abc import Callable, Sequence
from typing import Any, overload

from epdsl_runtime.artifact import Artifact
from epdsl_runtime.launch import Launcher, Prepared, launcher

from epdsl.compiler import CompileRequest, compile_kernel
from epdsl.env import ARCH, DEBUG
from epdsl.lang.errors import CompileError
from epdsl.lang.source import parameter_nodes, source_of
from epdsl.lang.types import ConstAnnotation, keep_annotations, resolve_annotations
from epdsl.targets import parse_target

# Ranks that are threads compile a kernel once.
_compiling = threading.RLock()

MaxThreads = int | Callable[[Any], int] | None


class Kernel:
    """A kernel. On a frozen dataclass it is a family: each instance is a kernel of its own, its fields compile-time constants.

    max_threads   the largest block it will be launched with, when known: a number, or a function of the dataclass instance
    """

    def __init__(self, function: Callable[..., Any], max_threads: MaxThreads = None, instance: Any = None) -> None:
        self.function = function
        self.max_threads = max_threads
        self.instance = instance
        functools.update_wrapper(self, function)
        self._compiled: dict[Any, Artifact] = {}
        self._bound: dict[Any, Kernel] = {}

    def __get__(self, instance: Any, owner: Any = None) -> Kernel:
        if instance is None:
            return self
        if not dataclasses.is_dataclass(instance) or not getattr(instance, "__dataclass_params__").frozen:  # noqa: B009
            raise CompileError(
                f"{self.function.__qualname__} is a kernel of {type(instance).__name__}, whose fields may change",
                "@dataclass(frozen=True) above the class",
            )
        found = self._bound.get(instance)
        if found is None:
            found = self._bound[instance] = Kernel(self.function, self.max_threads, instance)
        return found

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        raise CompileError(f"{self.name} is a kernel", f"{self.function.__name__}.launch(rank, grid=..., block=..., args=(...))")

    def __repr__(self) -> str:
        return f"<ep.kernel {self.name}>"

    @property
    def name(self) -> str:
        """The symbol it gets in a binary."""
        return self.function.__qualname__.replace("<locals>.", "").replace(".", "_")

    @functools.cached_property
    def parameters(self) -> dict[str, Any]:
        """Parameter names and their annotations, without `self`."""
        names = list(inspect.signature(self.function).parameters)
        if self.instance is not None:
            names = names[1:]
        annotations = resolve_annotations(self.function, {n: a for n, a in self.function.__annotations__.items() if n in names})
        for name in names:
            if name not in annotations:
                source = source_of(self.function)
                error = CompileError(f"{self.name}: parameter {name} has no type", f"{name}: ep.Ptr[ep.f32], ep.i32, ep.Const[int], ...")
                raise error.at((source.place(parameter_nodes(source.node)[name]),))
        return {name: annotations[name] for name in names}

    @property
    def constant_names(self) -> tuple[str, ...]:
        return tuple(n for n, a in self.parameters.items() if isinstance(a, ConstAnnotation))

    def compile(self, target: str, **consts: Any) -> Artifact:
        """Compiles for a target ("sm_90", "gfx942", "sim", ...); `consts` gives the `ep.Const` parameters.

        Raises CompileError with the line at fault, ValueError for an unknown target.
        """
        where = parse_target(target)
        absent = [n for n in self.constant_names if n not in consts]
        unknown = [n for n in consts if n not in self.constant_names]
        if absent or unknown:
            raise CompileError(
                f"{self.name}: constants missing {absent}, unknown {unknown}",
                f"compile(target, {', '.join(f'{n}=...' for n in self.constant_names)})",
            )
        key = (where.name, tuple(sorted(consts.items())))
        with _compiling:
            found = self._compiled.get(key)
            if found is not None:
                return found
            limit = self.max_threads(self.instance) if callable(self.max_threads) else self.max_threads
            request = CompileRequest(self.name, self.function, self.instance, self.parameters, consts, where, limit)
            try:
                found = self._compiled[key] = compile_kernel(request)
            except CompileError as error:
                if DEBUG.get():
                    raise
                # What the author needs is in the error's text; the compiler's own frames are not.
                raise error.with_traceback(None) from None
            return found

    def launcher(self, device: Any, args: Sequence[Any]) -> tuple[Launcher, list[Any]]:
        """The kernel loaded on a rank's or device's device, compiled for the constants among `args`, and the other arguments."""
        names = list(self.parameters)
        if len(args) != len(names):
            raise TypeError(f"{self.name} takes {len(names)} arguments ({', '.join(names)}), got {len(args)}")
        constants = set(self.constant_names)
        consts = {n: v for n, v in zip(names, args, strict=True) if n in constants}
        rest = [v for n, v in zip(names, args, strict=True) if n not in constants]
        owner = getattr(device, "device", device)
        target = owner.info.target if owner.info.kind == "sim" else ARCH.get() or owner.info.target
        return launcher(owner, self.compile(target, **consts)), rest

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
        loaded, rest = self.launcher(device, args)
        loaded.launch(grid=grid, block=block, args=rest, shared_bytes=shared_bytes, stream=stream, cooperative=cooperative)

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
        loaded, rest = self.launcher(device, args)
        return loaded.prepare(grid=grid, block=block, args=rest, shared_bytes=shared_bytes, stream=stream, cooperative=cooperative)


@overload
def kernel(function: Callable[..., Any], /) -> Kernel: ...
@overload
def kernel(*, max_threads: MaxThreads = None) -> Callable[[Callable[..., Any]], Kernel]: ...
def kernel(function: Callable[..., Any] | None = None, /, *, max_threads: MaxThreads = None) -> Any:
    """Makes a kernel of a function: `@ep.kernel` or `@ep.kernel(max_threads=256)`."""
    if function is None:
        return lambda f: _made(f, max_threads)  # pyright: ignore[reportUnknownLambdaType]
    return _made(function, max_threads)


def _made(function: Callable[..., Any], max_threads: MaxThreads) -> Kernel:
    keep_annotations(function)
    return Kernel(function, max_threads)
