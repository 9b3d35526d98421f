"""Launches: shapes normalised and checked against the artifact and the device, arguments bound, repeated launches prepared."""

from __future__ import annotations

import operator
import re
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from .artifact import Artifact
from .binding import Binder, Number, bind, bind_one, owners
from .errors import ArgumentTypeError, CodedError

if TYPE_CHECKING:
    from .artifact import Param
    from .protocol import Device, DeviceInfo, Dim3, Function, Stream

MAX_GRID: Dim3 = (2**31 - 1, 65535, 65535)
MAX_BLOCK: Dim3 = (1024, 1024, 64)
MAX_THREADS_AMD = 2**32 - 1
"""Along an axis of a grid, all blocks together: what hipModuleLaunchKernel takes."""


@dataclass(frozen=True)
class Shape:
    """A launch's grid and block, and the dynamic shared memory beyond the artifact's own, in bytes."""

    grid: Dim3
    block: Dim3
    shared_bytes: int = 0

    @property
    def blocks(self) -> int:
        return self.grid[0] * self.grid[1] * self.grid[2]

    @property
    def threads(self) -> int:
        return self.block[0] * self.block[1] * self.block[2]


class LaunchError(CodedError, ValueError):
    """A launch that cannot work, refused before anything started."""


class PreparedFunction(Protocol):
    """A launch whose parameters lie ready: calling it starts the kernel, `patch` changes one slot."""

    def patch(self, index: int, value: Number) -> None: ...
    def __call__(self) -> None: ...


def dim3(value: int | Sequence[int], what: str) -> Dim3:
    """An extent given as a number or as one to three numbers. Raises LaunchError or TypeError for anything else."""
    numbers = tuple(value) if isinstance(value, Sequence) else (value,)
    if not 1 <= len(numbers) <= 3:
        raise LaunchError("EP201", f"{what} has one to three extents, got {len(numbers)}: {value!r}")
    try:
        x, y, z = (*(operator.index(n) for n in numbers), 1, 1)[:3]
    except TypeError:
        raise ArgumentTypeError("EP201", f"{what} is a number or a tuple of numbers, got {value!r}") from None
    if min(x, y, z) < 1:
        raise LaunchError("EP201", f"{what} {(x, y, z)} has an extent below 1")
    return x, y, z


def check_target(artifact: Artifact, info: DeviceInfo) -> None:
    """Raises LaunchError when the device cannot run code for the artifact's target."""
    if not target_runs(artifact.target, info.target):
        raise LaunchError(
            "EP202",
            f"{artifact.name} is compiled for {artifact.target}, {info.kind}:{info.index} is {info.target}; compile it for {info.target}",
        )


def target_runs(target: str, device: str) -> bool:
    """Whether code for `target` runs on a device of target `device`.

    PTX for an architecture without suffix runs on every later one; everything else runs on its own only.
    """
    if target == device:
        return True
    wanted, have = re.fullmatch(r"sm_(\d+)([af]?)", target), re.fullmatch(r"sm_(\d+)", device)
    if not wanted or not have:
        return False
    return int(wanted[1]) == int(have[1]) if wanted[2] else int(wanted[1]) <= int(have[1])


