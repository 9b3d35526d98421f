"""A wait for several words: their values, the word that a timeout is about, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from epdsl_runtime.array import allocate_array
from epdsl_runtime.sim import SimEngine
from test_lasting_waits import as_on_a_gpu  # noqa: F401  # pyright: ignore[reportUnusedImport]

import epdsl as ep


@ep.kernel
def sums(words: ep.Ptr[ep.u64], out: ep.Ptr[ep.u64], first: ep.i32, timeout: ep.i64):
    """Threads 64 to 66 store 100 to 102, in an order that begins with `first`; the others wait for all three."""
    t = ep.thread_idx.x
    if t < 64:
        a, b, c = ep.wait((words, words + 1, words + 2), until=lambda v: v >= 100, order=ep.RELAXED, scope=ep.DEVICE, timeout_ns=timeout)
        out[t] = a * 10_000 + b * 100 + c
    elif t == 64:
        for i in range(3):
            at = (first + i) % 3
            ep.store(words + at, ep.u64(100 + at), order=ep.RELAXED, scope=ep.DEVICE)
            ep.sleep_ns(100_000)


def simulated(device_name: str, seed: int) -> Any:
    if not device_name.startswith("sim"):
        pytest.skip("about the simulator's schedules")
    return SimEngine(1, device_name.partition(":")[2] or "nvidia", seed=seed).device(0)


@pytest.mark.parametrize("first", [0, 1, 2])
@pytest.mark.parametrize("gpu", [False, True])
def test_all_words_are_there(device_name: str, first: int, gpu: bool, request: pytest.FixtureRequest) -> None:
    device = simulated(device_name, first)
    if gpu:
        request.getfixturevalue("as_on_a_gpu")
    words, out = allocate_array(device, (3,), "u64").zero(), allocate_array(device, (64,), "u64").zero()
    sums.launch(device, grid=1, block=128, args=(words, out, first, 10**10))
    device.synchronize()
    assert (out.numpy() == 1_010_202).all()


@ep.kernel
def never(words: ep.Ptr[ep.u64], timeout: ep.i64):
    p = words
    ep.wait((p, p + 1, p + 2, p + 3), until=lambda v: v >= 100, order=ep.RELAXED, scope=ep.DEVICE, timeout_ns=timeout)


@pytest.mark.parametrize(("there", "missing"), [((7, 100, 8, 100), 0), ((100, 7, 8, 100), 1), ((100, 100, 100, 7), 3)])
@pytest.mark.parametrize("gpu", [False, True])
def test_a_timeout_is_about_the_first_that_does_not_hold(
    device_name: str, there: tuple[int, ...], missing: int, gpu: bool, request: pytest.FixtureRequest
) -> None:
    device = simulated(device_name, 1)
    if gpu:
        request.getfixturevalue("as_on_a_gpu")
    words = allocate_array(device, (4,), "u64")
    words.copy_from(np.array(there, np.uint64))
    never.launch(device, grid=1, block=64, args=(words, 10**6))
    with pytest.raises(ep.PeerTimeout, match="v >= 100") as caught:
        device.synchronize()
    assert (caught.value.report.address, caught.value.report.last) == (words.address + 8 * missing, 7)


@ep.kernel
def two_types(words: ep.Ptr[ep.u64], others: ep.Ptr[ep.u32]):
    ep.wait((words, others), until=lambda v: v == 1, order=ep.RELAXED, scope=ep.DEVICE, timeout_ns=10**9)


@ep.kernel
def none(words: ep.Ptr[ep.u64]):
    ep.wait((), until=lambda v: v == 1, order=ep.RELAXED, scope=ep.DEVICE, timeout_ns=10**9)


@ep.kernel
def no_pointer(words: ep.Ptr[ep.u64]):
    ep.wait((words, 5), until=lambda v: v == 1, order=ep.RELAXED, scope=ep.DEVICE, timeout_ns=10**9)


@pytest.mark.parametrize(
    ("kernel", "text"),
    [
        (two_types, r"ep.wait for several words needs pointers of one type, not Ptr\[u64\] and Ptr\[u32\]"),
        (none, "ep.wait for several words needs pointers of one type, not none"),
        (no_pointer, "ep.wait needs a pointer, not the compile-time int 5"),
    ],
)
def test_what_is_refused(kernel: Any, text: str) -> None:
    with pytest.raises(ep.CompileError, match=text):
        kernel.compile("sim:nvidia")
