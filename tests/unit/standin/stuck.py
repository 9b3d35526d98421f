"""A kernel of the stand-in driver that reports a fault and never ends: python stuck.py cuda|hip calls|exit|spawn. Prints what it saw."""

from __future__ import annotations

import os
import sys
import time
from functools import cache
from pathlib import Path

import numpy as np
from conformance import KIND, TARGET, VENDOR, WARP, opened, raised
from epdsl_runtime import bounded_wait
from epdsl_runtime.array import allocate_array
from epdsl_runtime.artifact import Artifact, Param, Site
from epdsl_runtime.bootstrap import RankFailed
from epdsl_runtime.faults import PeerTimeout
from epdsl_runtime.graph import capture
from epdsl_runtime.launch import launcher
from epdsl_runtime.spawn import spawn


@cache
def kernel(name: str) -> Artifact:
    """Its only parameter is the site word of the fault it reports; 0 for none."""
    site = Site("wait", "a.py", 12, 0, name, "v == 1", ("u32",))
    return Artifact(name, TARGET, VENDOR, WARP, (Param("site", "scalar", "u64", 8),), 0, (site,), f"KERNEL {name} 8 8 \n".encode())


def start(device, name: str, stream=None) -> None:
    made = kernel(name)
    launcher(device, made).launch(grid=1, block=WARP, args=(made.site_tag << 32,), stream=stream)


def timed(call) -> tuple[str, float]:
    begun = time.monotonic()
    return raised(PeerTimeout, call), time.monotonic() - begun


def calls() -> None:
    """Every call ends: the first with the report, those after it at once, and all work again when the kernel has ended."""
    device = opened(1)
    array = allocate_array(device, (8,), "f32").zero()
    stream, event = device.stream(), device.event()
    start(device, "slow", stream)
    begun = time.monotonic()
    device.synchronize()
    assert 0.03 < time.monotonic() - begun < 0.5
    start(device, "slow", stream)
    event.record(stream)
    event.synchronize()
    stream.synchronize()
    with capture(device) as graph:
        start(device, "slow")
    prepared = launcher(device, kernel("slow")).prepare(grid=1, block=WARP, args=(0,))
    prepared()
    device.synchronize()

    start(device, "stuck", stream)
    text, seconds = timed(device.synchronize)
    assert 1.0 <= seconds < 2.0, seconds
    for part in ("kernel stuck, a.py:12, block 2 thread 3", "still runs 1 s after the last record (of block 2 thread 3)", "is refused"):
        assert part.replace("is refused", "are refused with this error") in text, text
    host = np.zeros(8, np.float32)
    refused = {
        "synchronize": device.synchronize,
        "a stream": stream.synchronize,
        "an event": event.synchronize,
        "record": event.record,
        "numpy": array.numpy,
        "upload": lambda: array.copy_from(host),
        "download": lambda: device.download(host, array.address),
        "memset": array.zero,
        "copy": lambda: device.copy(array.address, array.address + 16, 16),
        "allocate": lambda: allocate_array(device, (8,), "f32"),
        "shared": lambda: device.allocate_shared(64, "fd"),
        "free": array.free,
        "launch": lambda: start(device, "slow"),
        "prepared": prepared,
        "replay": graph.replay,
        "load": lambda: launcher(device, kernel("copy")),
        "close": device.close,
    }
    for name, call in refused.items():
        again, seconds = timed(call)
        assert again == text and seconds < 0.1, (name, seconds, again)
    (Path(os.environ["STANDIN_DIR"]) / f"end.{os.getpid()}").touch()
    device.synchronize()
    array.copy_from(host + 7)
    prepared()
    assert array.numpy().tolist() == [7.0] * 8
    # The records were raised before, as of a kernel that has ended: another that does not end is given up all the same, if later.
    bounded_wait.OLD_GRACE_SECONDS = 1.5
    other = device.stream()
    start(device, "fault", other)
    assert "kernel fault" in raised(PeerTimeout, lambda: device.synchronize(other))
    (Path(os.environ["STANDIN_DIR"]) / f"end.{os.getpid()}").unlink()
    launcher(device, kernel("stuck")).launch(grid=1, block=WARP, args=(0,), stream=stream)
    text, seconds = timed(device.synchronize)
    assert 1.5 <= seconds < 2.5 and "kernel fault" in text and "still runs 1.5 s after this was raised before" in text, (seconds, text)
    (Path(os.environ["STANDIN_DIR"]) / f"end.{os.getpid()}").touch()
    device.synchronize()
    other.close()
    # A stream that is not ours may be gone when it is asked about: a thread waits for the whole device instead.
    (Path(os.environ["STANDIN_DIR"]) / f"end.{os.getpid()}").unlink()
    start(device, "stuck", stream.handle)
    device.waits.remove(stream.handle)
    device.waits.used(stream.handle)
    text, seconds = timed(device.synchronize)
    assert 1.0 <= seconds < 2.0 and "still runs" in text
    assert timed(device.close)[0] == text
    (Path(os.environ["STANDIN_DIR"]) / f"end.{os.getpid()}").touch()
    device.waits.add(stream.handle)
    time.sleep(0.1)
    device.synchronize()
    device.close()
    print("every call ended")


def leave() -> None:
    """The process ends although its driver would wait for the kernel."""
    device = opened(0)
    start(device, "stuck")
    print(raised(PeerTimeout, device.synchronize).splitlines()[0], flush=True)


def get_stuck(rank) -> None:
    if rank.index == 0:
        start(rank.device, "stuck")
    rank.barrier()


def swallow(rank) -> None:
    """Takes no notice of the fault."""
    start(rank.device, "stuck")
    raised(PeerTimeout, rank.synchronize)


def spawned() -> None:
    for main in (get_stuck, swallow):
        begun = time.monotonic()
        try:
            spawn(main, 2, device=KIND)
        except RankFailed as error:
            assert "kernel stuck, a.py:12" in error.text and "still runs 1 s after" in error.text, error.text
            print(f"{main.__name__}: rank {error.rank} of {type(error.error).__name__}, {time.monotonic() - begun:.1f} s", file=sys.stderr)
            assert time.monotonic() - begun < 25
    print("the jobs ended")


def cost() -> None:
    """Microseconds of a synchronisation of an idle device with one stream."""
    device = opened(0)
    device.stream()
    rounds = []
    for _ in range(20):
        begun = time.perf_counter()
        for _ in range(500):
            device.synchronize()
        rounds.append((time.perf_counter() - begun) / 500 * 1e6)
    print(f"{min(rounds):.2f} us")


if __name__ == "__main__":
    {"calls": calls, "exit": leave, "spawn": spawned, "cost": cost}[sys.argv[2]]()