def check_shape(artifact: Artifact, info: DeviceInfo, shape: Shape) -> None:
    """Raises LaunchError, with both numbers, for a shape the artifact or the device does not allow."""
    name, place = artifact.name, f"{info.kind}:{info.index}"
    threads = shape.threads
    if threads % artifact.warp_size:
        raise LaunchError("EP203", f"{name}: a block of {threads} threads is not a multiple of the warp of {artifact.warp_size}")
    if artifact.max_threads is not None and threads > artifact.max_threads:
        raise LaunchError("EP203", f"{name}: a block of {threads} threads, but it is compiled for at most {artifact.max_threads}")
    if threads > info.max_threads_per_block:
        raise LaunchError("EP203", f"{name}: a block of {threads} threads, {place} takes at most {info.max_threads_per_block}")
    for what, extents, limits in (("block", shape.block, MAX_BLOCK), ("grid", shape.grid, MAX_GRID)):
        for axis, extent, limit in zip("xyz", extents, limits, strict=True):
            if extent > limit:
                raise LaunchError("EP201", f"{name}: {what} extent {axis} is {extent}, the limit is {limit}")
    if artifact.vendor == "amd":
        for axis, blocks, extent in zip("xyz", shape.grid, shape.block, strict=True):
            if blocks * extent > MAX_THREADS_AMD:
                raise LaunchError(
                    "EP201",
                    f"{name}: {blocks} blocks of {extent} threads along {axis} are {blocks * extent}, the limit is {MAX_THREADS_AMD}",
                )
    if artifact.blocks is not None and shape.blocks != artifact.blocks:
        raise LaunchError("EP204", f"{name}: a grid of {shape.blocks} blocks, but it is compiled for grids of {artifact.blocks}")
    if shape.shared_bytes < 0:
        raise LaunchError("EP205", f"{name}: shared_bytes is {shape.shared_bytes}; it cannot be negative")
    total = artifact.shared_bytes + shape.shared_bytes
    if total > info.max_shared_bytes:
        raise LaunchError(
            "EP205",
            f"{name}: a block needs {total} bytes of shared memory ({artifact.shared_bytes} its own, {shape.shared_bytes} asked for), "
            f"{place} has {info.max_shared_bytes}",
        )


def check_resident(function: Function, info: DeviceInfo, shape: Shape) -> None:
    """Raises LaunchError when the whole grid cannot be on the device at once, which a grid whose blocks wait for each other needs."""
    limit = function.resident_blocks(shape.threads, shape.shared_bytes)
    if shape.blocks > limit:
        raise LaunchError(
            "EP206",
            f"{function.artifact.name}: a grid of {shape.blocks} blocks whose blocks wait for each other, "
            f"{info.kind}:{info.index} holds {limit} blocks of {shape.threads} threads at once; use a grid of at most {limit}",
        )


@dataclass(frozen=True)
class ForeignStream:
    """A stream of another library, by the driver's handle."""

    handle: int


def stream_of(stream: Any) -> Stream | None:
    """Reads a stream: ours, None for the default one, a raw handle, or an object with `__cuda_stream__` or `cuda_stream` (torch)."""
    if stream is None:
        return None
    # Before `handle`, which other libraries' streams have too and mean an object of the driver by.
    foreign: Any = getattr(stream, "__cuda_stream__", None)
    if foreign is not None:
        version_and_handle: Any = foreign() if callable(foreign) else foreign
        return ForeignStream(int(version_and_handle[1]))
    if hasattr(stream, "cuda_stream"):
        return ForeignStream(int(stream.cuda_stream))
    if hasattr(stream, "handle"):
        return stream
    if hasattr(type(stream), "__index__"):
        return ForeignStream(operator.index(stream))
    raise TypeError(f"{stream!r} is no stream: use device.stream(), a driver handle, or an object with __cuda_stream__ or cuda_stream")


