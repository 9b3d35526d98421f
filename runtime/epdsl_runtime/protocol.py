"""What every device class offers: `sim`, `cuda` and `hip` behind one protocol."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from .artifact import Artifact

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from .faults import Diagnostics, KernelFault
    from .graph import Graph, Player

Dim3 = tuple[int, int, int]


@dataclass(frozen=True)
class DeviceInfo:
    """What a kernel author may ask of a device.

    kind        "sim", "cuda" or "hip"
    target      what to compile for: "sim:nvidia", "sm_90", "gfx942", ...
    vendor      "nvidia" or "amd"
    uuid        of the physical GPU, whatever its number in this process; empty on the simulator
    """

    kind: str
    index: int
    name: str
    target: str
    vendor: str
    warp_size: int
    num_sms: int
    max_threads_per_block: int
    max_shared_bytes: int
    total_memory: int
    uuid: str = ""


class Stream(Protocol):
    """An ordered queue of work. `handle` is what the driver calls it (0 for the default stream)."""

    @property
    def handle(self) -> int: ...


class Event(Protocol):
    def record(self, stream: Stream | None = None) -> None: ...
    def synchronize(self) -> None: ...
    def elapsed_ms(self, earlier: Event) -> float: ...


class Function(Protocol):
    """A kernel loaded on a device."""

    @property
    def artifact(self) -> Artifact: ...

    def resident_blocks(self, block_threads: int, shared_bytes: int) -> int:
        """How many blocks of this kernel the whole device can hold at once."""
        ...

    def launch(self, grid: Dim3, block: Dim3, shared_bytes: int, stream: Stream | None, values: Sequence[int | float]) -> None:
        """Starts the kernel. `values` holds one number per slot of the artifact, without the hidden context.
        `shared_bytes` is beyond the artifact's own. Returns at once."""
        ...


class Device(Protocol):
    """Memory, streams, modules and launches of one device. All addresses are device addresses as integers."""

    @property
    def info(self) -> DeviceInfo: ...
    @property
    def context_address(self) -> int:
        """Device address of this device's context block (see context_layout)."""
        ...

    @property
    def context_words(self) -> NDArray[np.uint64]:
        """The same block as the host sees it."""
        ...

    @property
    def diagnostics(self) -> Diagnostics:
        """Reads the context block; knows the kernels `load` was given and the buffers that have names."""
        ...

    def allocate(self, nbytes: int) -> int: ...
    def free(self, address: int) -> None: ...
    def memset(self, address: int, byte: int, nbytes: int, stream: Stream | None = None) -> None: ...
    def upload(self, address: int, source: NDArray[Any], stream: Stream | None = None) -> None:
        """Copies host to device; the source may be reused on return."""
        ...

    def download(self, target: NDArray[Any], address: int, stream: Stream | None = None) -> None:
        """Copies device to host after everything before it in `stream`; done on return."""
        ...

    def copy(self, target: int, source: int, nbytes: int, stream: Stream | None = None) -> None: ...
    def stream(self) -> Stream: ...
    def event(self) -> Event: ...
    def load(self, artifact: Artifact) -> Function: ...
    def synchronize(self, stream: Stream | None = None) -> None:
        """Waits for the stream, or for the whole device. Raises what the kernels reported (see faults)."""
        ...

    def waiting(self) -> list[str]:
        """What its kernels wait for now, as far as can be told, in lines (see `health.Activity`). Never waits long; from any thread."""
        ...

    @property
    def given_up(self) -> KernelFault | None:
        """What a kernel reported that does not end: while it runs, calls are refused with this."""
        ...

    @property
    def capturing(self) -> Graph | None:
        """The graph that is captured now (see graph)."""
        ...

    @property
    def graphs(self) -> set[Graph]:
        """Graphs that can be replayed and were not closed."""
        ...

    def begin_capture(self, graph: Graph) -> None: ...
    def end_capture(self, keep: bool) -> Player | None: ...
    @property
    def share_kinds(self) -> tuple[str, ...]:
        """The kinds of memory that other ranks can reach, best first (see sharing)."""
        ...

    def allocate_shared(self, nbytes: int, kind: str) -> tuple[int, int]:
        """Memory of such a kind: its address and its bytes, at least `nbytes`. `free` frees it."""
        ...

    def export_memory(self, address: int) -> Any:
        """A picklable handle by which another rank can open memory that `allocate` or `allocate_shared` returned."""
        ...

    def export_foreign(self, address: int, nbytes: int) -> Any:
        """The same for memory of another library, until `withdraw_foreign`. Raises SharingError when it cannot be shared."""
        ...

    def withdraw_foreign(self, address: int) -> None: ...

    def open_memory(self, handle: Any) -> int: ...
    def close_memory(self, address: int) -> None: ...
    def close(self) -> None: ...
