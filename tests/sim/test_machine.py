"""The simulated machine: schedules, progress, deadlocks and their reports, streams."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from epdsl_runtime.array import allocate_array
from epdsl_runtime.bootstrap import RankFailed
from epdsl_runtime.faults import PeerTimeout
from epdsl_runtime.sim import Deadlock, SimDevice, SimEngine, TrapError

import epdsl as ep

SECOND = 10**9


@pytest.fixture(autouse=True)
def on_the_simulator(device_name: str) -> None:
    if not device_name.startswith("sim"):
        pytest.skip("about the simulator itself")


def open_sim(device_name: str, seed: int = 0, num_sms: int | None = None) -> Any:
    return SimEngine(1, device_name.partition(":")[2] or "nvidia", seed=seed, num_sms=num_sms).device(0)


@ep.kernel
def tickets(counter: ep.Ptr[ep.u32], order: ep.Ptr[ep.u32]):
    mine = ep.atomic_add(counter, 1, order=ep.RELAXED, scope=ep.DEVICE)
    order[mine] = ep.u32(ep.block_idx.x * ep.block_dim.x + ep.thread_idx.x)


def order_of_threads(device_name: str, seed: int) -> list[int]:
    device = open_sim(device_name, seed)
    counter, order = allocate_array(device, (1,), "u32").zero(), allocate_array(device, (256,), "u32")
    tickets.launch(device, grid=2, block=128, args=(counter, order))
    return order.numpy().tolist()


def test_a_seed_replays_its_schedule(device_name: str) -> None:
    first = order_of_threads(device_name, 5)
    assert sorted(first) == list(range(256))
    assert order_of_threads(device_name, 5) == first
    assert len({tuple(order_of_threads(device_name, seed)) for seed in range(6)}) == 6


# ---- progress


@ep.kernel
def within_a_wave(flag: ep.Ptr[ep.u32], out: ep.Ptr[ep.u32], waiter: ep.i32, signaller: ep.i32):
    if ep.thread_idx.x == waiter:
        ep.wait(flag, until=lambda v: v == 1, order=ep.ACQUIRE, scope=ep.DEVICE, timeout_ns=SECOND)
        out[0] = 7
    elif ep.thread_idx.x == signaller:
        ep.store(flag, 1, order=ep.RELEASE, scope=ep.DEVICE)


@ep.kernel
def within_a_wave_reversed(flag: ep.Ptr[ep.u32], out: ep.Ptr[ep.u32], waiter: ep.i32, signaller: ep.i32):
    if ep.thread_idx.x == signaller:
        ep.store(flag, 1, order=ep.RELEASE, scope=ep.DEVICE)
    elif ep.thread_idx.x == waiter:
        ep.wait(flag, until=lambda v: v == 1, order=ep.ACQUIRE, scope=ep.DEVICE, timeout_ns=SECOND)
        out[0] = 7


@pytest.mark.parametrize("kernel", [within_a_wave, within_a_wave_reversed])
@pytest.mark.parametrize(("waiter", "signaller"), [(0, 1), (1, 0), (63, 5), (5, 63)])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_lane_that_waits_for_a_lane_of_its_own_wave(device_name: str, kernel: Any, waiter: int, signaller: int, seed: int) -> None:
    """Independent on NVIDIA; on AMD lanes leave a wait together, so it is a deadlock in every schedule."""
    device = open_sim(device_name, seed)
    flag, out = allocate_array(device, (1,), "u32").zero(), allocate_array(device, (1,), "u32").zero()
    kernel.launch(device, grid=1, block=128, args=(flag, out, waiter, signaller))
    if device_name == "sim:nvidia":
        assert out.numpy().tolist() == [7]
        return
    with pytest.raises(PeerTimeout) as caught:
        device.synchronize()
    assert "63 threads held while other lanes of its wave are in the branch" in str(caught.value)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_lane_may_wait_for_another_wave(device_name: str, seed: int) -> None:
    device = open_sim(device_name, seed)
    flag, out = allocate_array(device, (1,), "u32").zero(), allocate_array(device, (1,), "u32").zero()
    within_a_wave.launch(device, grid=1, block=128, args=(flag, out, 3, 64))
    assert out.numpy().tolist() == [7]


@ep.kernel
def raw_spin(flag: ep.Ptr[ep.u32], out: ep.Ptr[ep.u32]):
    if ep.block_idx.x == 0:
        while ep.load(flag, order=ep.ACQUIRE, scope=ep.DEVICE) == 0:
            pass
        out[0] = 9
    elif ep.thread_idx.x == 0:
        ep.store(flag, 1, order=ep.RELEASE, scope=ep.DEVICE)


def test_a_loop_of_the_authors_own(device_name: str) -> None:
    device = open_sim(device_name)
    flag, out = allocate_array(device, (1,), "u32").zero(), allocate_array(device, (1,), "u32").zero()
    raw_spin.launch(device, grid=2, block=64, args=(flag, out))
    assert out.numpy().tolist() == [9]
    flag.zero()
    raw_spin.launch(device, grid=1, block=64, args=(flag, out))
    with pytest.raises(Deadlock, match=r"livelock: only loops that look at memory go on") as caught:
        device.synchronize()
    assert "64 threads going round a loop at" in str(caught.value) and "while ep.load(flag" in str(caught.value)


# ---- deadlocks and what they say


@ep.kernel
def wait_for_peer(flags: ep.Peers[ep.u32], me: ep.i32, late: ep.i32):
    if ep.thread_idx.x == 0:
        if me != late:
            for r in range(flags.size):
                ep.store(flags[r] + me, 1, order=ep.RELEASE, scope=ep.SYSTEM)
        for r in range(flags.size):
            ep.wait(flags[me] + r, until=lambda v: v == 1, order=ep.ACQUIRE, scope=ep.SYSTEM, timeout_ns=SECOND)


def missing_signal(rank: ep.Rank) -> None:
    flags = rank.symmetric(ep.u32, 4, name="arrivals")
    wait_for_peer.launch(rank, grid=1, block=64, args=(flags.peers, rank.index, 2))
    rank.synchronize()


def test_a_signal_that_never_comes(device_name: str) -> None:
    with pytest.raises(RankFailed) as caught:
        ep.spawn(missing_signal, ranks=4, device=device_name)
    fault = caught.value.error
    assert isinstance(fault, PeerTimeout)
    line = next(i for i, text in enumerate(open(__file__).read().splitlines(), 1) if "ep.wait(flags[me] + r" in text)
    assert fault.kernel == "wait_for_peer" and fault.site is not None and fault.site.line == line
    text = str(fault)
    assert re.search(r"a wait timed out: rank \d, kernel wait_for_peer, .*test_machine\.py:\d+, block 0 thread 0", text)
    assert "waited for: v == 1 (compared with 1)" in text and "last value: 0" in text
    # Every rank waits for the one that said nothing, and the report says so of each.
    assert len(re.findall(rf"rank \d wait_for_peer: 1 thread waiting for memory at .*:{line}: v == 1 .*\n    .*byte 8 of", text)) == 4


@ep.kernel
def named(count: ep.i32):
    if ep.warp_id() == 0:
        ep.named_barrier(2, count)


def test_a_named_barrier_of_the_wrong_count(device_name: str) -> None:
    device = open_sim(device_name)
    named.launch(device, grid=1, block=128, args=(128,))
    with pytest.raises(Deadlock) as caught:
        device.synchronize()
    lanes = device.info.warp_size
    assert f"{lanes} threads at a named barrier" in str(caught.value)
    assert f"barrier 2: {lanes} of 128 threads have arrived" in str(caught.value)


@ep.kernel
def partial(out: ep.Ptr[ep.i32]):
    if ep.lane_id() < 7:
        out[ep.lane_id()] = ep.shfl(ep.lane_id(), 0)


def test_a_warp_operation_that_not_every_lane_reaches(device_name: str) -> None:
    device = open_sim(device_name)
    partial.launch(device, grid=1, block=64, args=(allocate_array(device, (64,), "i32"),))
    with pytest.raises(Deadlock) as caught:
        device.synchronize()
    warps = 64 // device.info.warp_size
    assert f"{7 * warps} threads at a shuffle" in str(caught.value)


@ep.kernel
def block_barrier_of_blocks(arrived: ep.Ptr[ep.u32]):
    if ep.thread_idx.x == 0:
        ep.reduce_add(arrived, 1, order=ep.ACQ_REL, scope=ep.DEVICE)
        ep.wait(arrived, until=lambda v: v == ep.u32(ep.grid_dim.x), order=ep.ACQUIRE, scope=ep.DEVICE, timeout_ns=SECOND)


def test_blocks_that_cannot_all_be_resident(device_name: str) -> None:
    """Two SMs hold four blocks of 1024 threads: a grid of five that waits for itself never ends."""
    device = open_sim(device_name, num_sms=2)
    arrived = allocate_array(device, (1,), "u32").zero()
    block_barrier_of_blocks.launch(device, grid=4, block=1024, args=(arrived,))
    assert arrived.numpy().tolist() == [4]
    arrived.zero()
    block_barrier_of_blocks.launch(device, grid=5, block=1024, args=(arrived,))
    with pytest.raises(PeerTimeout, match="1 blocks cannot start: the device holds 4 at once"):
        device.synchronize()
    with pytest.raises(ValueError, match="holds 4 blocks of 1024 threads at once; use a grid of at most 4"):
        block_barrier_of_blocks.launch(device, grid=5, block=1024, args=(arrived,), cooperative=True)


def test_ranks_that_wait_for_each_other_on_the_host(device_name: str) -> None:
    with pytest.raises(RankFailed) as caught:
        ep.spawn(one_goes_home, ranks=2, device=device_name)
    assert "every rank waits on the host and no kernel is in flight" in str(caught.value)


def one_goes_home(rank: ep.Rank) -> None:
    if rank.index == 0:
        rank.device.engine.block(lambda: False, "something that never happens")
    else:
        rank.device.engine.block(lambda: False, "something else")


@ep.kernel
def traps(n: ep.i32):
    if ep.thread_idx.x == n:
        ep.trap()


def test_a_trap(device_name: str) -> None:
    device = open_sim(device_name)
    traps.launch(device, grid=1, block=64, args=(3,))
    with pytest.raises(TrapError, match="rank 0 traps: 1 thread trapped at "):
        device.synchronize()
    traps.launch(device, grid=1, block=64, args=(-1,))
    device.synchronize()


# ---- launches and streams


@ep.kernel
def append(log: ep.Ptr[ep.i32], place: ep.Ptr[ep.u32], what: ep.i32):
    if ep.thread_idx.x == 0:
        log[ep.atomic_add(place, 1, order=ep.RELAXED, scope=ep.DEVICE)] = what


@ep.kernel
def hold(flag: ep.Ptr[ep.u32]):
    if ep.thread_idx.x == 0:
        ep.wait(flag, until=lambda v: v == 1, order=ep.ACQUIRE, scope=ep.DEVICE, timeout_ns=SECOND)


@ep.kernel
def let_go(flag: ep.Ptr[ep.u32]):
    if ep.thread_idx.x == 0:
        ep.store(flag, 1, order=ep.RELEASE, scope=ep.DEVICE)


def test_streams_are_in_order_and_run_beside_each_other(device_name: str) -> None:
    device = open_sim(device_name)
    log, place = allocate_array(device, (8,), "i32"), allocate_array(device, (1,), "u32").zero()
    flag = allocate_array(device, (1,), "u32").zero()
    device.synchronize()
    held, other = device.stream(), device.stream()
    hold.launch(device, grid=1, block=64, args=(flag,), stream=held)
    append.launch(device, grid=1, block=64, args=(log, place, 2), stream=held)
    append.launch(device, grid=1, block=64, args=(log, place, 1), stream=other)
    device.synchronize(other)
    let_go.launch(device, grid=1, block=64, args=(flag,), stream=other)
    device.synchronize()
    assert log.numpy()[:2].tolist() == [1, 2]


def test_a_launch_returns_before_it_runs(device_name: str) -> None:
    device = open_sim(device_name)
    flag = allocate_array(device, (1,), "u32").zero()
    device.synchronize()
    let_go.launch(device, grid=1, block=64, args=(flag,))
    assert not device.idle()
    assert flag.numpy().tolist() == [1] and device.idle()


def test_a_thousand_launches(device_name: str) -> None:
    device = open_sim(device_name)
    place = allocate_array(device, (1,), "u32").zero()
    log = allocate_array(device, (1000,), "i32")
    for i in range(1000):
        append.launch(device, grid=1, block=64, args=(log, place, i))
    assert (log.numpy() == np.arange(1000)).all()


def test_events_time_what_is_between_them(device_name: str) -> None:
    device = open_sim(device_name)
    place, log = allocate_array(device, (1,), "u32").zero(), allocate_array(device, (8,), "i32")
    first, last = device.event(), device.event()
    first.record()
    append.launch(device, grid=1, block=64, args=(log, place, 1))
    last.record()
    assert last.elapsed_ms(first) > 0


def test_freed_memory_is_refused(device_name: str) -> None:
    device = open_sim(device_name)
    array = allocate_array(device, (4,), "u32").zero()
    array.free()
    with pytest.raises((RuntimeError, ValueError), match="freed"):
        let_go.launch(device, grid=1, block=64, args=(array,))


def test_fresh_memory_is_not_zero(device_name: str) -> None:
    device = SimDevice(device_name.partition(":")[2])
    assert allocate_array(device, (4,), "u32").numpy().tolist() == [0xA5A5A5A5] * 4
