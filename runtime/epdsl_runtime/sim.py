"""The simulated device: every thread of every rank of a job on one host thread, asynchronous like a GPU, replayable by its seed."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import context_layout, sim_code
from .array import free_dropped
from .artifact import Artifact, Slot
from .binding import Number
from .env import SEED
from .faults import Diagnostics, KernelFault
from .graph import CaptureError, Graph, Player, refuse_in_capture
from .launch import LaunchError
from .parameters import ParameterBlock
from .protocol import DeviceInfo, Dim3
from .sim_engine import Deadlock, Engine, Launch, OutsideError, TrapError
from .sim_layout import STATUS_STUCK
from .sim_memory import Memory

__all__ = ["Deadlock", "OutsideError", "SimDevice", "SimEngine", "SimEvent", "SimFunction", "SimStream", "TrapError"]

# What a simulated device looks like: an H200 and an MI300X.
_MODELS = {
    "nvidia": ("simulated NVIDIA device", 32, 132, 227 * 1024, 2048, 32),
    "amd": ("simulated AMD device", 64, 304, 64 * 1024, 2048, 32),
}


_LOOK_SECONDS = 0.5


class SimStream:
    """An ordered queue of launches and host operations."""

    def __init__(self, device: SimDevice, handle: int) -> None:
        self.device = device
        self.handle = handle
        self.queue: deque[Launch | Callable[[], None]] = deque()

    def synchronize(self) -> None:
        self.device.synchronize(self)

    def close(self) -> None:
        """Nothing to give back."""


class SimEvent:
    """A moment in a stream, by the host's clock."""

    def __init__(self, device: SimDevice) -> None:
        self._device = device
        self._seconds: float | None = None
        self._stream: SimStream | None = None

    def record(self, stream: Any = None) -> None:
        self._seconds = None
        self._stream = self._device.stream_of(stream)
        self._device.enqueue(self._stream, self._stamp)

    def _stamp(self) -> None:
        self._seconds = time.perf_counter()

    def synchronize(self) -> None:
        refuse_in_capture(self._device, "a wait for an event")
        if self._stream is not None:
            self._device.wait(lambda: self._seconds is not None, "an event")

    def elapsed_ms(self, earlier: Any) -> float:
        """Milliseconds from `earlier` to this event. Waits until both have happened; raises RuntimeError for one never recorded."""
        self.synchronize()
        earlier.synchronize()
        if self._seconds is None or earlier._seconds is None:
            raise RuntimeError("elapsed_ms needs two recorded events; call event.record() first")
        return (self._seconds - earlier._seconds) * 1e3

    def close(self) -> None:
        """Nothing to give back."""