class Prepared:
    """A launch bound and checked once. Calling it launches again with the same arguments; `set` changes some of them first."""

    def __init__(self, device: Device, function: Function, shape: Shape, stream: Stream | None, args: Sequence[Any]) -> None:
        self.artifact = function.artifact
        self.shape = shape
        self.launches = 0
        self._device = device
        self._function = function
        self._stream = stream
        values = self._values = bind(self.artifact.params, args, device)
        # Arguments are held so that their memory outlives the launches.
        self._held = list(args)
        self._places: dict[str, tuple[int, int]] = {}
        slot = 0
        for number, (param, arg) in enumerate(zip(self.artifact.params, args, strict=True)):
            self._places[param.name] = number, slot
            slot += sum(1 for _ in param.slots())
            self._use(param, arg)
        prepare = getattr(function, "prepare", None)
        self._run: PreparedFunction = (
            _Replay(device, function, self._held, shape, stream, values)
            if prepare is None
            else prepare(shape.grid, shape.block, shape.shared_bytes, stream, values)
        )
        # One call less on the path that is repeated.
        self._ready: Callable[[], None] = getattr(self._run, "start", self._run)
        self._start = self._ready

    def __call__(self) -> None:
        """Launches with the arguments as they are. Returns at once. Raises ValueError when memory of one of them was freed."""
        device = self._device
        if device.capturing is not None:
            if self._start is not self._ready:
                self._bind_again()
            _capture(device, self._function, self.shape, self._stream, self._values, tuple(self._held))
        elif device.given_up is not None:
            # Checks whether the device has become usable, and refuses if not.
            self._function.launch(self.shape.grid, self.shape.block, self.shape.shared_bytes, self._stream, self._values)
        else:
            self._start()
        self.launches += 1

    def set(self, **args: Any) -> Prepared:
        """Changes arguments by parameter name for the launches to come, all of them or, when one is refused, none. Returns self."""
        changes: list[tuple[int, int, list[Number], Any]] = []
        for name, arg in args.items():
            if name not in self._places:
                raise ArgumentTypeError("EP207", f"{self.artifact.name} has no parameter {name!r}; it has {', '.join(self._places)}")
            number, slot = self._places[name]
            changes.append((number, slot, list(bind_one(self.artifact.params[number], arg, self._device)), arg))
        for number, slot, values, arg in changes:
            self._held[number] = arg
            if self.artifact.params[number].kind != "scalar":
                self._use(self.artifact.params[number], arg)
            for value in values:
                self._values[slot] = value
                self._run.patch(slot, value)
                slot += 1
        return self

    def _use(self, param: Param, arg: Any) -> None:
        for owner in owners(param, arg):
            owner.users.add(self)

    def memory_freed(self) -> None:
        """Memory that an argument lies in, or one that was since replaced, is gone: the next launch looks."""
        self._start = self._checked

    def _bind_again(self) -> None:
        bind(self.artifact.params, self._held, self._device)
        self._start = self._ready

    def _checked(self) -> None:
        self._bind_again()
        self._start()


def _capture(
    device: Device, function: Function, shape: Shape, stream: Stream | None, values: Sequence[Number], args: Sequence[Any]
) -> None:
    assert device.capturing is not None
    function.launch(shape.grid, shape.block, shape.shared_bytes, stream, values)
    device.capturing.hold(function.artifact, args)
    _hold(device, args, stream)


def _hold(device: Device, args: Sequence[Any], stream: Stream | None) -> None:
    # The simulator starts the kernel later; a GPU has it in the stream, in whose order other libraries use memory again.
    hold = getattr(device, "hold", None)
    if hold is not None:
        hold(args, stream)


class _Replay:
    """A prepared launch for a device that has no faster one. `args` changes with the arguments."""

    def __init__(
        self, device: Device, function: Function, args: list[Any], shape: Shape, stream: Stream | None, values: Sequence[Number]
    ) -> None:
        self._hold = lambda: _hold(device, args, stream)
        self._launch = function.launch
        self._shape = (shape.grid, shape.block, shape.shared_bytes, stream)
        self._values = list(values)

    def patch(self, index: int, value: Number) -> None:
        self._values[index] = value

    def __call__(self) -> None:
        self._launch(*self._shape, list(self._values))
        self._hold()


