"""What the simulator says when nothing can go on: whole texts, with the lines where each group of threads stands."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from epdsl_runtime.array import allocate_array
from epdsl_runtime.faults import PeerTimeout
from epdsl_runtime.sim import Deadlock, OutsideError, SimEngine

import epdsl as ep

HERE = __file__


@pytest.fixture(autouse=True)
def on_the_simulator(device_name: str) -> None:
    if not device_name.startswith("sim"):
        pytest.skip("about the simulator itself")


def line_of(mark: str) -> int:
    with open(HERE) as file:
        return next(i for i, line in enumerate(file, 1) if line.rstrip().endswith(f"# {mark}"))


def open_sim(device_name: str, seed: int = 0) -> Any:
    return SimEngine(1, device_name.partition(":")[2], seed=seed).device(0)


def deadlock_of(device_name: str, kernel: Any, block: int, *args: Any, grid: int = 1) -> list[str]:
    """The lines of the report of a kernel that never ends."""
    device = open_sim(device_name)
    passed = [allocate_array(device, a.shape, a.dtype).copy_from(a) if hasattr(a, "shape") else a for a in args]
    kernel.launch(device, grid=grid, block=block, args=tuple(passed))
    with pytest.raises(Deadlock) as caught:
        device.synchronize()
    return str(caught.value).splitlines()


@ep.kernel
def named(wanted: ep.i32):
    if ep.warp_id() == 0:
        ep.named_barrier(3, wanted)  # named
    else:
        ep.group_barrier(ep.Group(0, 2 * ep.warp_size(), 5))  # grouped


def test_barriers_of_too_few_threads(device_name: str) -> None:
    w = 64 if device_name == "sim:amd" else 32
    assert deadlock_of(device_name, named, 2 * w, 4 * w) == [
        "EP304: deadlock: nothing can go on (seed 0)",
        f"  rank 0 named: {w} threads at a named barrier at {HERE}:{line_of('named')}: ep.named_barrier(...)"
        f" (first: block 0 thread 0; barrier 3: {w} of {4 * w} threads have arrived)",
        f"  rank 0 named: {w} threads at a named barrier at {HERE}:{line_of('grouped')}: ep.group_barrier(...)"
        f" (first: block 0 thread {w}; barrier 5: {w} of {2 * w} threads have arrived)",
    ]


@ep.kernel
def half_way(stop: ep.i32):
    if ep.warp_id() < stop:
        ep.named_barrier(1, 4 * ep.warp_size())  # half
    ep.barrier()  # whole


def test_a_block_barrier_that_some_threads_cannot_reach(device_name: str) -> None:
    w = 64 if device_name == "sim:amd" else 32
    assert deadlock_of(device_name, half_way, 2 * w, 1) == [
        "EP304: deadlock: nothing can go on (seed 0)",
        f"  rank 0 half_way: {w} threads at the block barrier at {HERE}:{line_of('whole')}: ep.barrier()"
        f" (first: block 0 thread {w}; {w} of {2 * w} threads of the block have arrived)",
        f"  rank 0 half_way: {w} threads at a named barrier at {HERE}:{line_of('half')}: ep.named_barrier(...)"
        f" (first: block 0 thread 0; barrier 1: {w} of {4 * w} threads have arrived)",
    ]


@ep.kernel
def apart(which: ep.Const[int]):
    if ep.lane_id() < 3:
        if which == 0:
            ep.shfl_xor(ep.lane_id(), 1)  # shuffle
        elif which == 1:
            ep.ballot(ep.lane_id() > 1)  # vote
        elif which == 2:
            ep.warp_sync()  # sync
        else:
            ep.elect()  # elect


@pytest.mark.parametrize(
    ("which", "mark", "where", "text"),
    [
        (0, "shuffle", "at a shuffle", "ep.shfl_xor(...)"),
        (1, "vote", "at a vote", "ep.ballot(...)"),
        (2, "sync", "at a warp sync", "ep.warp_sync()"),
        (3, "elect", "at an election", "ep.elect()"),
    ],
)
def test_a_warp_operation_that_lanes_do_not_reach(device_name: str, which: int, mark: str, where: str, text: str) -> None:
    assert deadlock_of(device_name, apart, 64, which) == [
        "EP304: deadlock: nothing can go on (seed 0)",
        f"  rank 0 apart: {3 * (64 // (64 if device_name == 'sim:amd' else 32))} threads {where} at {HERE}:{line_of(mark)}: {text}"
        " (first: block 0 thread 0)",
    ]


@ep.kernel
def lock_in_a_warp(lock: ep.Ptr[ep.u32], total: ep.Ptr[ep.u32]):
    """Every lane takes the same lock in a loop of its own: it needs lanes that go on independently."""
    done = False
    while not done:
        if ep.atomic_cas(lock, ep.u32(0), ep.u32(1), order=ep.ACQUIRE, scope=ep.DEVICE) == 0:
            total[0] = total[0] + 1
            ep.store(lock, 0, order=ep.RELEASE, scope=ep.DEVICE)
            done = True


@ep.kernel
def lock_kept(lock: ep.Ptr[ep.u32], total: ep.Ptr[ep.u32]):
    """The lock is given back after the loop, where an AMD lane comes only when its whole wave has left the loop."""
    while ep.atomic_cas(lock, ep.u32(0), ep.u32(1), order=ep.ACQUIRE, scope=ep.DEVICE) != 0:  # lock
        pass
    total[0] = total[0] + 1
    ep.store(lock, 0, order=ep.RELEASE, scope=ep.DEVICE)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_lock_released_inside_the_loop_works_everywhere(device_name: str, seed: int) -> None:
    device = open_sim(device_name, seed)
    lock, total = allocate_array(device, (1,), "u32").zero(), allocate_array(device, (1,), "u32").zero()
    lock_in_a_warp.launch(device, grid=2, block=128, args=(lock, total))
    assert total.numpy().tolist() == [256]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_lock_released_after_the_loop_needs_independent_lanes(device_name: str, seed: int) -> None:
    device = open_sim(device_name, seed)
    lock, total = allocate_array(device, (1,), "u32").zero(), allocate_array(device, (1,), "u32").zero()
    lock_kept.launch(device, grid=2, block=128, args=(lock, total))
    if device_name == "sim:nvidia":
        assert total.numpy().tolist() == [256]
        return
    with pytest.raises(Deadlock, match=r"livelock: only loops that look at memory go on") as caught:
        device.synchronize()
    assert f"going round a loop at {HERE}:{line_of('lock')}" in str(caught.value)


@ep.kernel
def publish_then_wait(flag: ep.Ptr[ep.u32], out: ep.Ptr[ep.u32]):
    """One lane publishes, then all wait: the branch is over before the wait begins, so no lane is held up."""
    if ep.thread_idx.x == 40:
        ep.store(flag, 1, order=ep.RELEASE, scope=ep.DEVICE)
    ep.wait(flag, until=lambda v: v == 1, order=ep.ACQUIRE, scope=ep.DEVICE, timeout_ns=10**9)
    out[ep.thread_idx.x] = 1


@pytest.mark.parametrize("seed", range(5))
def test_a_wave_that_publishes_before_it_waits(device_name: str, seed: int) -> None:
    device = open_sim(device_name, seed)
    flag, out = allocate_array(device, (1,), "u32").zero(), allocate_array(device, (128,), "u32").zero()
    publish_then_wait.launch(device, grid=1, block=128, args=(flag, out))
    assert out.numpy().tolist() == [1] * 128


@ep.kernel
def sleeps(flag: ep.Ptr[ep.u32]):
    while ep.load(flag, order=ep.ACQUIRE, scope=ep.DEVICE) == 0:  # asleep
        ep.sleep_ns(100)


@ep.kernel
def plain_spin(flag: ep.Ptr[ep.i32]):
    while flag[0] == 0:  # plain
        pass


@pytest.mark.parametrize(("kernel", "mark", "dtype"), [(sleeps, "asleep", "u32"), (plain_spin, "plain", "i32")])
def test_loops_that_never_end_are_found(device_name: str, kernel: Any, mark: str, dtype: str) -> None:
    device = open_sim(device_name)
    flag = allocate_array(device, (1,), dtype).zero()
    kernel.launch(device, grid=1, block=64, args=(flag,))
    with pytest.raises(Deadlock, match=r"^EP304: livelock: only loops that look at memory go on \(seed 0\)") as caught:
        device.synchronize()
    assert f"{HERE}:{line_of(mark)}: while" in str(caught.value) or "asleep" in str(caught.value)


@ep.kernel
def long_loops(counter: ep.Ptr[ep.u32], out: ep.Ptr[ep.u64], n: ep.i32):
    """A loop with an end of its own is progress, however long; so is waiting for the clock."""
    for _ in range(n):
        ep.reduce_add(counter, 1, order=ep.RELAXED, scope=ep.DEVICE)
    start = ep.globaltimer()
    while ep.globaltimer() - start < 10**9:
        pass
    if ep.thread_idx.x == 0:
        out[0] = ep.globaltimer() - start


def test_long_loops_are_no_deadlock(device_name: str) -> None:
    device = open_sim(device_name)
    counter, out = allocate_array(device, (1,), "u32").zero(), allocate_array(device, (1,), "u64").zero()
    long_loops.launch(device, grid=1, block=64, args=(counter, out, 50_000))
    assert counter.numpy().tolist() == [64 * 50_000]
    assert out.numpy()[0] >= 10**9


@ep.kernel
def waits(flags: ep.Ptr[ep.u32]):
    if ep.thread_idx.x < 2:
        ep.wait(flags + ep.thread_idx.x, until=lambda v: v > 4, order=ep.ACQUIRE, scope=ep.DEVICE, timeout_ns=10**6)  # waits


def test_a_timeout_carries_the_whole_report(device_name: str) -> None:
    device = open_sim(device_name)
    flags = allocate_array(device, (2,), "u32").zero()
    waits.launch(device, grid=1, block=64, args=(flags,))
    with pytest.raises(PeerTimeout) as caught:
        device.synchronize()
    text = str(caught.value)
    assert text.startswith(f"EP301: a wait timed out: rank 0, kernel waits, {HERE}:{line_of('waits')}, block 0 thread ")
    assert "  waited for: v > 4 (compared with 4)\n" in text and "and 1 more fault\n" in text
    assert "  deadlock: nothing can go on (seed 0)\n" in text
    assert f"  rank 0 waits: 2 threads waiting for memory at {HERE}:{line_of('waits')}: v > 4 (first: block 0 thread 0)\n" in text
    assert re.search(r"\n    address 0x[0-9a-f]+ holds 0 \(memory of rank 0, byte 0 of 8\)", text)


def test_a_launch_that_has_not_begun_is_said_to_wait_for_the_ranks(device_name: str) -> None:
    device = open_sim(device_name)
    flags = allocate_array(device, (2,), "u32").fill_bytes(1)
    assert device.waiting() == []
    waits.launch(device, grid=1, block=64, args=(flags,))
    assert device.waiting() == ["rank 0 waits: has not begun; it runs while every rank of this process waits"]
    device.synchronize()
    assert device.waiting() == []


# ---- beside an array


@ep.kernel
def copies(source: ep.Ptr[ep.f32], target: ep.Ptr[ep.f32], first: ep.i32, end: ep.i32):
    for i in range(first + ep.thread_idx.x, end, ep.block_dim.x):
        target[i] = source[i]


@pytest.mark.parametrize(
    ("first", "end", "byte"), [(0, 101, 400), (0, 4000, 400), (-1, 0, -4), (-64, 0, -256), (4195, 4196, 16780)], ids=str
)
def test_a_write_beside_an_array_is_said_once(device_name: str, first: int, end: int, byte: int) -> None:
    """Read and written at the same place of two arrays: what is read there differs from what was there."""
    device = open_sim(device_name)
    source, target = (allocate_array(device, (100,), "f32").zero() for _ in range(2))
    device.diagnostics.name_buffer(target.address, target.nbytes, "rows (f32 [100]) of rank 0")
    copies.launch(device, grid=1, block=64, args=(source, target, first, end))
    with pytest.raises(OutsideError) as caught:
        device.synchronize()
    assert str(caught.value) == (
        f"EP306: rows (f32 [100]) of rank 0 has 400 bytes, and its byte {byte} was written: an index of a kernel is out of range\n"
        "  write: @ep.scenario(ranks=...) above the function given to ep.spawn; `epdsl check FILE.py` then says which line it is"
    )
    device.synchronize()
    copies.launch(device, grid=1, block=64, args=(source, target, 0, 100))
    device.synchronize()
    assert target.numpy().tolist() == [0.0] * 100


def test_a_peer_that_does_not_exist_says_where_the_process_ended(tmp_path: Path) -> None:
    program = tmp_path / "gone.py"
    program.write_text(
        "import epdsl as ep\n\n\n"
        "@ep.kernel\ndef gone(x: ep.Peers[ep.f32], me: ep.i32):\n    x[me + 1][0] = 1.0\n\n\n"
        "def main(rank):\n    x = rank.symmetric(ep.f32, 4)\n    gone.launch(rank, grid=1, block=32, args=(x.peers, rank.index))\n"
        "    rank.synchronize()\n\n\n"
        "if __name__ == '__main__':\n    ep.spawn(main, ranks=2, device='sim')\n"
    )
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=100)
    assert done.returncode == -signal.SIGSEGV
    assert done.stderr.startswith("Fatal Python error: Segmentation fault\n")
    assert f'  File "{program}", line 12 in main\n' in done.stderr
