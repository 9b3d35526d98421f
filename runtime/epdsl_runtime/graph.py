"""Launches captured once and started together again and again: a CUDA or HIP graph, or a recorded list on the simulator.

    with rank.capture() as graph:
        handle = layer.dispatch(x, topk_idx, topk_weights)
        out = layer.combine(y, handle)
    x.copy_from(...)          # other tokens and routing, in the same memory
    graph.replay()

A captured launch keeps its arguments' addresses and numbers; what it reads at those addresses is read at every replay. A row of a
routing whose ids are all -1 is no token, so a graph captured for n tokens serves every smaller number. Under `torch.cuda.graph` launches
go to PyTorch's current stream and are captured by it in the same way; nothing of this module is needed then.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .binding import owners
from .errors import CodedError
from .launch import stream_of

if TYPE_CHECKING:
    from .array import Allocation, DeviceArray
    from .artifact import Artifact
    from .protocol import Device, Stream


class CaptureError(CodedError, RuntimeError):
    """Something that cannot be part of a graph was asked for while one was captured, or a graph that cannot be replayed was."""


@dataclass(frozen=True)
class Player:
    """What a device made of a capture: `start(stream)` starts all of it, `close()` gives it back."""

    start: Callable[[Stream | None], None]
    close: Callable[[], None]


class Graph:
    """Launches captured on one device.

    kernels  how many launches it holds
    """

    def __init__(self, device: Device) -> None:
        self.kernels = 0
        self._device = device
        self._player: Player | None = None
        self._state = "being captured"
        # Memory the launches use lives as long as the graph.
        self._held: list[Any] = []
        self._memory: dict[int, Allocation] = {}

    def __repr__(self) -> str:
        return f"<graph of {self.kernels} launches on {self._device.info.kind}:{self._device.info.index}, {self._state}>"

    def hold(self, artifact: Artifact, args: Sequence[Any]) -> None:
        """Counts a launch and keeps what its arguments point to."""
        self.kernels += 1
        self._held.append(args)
        for param, arg in zip(artifact.params, args, strict=True):
            for owner in owners(param, arg):
                self._memory[id(owner)] = owner

    def keep(self, array: DeviceArray) -> None:
        """Keeps what something captured besides a launch works on."""
        self._held.append(array)
        if array._owner is not None:
            self._memory[id(array._owner)] = array._owner

    def replay(self, stream: Any = None) -> None:
        """Starts the launches, in order, and returns at once.

        stream  as for a launch; by default the one a launch without a stream would go to

        Raises CaptureError while it is captured, when the capture failed, after `close`, when memory it uses was freed, and while another
        graph is captured.
        """
        if self._player is None:
            raise CaptureError("EP211", f"{self!r} cannot be replayed")
        refuse_in_capture(self._device, "the replay of a graph", "launch its kernels in the capture too, or replay both in turn")
        freed = [owner for owner in self._memory.values() if not owner.alive]
        if freed:
            text = ", ".join(f"{owner.nbytes} bytes at 0x{owner.address:x}" for owner in freed[:3])
            raise CaptureError(
                "EP211",
                f"{self!r} uses memory that was freed since its capture ({text}; {len(freed)} allocations); "
                "keep the buffers until the graph is closed, or capture again",
            )
        self._player.start(stream_of(stream))

    def close(self) -> None:
        """Gives the graph back. Replays under way end first on the device."""
        if self._player is not None:
            self._player.close()
            self._player = None
            self._state = "closed"
            self._held.clear()
            self._memory.clear()
            self._device.graphs.discard(self)


@contextmanager
def capture(device: Device) -> Iterator[Graph]:
    """Captures what is launched on the device without naming a stream, until the block ends. Nothing of it runs.

    Raises CaptureError at what no graph can hold (an allocation, a copy to or from the host, a synchronisation, a kernel that is not
    loaded, another stream), when a capture is under way, and at the end when nothing was launched.
    """
    refuse_in_capture(device, "another capture")
    graph = Graph(device)
    device.begin_capture(graph)
    try:
        yield graph
        if not graph.kernels:
            raise CaptureError("EP210", f"nothing was launched on {device!r} in the captured block, so there is nothing to replay")
    except BaseException:
        graph._state = "its capture failed"
        device.end_capture(keep=False)
        raise
    try:
        graph._player = device.end_capture(keep=True)
    except BaseException:
        graph._state = "its capture failed"
        raise
    graph._state = "ready"
    device.graphs.add(graph)


def is_captured(device: Device) -> bool:
    """Whether what is launched on the device without a stream is captured, by us or by PyTorch."""
    return device.capturing is not None or torch_is_capturing(device)


def refuse_in_capture(device: Device, what: str, instead: str = "do it before the capture") -> None:
    """Raises CaptureError when a graph is captured on the device, by us or by PyTorch."""
    if is_captured(device):
        raise CaptureError("EP210", f"{what} on {device!r} while a graph is captured there: no graph can hold it; {instead}")


def torch_stream(device: Device) -> int:
    """The driver's handle of PyTorch's current stream on a GPU, 0 (the default stream) when this process does not use PyTorch there."""
    cuda = _torch_cuda()
    return 0 if cuda is None else int(cuda.current_stream(device.info.index).cuda_stream)


def torch_is_capturing(device: Device) -> bool:
    """Whether PyTorch's current stream is being captured."""
    if device.info.kind == "sim":
        return False
    cuda = _torch_cuda()
    return cuda is not None and bool(cuda.is_current_stream_capturing())


def _torch_cuda() -> Any:
    # A PyTorch that is not loaded, still loading, or without a GPU has no current stream.
    cuda: Any = getattr(sys.modules.get("torch"), "cuda", None)
    return cuda if cuda is not None and hasattr(cuda, "is_initialized") and cuda.is_initialized() else None
