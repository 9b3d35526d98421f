"""What a thread says of a wait that lasts: the code of a GPU, run on the simulator with a GPU's clock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from epdsl_runtime import context_layout as runtime_layout
from epdsl_runtime import sim_layout
from epdsl_runtime.array import allocate_array
from epdsl_runtime.sim import SimEngine
from epdsl_runtime.waits import Wait, read

import epdsl as ep
from epdsl import lower_sim
from epdsl.lang import context, polling

MS = 10**6
TICK = 1 << 26


@pytest.fixture
def device(device_name: str) -> Any:
    if not device_name.startswith("sim"):
        pytest.skip("about the simulator's clock and schedules")
    device = SimEngine(1, device_name.partition(":")[2] or "nvidia", seed=5).device(0)
    assert runtime_layout.WAIT_TABLE == 0
    device.context_words[0] = 2 * runtime_layout.WAIT_BASE
    return device


def told(device: Any) -> dict[int, Wait]:
    """Every record, by the last byte of its site."""
    return {wait.site & 0xFF: wait for slot in range(256) if (wait := read(device.context_words, slot)) is not None}


# ---- the record


@ep.kernel
def all_say(words: ep.Ptr[ep.u64], addresses: ep.i32, now: ep.i32, since: ep.u64):
    """Thread t waits for word t % addresses; its last value is its own number."""
    t = ep.thread_idx.x
    for k in ep.unroll(range(4)):
        if t % addresses == k:
            context.write_wait(words, 7 << 32 | k, ep.u64(0x7_0000_1000) + k * 4, ep.u64(k) << 40, ep.u64(t) << 33, since, now)


def say(device: Any, now: int, since: int = 0) -> dict[int, Wait]:
    words = allocate_array(device, (runtime_layout.CONTEXT_WORDS,), "u64")
    words.copy_from(device.context_words.copy())
    all_say.launch(device, grid=2, block=128, args=(words, 4, now, since))
    device.synchronize()
    device.context_words[:] = words.numpy()
    return told(device)


def test_of_many_threads_one_says_what_they_wait_for(device: Any) -> None:
    found = say(device, 5000, since=4990 * TICK)
    assert sorted(found) == [0, 1, 2, 3]
    for k, wait in found.items():
        assert (wait.site, wait.address, wait.expected) == (7 << 32 | k, 0x7_0000_1000 + 4 * k, k << 40)
        assert wait.last == wait.thread << 33 and wait.thread % 4 == k and wait.block in (0, 1)
        assert wait.seconds == 10 * (TICK / 1e9)


@pytest.mark.parametrize(("second", "taken"), [(5000, False), (5001, True), (4999, False), (17, False)])
def test_a_slot_is_taken_once_a_tick(device: Any, second: int, taken: bool) -> None:
    """And not by a thread whose clock is behind."""
    before = say(device, 5000)
    after = say(device, second, since=17 * TICK)
    assert all((before[k] != after[k]) is taken for k in range(4))


def test_a_context_without_slots_is_left_alone(device: Any) -> None:
    device.context_words[0] = 0
    assert say(device, 5000) == {} and not device.context_words.any()


# ---- the loop


def gpu_poll(e: Any, op: Any) -> Any:
    """A look at the clock, as on a GPU, where another thread may go on."""
    e.suspend(sim_layout.OP_YIELD, e.constant(0), site=-1)
    now = e.word(e.pointer(e.word(e.pointer(e.word(e.thread, sim_layout.T_LAUNCH)), sim_layout.L_ENGINE)), sim_layout.E_TIME)
    # 8: unsigned and greater.
    return e.compare(8, e.op("llvm.sub", [e.i64], [now, op.operands[2]]), op.operands[3])


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(polling, "_simulated", polling._on_gpu)
    monkeypatch.setitem(lower_sim.OPERATIONS, "ep.poll", gpu_poll)
    # So that a report takes 8 checks here.
    monkeypatch.setattr(polling, "LOOKS_A_REPORT", 8 * polling.LOOKS_A_CHECK)
    monkeypatch.setenv("EPDSL_CACHE_DIR", str(tmp_path))


@ep.kernel
def waits_while_another_counts(word: ep.Ptr[ep.u64], out: ep.Ptr[ep.u64], ms: ep.i32, timeout: ep.i64):
    """A millisecond a count."""
    if ep.thread_idx.x == 0:
        out[0] = ep.wait(word, until=lambda v: v == 5000, order=ep.ACQUIRE, scope=ep.DEVICE, timeout_ns=timeout)
    elif ep.thread_idx.x == 64:
        start = ep.globaltimer()
        for i in range(ms):
            ep.store(word, ep.u64(i), order=ep.RELEASE, scope=ep.DEVICE)
            while ep.globaltimer() - start < ep.u64(i) * MS:
                ep.sleep_ns(50_000)
        ep.store(word, ep.u64(5000), order=ep.RELEASE, scope=ep.DEVICE)


def test_a_wait_is_told_once_it_has_lasted_two_ticks_and_again(device: Any, as_on_a_gpu: None) -> None:
    word, out = allocate_array(device, (1,), "u64").zero(), allocate_array(device, (1,), "u64").zero()
    waits_while_another_counts.launch(device, grid=1, block=128, args=(word, out, 100, 10**10))
    device.synchronize()
    assert out.numpy()[0] == 5000 and told(device) == {}
    word.zero()
    waits_while_another_counts.launch(device, grid=1, block=128, args=(word, out, 1000, 10**10))
    device.synchronize()
    assert out.numpy()[0] == 5000
    (wait,) = told(device).values()
    assert (wait.address, wait.block, wait.thread, wait.expected) == (word.address, 0, 0, 5000)
    assert 1000 - 3 * TICK / MS < wait.seconds * 1000 < 1000 + TICK / MS
    # It counts milliseconds.
    assert wait.seconds * 1000 == pytest.approx(wait.last, abs=TICK / MS + 5)


@pytest.mark.parametrize("timeout_ms", [50, 400])
def test_a_wait_that_is_told_runs_out_all_the_same(device: Any, as_on_a_gpu: None, timeout_ms: int) -> None:
    word, out = allocate_array(device, (1,), "u64").zero(), allocate_array(device, (1,), "u64").zero()
    waits_while_another_counts.launch(device, grid=1, block=128, args=(word, out, 600, timeout_ms * MS))
    with pytest.raises(ep.PeerTimeout, match="v == 5000") as caught:
        device.synchronize()
    report = caught.value.report
    assert (report.address, report.block, report.thread) == (word.address, 0, 0) and report.last == pytest.approx(timeout_ms, abs=10)
    assert len(told(device)) == (timeout_ms > 2 * TICK / MS) and np.array_equal(out.numpy(), [0])