class Launcher:
    """One artifact loaded on one device.

    Raises LaunchError when the device is of another target.
    """

    def __init__(self, device: Device, artifact: Artifact) -> None:
        check_target(artifact, device.info)
        # Weak: the device keeps its launchers, and a cycle would put off the freeing of both.
        self._device = weakref.ref(device)
        self.function = device.load(artifact)
        self.artifact = artifact
        self._bind = Binder(artifact.params)
        self._holds = hasattr(device, "hold")
        self._shapes: dict[tuple[Any, ...], Shape] = {}
        self._launches = 0
        self._prepared: weakref.WeakSet[Prepared] = weakref.WeakSet()

    @property
    def device(self) -> Device:
        device = self._device()
        if device is None:
            raise RuntimeError(f"the device {self.artifact.name} was loaded on is gone; open it again")
        return device

    @property
    def launches(self) -> int:
        """How often it was launched, by prepared launches that are still held too."""
        return self._launches + sum(one.launches for one in list(self._prepared))

    def shape(self, grid: int | Sequence[int], block: int | Sequence[int], shared_bytes: int = 0, cooperative: bool = False) -> Shape:
        """The launch's shape, checked. `cooperative` also refuses a grid that cannot be resident as a whole."""
        if type(shared_bytes) is not int:
            shared_bytes = _whole(shared_bytes)
        key = (
            grid if type(grid) is int else dim3(grid, "grid"),
            block if type(block) is int else dim3(block, "block"),
            shared_bytes,
            cooperative,
        )
        found = self._shapes.get(key)
        if found is None:
            found = Shape(dim3(grid, "grid"), dim3(block, "block"), shared_bytes)
            check_shape(self.artifact, self.device.info, found)
            if cooperative:
                check_resident(self.function, self.device.info, found)
            self._shapes[key] = found
        return found

    def launch(
        self,
        *,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        args: Sequence[Any] = (),
        shared_bytes: int = 0,
        stream: Any = None,
        cooperative: bool = False,
    ) -> None:
        """Starts the kernel and returns at once. Nothing is started when an argument or the shape is refused."""
        shape = self.shape(grid, block, shared_bytes, cooperative)
        device = self.device
        values = self._bind(args, device)
        where = stream_of(stream)
        if device.capturing is not None:
            _capture(device, self.function, shape, where, values, tuple(args))
        else:
            self.function.launch(shape.grid, shape.block, shape.shared_bytes, where, values)
            if self._holds:
                _hold(device, args, where)
        self._launches += 1

    def prepare(
        self,
        *,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        args: Sequence[Any] = (),
        shared_bytes: int = 0,
        stream: Any = None,
        cooperative: bool = False,
    ) -> Prepared:
        """A launch to be repeated, bound and checked now."""
        shape = self.shape(grid, block, shared_bytes, cooperative)
        made = Prepared(self.device, self.function, shape, stream_of(stream), args)
        self._prepared.add(made)
        return made


def _whole(shared_bytes: Any) -> int:
    try:
        return operator.index(shared_bytes)
    except TypeError:
        kind = type(shared_bytes).__name__
        raise ArgumentTypeError("EP205", f"shared_bytes is a whole number of bytes, got {shared_bytes!r} ({kind})") from None


def device_of(device_or_rank: Any) -> Device:
    """A device, or that of a rank. Raises TypeError for anything else."""
    device = getattr(device_or_rank, "device", device_or_rank)
    if not hasattr(device, "info"):
        raise TypeError(
            f"a launch takes a rank or a device as its first argument, got {device_or_rank!r} ({type(device_or_rank).__name__}); "
            "pass the rank that main was given, or ep.open_device(...)"
        )
    return device


def launcher(device_or_rank: Any, artifact: Artifact) -> Launcher:
    """The launcher of an artifact on a device, or on a rank's device; made on first use."""
    device = device_of(device_or_rank)
    # Kept by the device, so that both go together. Keyed by identity: the launcher keeps the artifact, so no other can take its id.
    known: dict[int, Launcher] = device.__dict__.setdefault("_launchers", {})
    found = known.get(id(artifact))
    if found is None:
        found = known[id(artifact)] = Launcher(device, artifact)
    return found
