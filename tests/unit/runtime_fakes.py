"""A device for tests that is nothing but host memory: no kernel ever runs on it. Other processes can map its memory: it lies in files."""

from __future__ import annotations

import atexit
import ctypes
import mmap
import os
import shutil
import tempfile
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from epdsl_runtime import context_layout as layout
from epdsl_runtime.array import free_dropped
from epdsl_runtime.artifact import Artifact
from epdsl_runtime.faults import Diagnostics
from epdsl_runtime.protocol import DeviceInfo

INFO = DeviceInfo(
    kind="sim",
    index=0,
    name="host memory",
    target="sim:nvidia",
    vendor="nvidia",
    warp_size=32,
    num_sms=4,
    max_threads_per_block=1024,
    max_shared_bytes=65536,
    total_memory=1 << 30,
)


# The first process to come here owns the folder; those it starts use the same.
if "EPDSL_FAKE_DIR" not in os.environ:
    os.environ["EPDSL_FAKE_DIR"] = tempfile.mkdtemp(prefix="epdsl-fake-")
    atexit.register(shutil.rmtree, os.environ["EPDSL_FAKE_DIR"], ignore_errors=True)


@dataclass
class FakeFunction:
    artifact: Artifact
    launches: list[tuple[Any, ...]]
    blocks_per_sm: int = 2

    def resident_blocks(self, block_threads: int, shared_bytes: int) -> int:
        return self.blocks_per_sm * INFO.num_sms

    def launch(self, grid: Any, block: Any, shared_bytes: int, stream: Any, values: Sequence[int | float]) -> None:
        self.launches.append((grid, block, shared_bytes, stream, list(values)))


class FakeDevice:
    """Follows protocol.Device. `events` records what was freed, opened and closed, in order."""

    def __init__(self, index: int = 0, **changes: Any) -> None:
        self.info = replace(INFO, index=index, **changes)
        self.diagnostics = Diagnostics()
        self.context_words = np.zeros(layout.CONTEXT_WORDS, np.uint64)
        self.context_address = self.context_words.ctypes.data
        self.events: list[tuple[str, Any]] = []
        self.launches: list[tuple[Any, ...]] = []
        self._maps: dict[int, tuple[mmap.mmap, str, int]] = {}
        self.fail_allocations = False
        self.capturing: Any = None
        self.given_up: Any = None
        self.graphs: set[Any] = set()
        self.share_kinds: tuple[str, ...] = ("file",)
        self.broken_kinds: dict[str, str] = {}
        self.closed = False

    def _map(self, path: str, nbytes: int) -> int:
        with open(path, "r+b") as file:
            memory = mmap.mmap(file.fileno(), nbytes)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._maps[address] = (memory, path, nbytes)
        return address

    def allocate(self, nbytes: int) -> int:
        if self.fail_allocations:
            raise MemoryError("the fake has no memory left")
        path = os.path.join(os.environ["EPDSL_FAKE_DIR"], uuid.uuid4().hex)
        with open(path, "wb") as file:
            file.write(b"\xab" * nbytes)
        return self._map(path, nbytes)

    def free(self, address: int) -> None:
        self.events.append(("free", address))
        os.unlink(self._maps.pop(address)[1])

    def memset(self, address: int, byte: int, nbytes: int, stream: Any = None) -> None:
        ctypes.memset(address, byte, nbytes)

    def upload(self, address: int, source: np.ndarray, stream: Any = None) -> None:
        ctypes.memmove(address, source.ctypes.data, source.nbytes)

    def download(self, target: np.ndarray, address: int, stream: Any = None) -> None:
        ctypes.memmove(target.ctypes.data, address, target.nbytes)

    def copy(self, target: int, source: int, nbytes: int, stream: Any = None) -> None:
        ctypes.memmove(target, source, nbytes)

    def stream_handle(self, stream: Any) -> int:
        return 0

    def stream(self) -> Any:
        raise NotImplementedError

    def event(self) -> Any:
        raise NotImplementedError

    def load(self, artifact: Artifact) -> FakeFunction:
        self.diagnostics.register(artifact)
        return FakeFunction(artifact, self.launches)

    def synchronize(self, stream: Any = None) -> None:
        self.diagnostics.check(self.context_words, idle=stream is None)
        free_dropped(self)

    def waiting(self) -> list[str]:
        return self.diagnostics.peek(self.context_words)

    def allocate_shared(self, nbytes: int, kind: str) -> tuple[int, int]:
        if kind in self.broken_kinds:
            raise RuntimeError(self.broken_kinds[kind])
        return self.allocate(nbytes), nbytes

    def export_foreign(self, address: int, nbytes: int) -> Any:
        return self.export_memory(address)

    def withdraw_foreign(self, address: int) -> None:
        self.events.append(("withdraw", address))

    def begin_capture(self, graph: Any) -> None:
        self.capturing = graph

    def end_capture(self, keep: bool) -> Any:
        self.capturing = None

    def export_memory(self, address: int) -> Any:
        return self._maps[address][1:]

    def open_memory(self, handle: Any) -> int:
        address = self._map(*handle)
        self.events.append(("open", address))
        return address

    def close_memory(self, address: int) -> None:
        self.events.append(("close", address))
        del self._maps[address]

    def close(self) -> None:
        self.closed = True
        for address, (_, path, _) in list(self._maps.items()):
            if os.path.exists(path):
                os.unlink(path)
            del self._maps[address]