class SimFunction:
    """A kernel loaded on a simulated device."""

    def __init__(self, device: SimDevice, artifact: Artifact) -> None:
        self.device = device
        self._artifact = artifact
        self._parameters = ParameterBlock((*artifact.slots, Slot("context", "u64", 8)))

    @property
    def artifact(self) -> Artifact:
        return self._artifact

    def resident_blocks(self, block_threads: int, shared_bytes: int) -> int:
        return self.device.info.num_sms * self.blocks_per_sm(block_threads, shared_bytes)

    def blocks_per_sm(self, block_threads: int, shared_bytes: int) -> int:
        _, _, _, shared_limit, threads, blocks = _MODELS[self.device.info.vendor]
        total = self._artifact.shared_bytes + shared_bytes
        return min(threads // block_threads, blocks, shared_limit // total if total else blocks)

    def launch(self, grid: Dim3, block: Dim3, shared_bytes: int, stream: Any, values: Sequence[Number]) -> None:
        parameters = self._parameters.another()
        parameters.fill([*values, self.device.context_address])
        threads = block[0] * block[1] * block[2]
        launch = Launch(
            device=self.device,
            artifact=self._artifact,
            grid=grid,
            block=block,
            shared_bytes=self._artifact.shared_bytes + shared_bytes,
            parameters=parameters,
            resident=self.resident_blocks(threads, shared_bytes),
            blocks_per_sm=self.blocks_per_sm(threads, shared_bytes),
        )
        self.device.enqueue(self.device.stream_of(stream), launch)


class SimDevice:
    """See `protocol.Device`. Devices of one job share an engine; one opened alone has its own."""

    def __init__(self, vendor: str = "nvidia", index: int = 0, engine: SimEngine | None = None, num_sms: int | None = None) -> None:
        name, warp_size, sms, shared, _, _ = _MODELS[vendor]
        pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        self._info = DeviceInfo("sim", index, name, f"sim:{vendor}", vendor, warp_size, num_sms or sms, 1024, shared, pages)
        self.engine = engine or SimEngine(1, vendor, devices=[self])
        self.diagnostics = Diagnostics()
        self.memory = Memory()
        self.failure: Exception | None = None
        self.report = ""
        self._looked = 0
        self._context = self.memory.allocate(context_layout.CONTEXT_BYTES)
        self._context_words = self.memory.view(self._context, context_layout.CONTEXT_BYTES).view(np.uint64)
        self._context_words[:] = 0
        self.default = SimStream(self, 0)
        self.streams = [self.default]
        self._functions: dict[int, SimFunction] = {}
        self.capturing: Graph | None = None
        # The simulator ends every kernel.
        self.given_up: KernelFault | None = None
        self.graphs: set[Graph] = set()
        self._closed = False
        # What a capture records is a stream that the machine does not know.
        self._recording = SimStream(self, -1)

    def __repr__(self) -> str:
        return f"<sim:{self._info.vendor} device {self._info.index}>"

    @property
    def info(self) -> DeviceInfo:
        return self._info

    @property
    def context_address(self) -> int:
        return self._context

    @property
    def context_words(self) -> NDArray[np.uint64]:
        return self._context_words

    # ---- queues

    def _refuse_when_closed(self) -> None:
        if self._closed:
            raise RuntimeError(f"{self!r} was closed; open another")

    def stream_of(self, stream: Any) -> SimStream:
        self._refuse_when_closed()
        if self.capturing is not None:
            if stream is not None:
                raise CaptureError("EP210", f"work for another stream on {self!r} while a graph is captured there; leave the stream out")
            return self._recording
        if stream is None:
            return self.default
        if not isinstance(stream, SimStream) or stream.device is not self:
            raise TypeError(f"{stream!r} is no stream of {self!r}; use device.stream()")
        return stream

    def enqueue(self, stream: SimStream, work: Launch | Callable[[], None]) -> None:
        with self.engine.lock:
            stream.queue.append(work)

    def hold(self, args: Sequence[Any], stream: Any = None) -> None:
        """Keeps what the launch just made was given until it is done: the memory of other libraries is used as it is."""
        with self.engine.lock:
            queue = self.stream_of(stream).queue
            if queue and isinstance(last := queue[-1], Launch):
                last.given = tuple(args)

    def idle(self, stream: SimStream | None = None) -> bool:
        return not any(s.queue for s in (self.streams if stream is None else (stream,)))

    def wait(self, predicate: Callable[[], bool], what: str) -> None:
        self.engine.block(predicate, f"device {self._info.index}: {what}")

    # ---- the protocol

    def begin_capture(self, graph: Graph) -> None:
        self.capturing = graph

    def end_capture(self, keep: bool) -> Player | None:
        self.capturing = None
        work = list(self._recording.queue) if keep else []
        self._recording.queue.clear()

        def start(stream: Any) -> None:
            where = self.stream_of(stream)
            for one in work:
                self.enqueue(where, one.again() if isinstance(one, Launch) else one)

        return Player(start, work.clear)

    def allocate(self, nbytes: int) -> int:
        refuse_in_capture(self, f"an allocation of {nbytes} bytes", "make the array before the capture and pass it")
        if nbytes <= 0:
            raise ValueError(f"an allocation of {nbytes} bytes; it must be at least 1")
        self._refuse_when_closed()
        return self.memory.allocate(nbytes)

    def free(self, address: int) -> None:
        refuse_in_capture(self, "a free")
        self.wait(self.idle, "to free memory")
        self.memory.free(address)
        self.diagnostics.forget_buffer(address)

    def memset(self, address: int, byte: int, nbytes: int, stream: Any = None) -> None:
        self.enqueue(self.stream_of(stream), lambda: self.memory.fill(address, byte, nbytes))

    def upload(self, address: int, source: NDArray[Any], stream: Any = None) -> None:
        if not source.flags.c_contiguous:
            raise ValueError("an upload takes a C-contiguous array; pass np.ascontiguousarray(source)")
        refuse_in_capture(self, f"an upload of {source.nbytes} bytes", "put the values into device memory before the capture or a replay")
        held = source.copy()
        self.enqueue(self.stream_of(stream), lambda: self.memory.write(address, held))

    def download(self, target: NDArray[Any], address: int, stream: Any = None) -> None:
        if not target.flags.c_contiguous or not target.flags.writeable:
            raise ValueError("a download takes a C-contiguous, writable array")
        refuse_in_capture(self, f"a download of {target.nbytes} bytes", "read the result after a replay")
        self.enqueue(self.stream_of(stream), lambda: self.memory.read(target, address))
        where = self.stream_of(stream)
        self.wait(lambda: self.idle(where), "to copy to the host")

    def copy(self, target: int, source: int, nbytes: int, stream: Any = None) -> None:
        self.enqueue(self.stream_of(stream), lambda: self.memory.move(target, source, nbytes))

    def stream(self) -> SimStream:
        made = SimStream(self, len(self.streams))
        self.streams.append(made)
        return made

    def event(self) -> SimEvent:
        return SimEvent(self)

    def load(self, artifact: Artifact) -> SimFunction:
        found = self._functions.get(id(artifact))
        if found is None:
            refuse_in_capture(self, f"the loading of {artifact.name}", "launch the kernel once before the capture")
            try:
                sim_code.check(artifact.binary)
            except ValueError as error:
                raise LaunchError("EP202", f"{artifact.name} cannot run on {self!r}: {error}") from None
            found = self._functions[id(artifact)] = SimFunction(self, artifact)
            self.diagnostics.register(artifact)
        return found

    def synchronize(self, stream: Any = None) -> None:
        """Waits for the stream, or the whole device, then raises what the kernels reported, a deadlock or a trap."""
        refuse_in_capture(self, "a synchronisation")
        self._refuse_when_closed()
        where = None if stream is None else self.stream_of(stream)
        self.wait(lambda: self.idle(where), "to finish its kernels")
        failure, self.failure = self.failure, None
        report, self.report = self.report, ""
        try:
            self.diagnostics.check(self._context_words, idle=where is None, detail=report)
        except KernelFault as fault:
            if not isinstance(failure, Deadlock):
                raise fault from failure
            # It comes of the fault: a thread that gave up does not come to the others' barrier.
            left = "\n".join(failure.message.splitlines()[1:])
            fault.detail = f"{fault.detail}\n  after that nothing could go on, so the kernel was ended:\n{left}"
            raise
        if failure is not None:
            raise failure
        self._look_outside()
        if where is None:
            free_dropped(self)

    def _look_outside(self) -> None:
        """Raises OutsideError when a kernel that has ended since the last look wrote beside an array of this device."""
        if self._looked == self.engine.ended:
            return
        self._looked = self.engine.ended
        found = self.memory.written_outside()
        if found is not None:
            address, nbytes, byte = found
            name = self.diagnostics.buffers.get(address, (0, f"an array of rank {self.info.index}"))[1]
            raise OutsideError(
                "EP306",
                f"{name} has {nbytes} bytes, and its byte {byte} was written: an index of a kernel is out of range\n"
                "  write: @ep.scenario(ranks=...) above the function given to ep.spawn; `epdsl check FILE.py` then says which line it is",
            )

    def waiting(self) -> list[str]:
        if not self.engine.lock.acquire(timeout=_LOOK_SECONDS):
            return ["its kernels are running"]
        try:
            queued = [[item for item in list(stream.queue) if isinstance(item, Launch) and not item.ended] for stream in self.streams]
            launches = [first for first, *_ in filter(None, queued)]
            started = [launch for launch in launches if launch.started]
            lines = [line.removeprefix("  ") for line in self.engine.describe(started, STATUS_STUCK).splitlines()[1:]]
            why = "has not begun; it runs while every rank of this process waits"
            held = [f"rank {self.info.index} {launch.artifact.name}: {why}" for launch in launches if not launch.started]
            return [*lines, *held]
        finally:
            self.engine.lock.release()

    @property
    def share_kinds(self) -> tuple[str, ...]:
        return ("process",)

    def allocate_shared(self, nbytes: int, kind: str) -> tuple[int, int]:
        room = -(-nbytes // 16) * 16
        return self.allocate(room), room

    def export_memory(self, address: int) -> tuple[int, int]:
        if not self.memory.owns(address):
            raise ValueError(f"0x{address:x} is no address that allocate returned on {self!r}")
        return id(self.engine), address

    def export_foreign(self, address: int, nbytes: int) -> tuple[int, int]:
        return id(self.engine), address

    def withdraw_foreign(self, address: int) -> None:
        """Ranks of a job share the process, so nothing was handed out."""

    def open_memory(self, handle: Any) -> int:
        engine, address = handle
        if engine != id(self.engine):
            raise ValueError("the handle is of another simulated machine; ranks of one job share memory")
        return address

    def close_memory(self, address: int) -> None:
        """Ranks of a job share the process, so nothing was mapped."""

    def close(self) -> None:
        """Frees everything. What is asked of the device from then on is refused."""
        if self._closed:
            return
        self.wait(self.idle, "to close")
        self._closed = True
        for graph in list(self.graphs):
            graph.close()
        self.memory.clear()
        self._functions.clear()


class SimEngine(Engine):
    """The machine of one job: its devices, and the scheduler that runs their kernels while every rank waits.

    ranks    how many host threads use it; kernels run when all of them wait
    seed     of the schedule: the same seed and program give the same interleaving; None for that of EPDSL_SEED
    """

    def __init__(
        self,
        ranks: int,
        vendor: str = "nvidia",
        seed: int | None = None,
        devices: list[SimDevice] | None = None,
        num_sms: int | None = None,
    ) -> None:
        super().__init__(ranks, SEED.get() if seed is None else seed)
        self.devices: list[Any] = devices if devices is not None else [SimDevice(vendor, i, self, num_sms) for i in range(ranks)]

    def device(self, index: int) -> SimDevice:
        return self.devices[index]

    def rank_done(self, index: int, error: BaseException | None = None) -> None:
        """A rank's thread has ended: the others no longer wait for it before kernels run."""
        with self.lock:
            self.live -= 1
            self.lock.notify_all()
