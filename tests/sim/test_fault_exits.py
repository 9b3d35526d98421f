"""What the rest of a block does when one of its threads leaves through a fault, on the simulator."""

from __future__ import annotations

from typing import Any

import pytest
from epdsl_runtime import DeviceAssertionError, PeerTimeout
from epdsl_runtime.array import allocate_array
from epdsl_runtime.sim import SimEngine

import epdsl as ep
from epdsl.check.engine import Options
from epdsl.check.explore import check_once

THREADS = 128
SECOND = 10**9


@pytest.fixture(autouse=True)
def on_the_simulator(device_name: str) -> None:
    if not device_name.startswith("sim"):
        pytest.skip("about the simulator: on a GPU the block's barrier opens")


def open_sim(device_name: str, seed: int = 0, num_sms: int | None = None) -> Any:
    return SimEngine(1, device_name.partition(":")[2] or "nvidia", seed=seed, num_sms=num_sms).device(0)


@ep.kernel
def one_waits_for_all(flag: ep.Ptr[ep.u32], out: ep.Ptr[ep.u32], waiter: ep.i32):
    """One thread waits and then fills what the others use as an index."""
    place = ep.shared(ep.i32, 1)
    if ep.thread_idx.x == waiter:
        ep.wait(flag, until=lambda v: v == 1, order=ep.ACQUIRE, scope=ep.DEVICE, timeout_ns=SECOND)
        place[0] = 0
    ep.barrier()
    out[place[0] * 1_000_000 + ep.thread_idx.x] = 1


@pytest.mark.parametrize("waiter", [0, 70])
def test_nobody_uses_what_a_wait_that_gave_up_would_have_brought(device_name: str, waiter: int) -> None:
    """The index would be 0xA5A5A5A5 times a million."""
    device = open_sim(device_name)
    flag, out = allocate_array(device, (1,), "u32").zero(), allocate_array(device, (THREADS,), "u32").zero()
    one_waits_for_all.launch(device, grid=1, block=THREADS, args=(flag, out, waiter))
    with pytest.raises(PeerTimeout, match=rf"kernel one_waits_for_all, .*, block 0 thread {waiter}\b") as caught:
        device.synchronize()
    assert "more fault" not in str(caught.value) and "after that" not in str(caught.value)
    assert out.numpy().tolist() == [0] * THREADS
    flag.copy_from([1])
    one_waits_for_all.launch(device, grid=1, block=THREADS, args=(flag, out, waiter))
    assert out.numpy().tolist() == [1] * THREADS


@ep.kernel
def one_asserts_for_all(limit: ep.i32, out: ep.Ptr[ep.u32]):
    place = ep.shared(ep.i32, 1)
    if ep.thread_idx.x == 0:
        ep.device_assert(limit < 8, "limit {}", limit)
        place[0] = limit
    ep.barrier()
    out[place[0] * 1_000_000 + ep.thread_idx.x] = 1


def test_nobody_goes_on_after_an_assert_that_failed(device_name: str) -> None:
    device = open_sim(device_name)
    out = allocate_array(device, (THREADS,), "u32").zero()
    one_asserts_for_all.launch(device, grid=1, block=THREADS, args=(8, out))
    with pytest.raises(DeviceAssertionError, match="limit 8"):
        device.synchronize()
    assert out.numpy().tolist() == [0] * THREADS


@ep.kernel
def rounds(out: ep.Ptr[ep.u32], faulty: ep.i32, last: ep.i32, n: ep.i32):
    """Every thread counts its rounds; thread 5 of block `faulty` leaves in round `last`."""
    at = ep.block_idx.x * ep.block_dim.x + ep.thread_idx.x
    for i in range(n):
        if ep.block_idx.x == faulty and ep.thread_idx.x == 5:
            ep.device_assert(i != last)
        ep.barrier()
        out[at] = ep.u32(i + 1)


@pytest.mark.parametrize("seed", range(4))
def test_what_came_before_the_fault_is_done_and_other_blocks_are_left_alone(device_name: str, seed: int) -> None:
    """One SM holds two blocks at a time, so that later blocks run where the faulty one was."""
    device = open_sim(device_name, seed, num_sms=1)
    out = allocate_array(device, (5, 1024), "u32").zero()
    rounds.launch(device, grid=5, block=1024, args=(out, 1, 3, 6))
    with pytest.raises(DeviceAssertionError, match="block 1 thread 5"):
        device.synchronize()
    done = out.numpy()
    assert done[1].tolist() == [3] * 1024
    assert (done[[0, 2, 3, 4]] == 6).all()


@ep.kernel
def half_at_a_group(flag: ep.Ptr[ep.u32], out: ep.Ptr[ep.u32]):
    """Two groups of one block with a barrier each; a thread of the first gives up."""
    half = ep.block_dim.x // 2
    if ep.thread_idx.x < half:
        if ep.thread_idx.x == 3:
            ep.wait(flag, until=lambda v: v == 1, order=ep.ACQUIRE, scope=ep.DEVICE, timeout_ns=SECOND)
        ep.named_barrier(1, half)
        out[ep.thread_idx.x] = 1
    else:
        ep.named_barrier(2, half)
        out[ep.thread_idx.x] = 1
    ep.barrier()
    out[ep.thread_idx.x] = 2


def test_a_group_without_the_thread_goes_on_up_to_the_barrier_of_the_block(device_name: str) -> None:
    device = open_sim(device_name)
    flag, out = allocate_array(device, (1,), "u32").zero(), allocate_array(device, (THREADS,), "u32").zero()
    half_at_a_group.launch(device, grid=1, block=THREADS, args=(flag, out))
    with pytest.raises(PeerTimeout, match="after that nothing could go on") as caught:
        device.synchronize()
    assert "63 threads at a named barrier" in str(caught.value) and "64 threads at the block barrier" in str(caught.value)
    assert out.numpy().tolist() == [0] * 64 + [1] * 64


@ep.kernel
def one_waits_for_its_warp(flag: ep.Ptr[ep.u32], out: ep.Ptr[ep.u32]):
    place = ep.i32(0)
    if ep.lane_id() == 0:
        place = ep.i32(ep.wait(flag, until=lambda v: v == 1, order=ep.ACQUIRE, scope=ep.DEVICE, timeout_ns=SECOND)) - 1
    out[ep.shfl(place, 0) * 1_000_000 + ep.thread_idx.x] = 1


def test_a_shuffle_does_not_go_on_without_a_lane(device_name: str) -> None:
    device = open_sim(device_name)
    flag, out = allocate_array(device, (1,), "u32").zero(), allocate_array(device, (THREADS,), "u32").zero()
    one_waits_for_its_warp.launch(device, grid=1, block=THREADS, args=(flag, out))
    with pytest.raises(PeerTimeout, match=r"after that nothing could go on[^\n]*\n.*threads at a shuffle"):
        device.synchronize()
    assert out.numpy().tolist() == [0] * THREADS


@ep.kernel
def counts_and_asserts(turn: ep.Ptr[ep.u32], limit: ep.i32):
    if ep.thread_idx.x == 0:
        turn[0] = 1
        ep.device_assert(limit < 8)
    ep.barrier()
    if ep.thread_idx.x == 1:
        turn[0] = 0


def asserting(rank: ep.Rank) -> None:
    out, turn = rank.zeros(ep.u32, THREADS), rank.zeros(ep.u32, 1)
    ep.control_words(turn)
    one_asserts_for_all.launch(rank, grid=2, block=THREADS, args=(9, out))
    counts_and_asserts.launch(rank, grid=1, block=THREADS, args=(turn, 9))
    rank.synchronize()


@pytest.mark.parametrize("schedule", ["uniform", "pct"])
def test_the_checker_reports_the_assert_alone(device_name: str, schedule: str) -> None:
    """Neither what the thread left undone nor that it is missing at a barrier."""
    options = Options(vendor=device_name.partition(":")[2], schedule=schedule)
    _, found = check_once(asserting, 1, options)
    assert [finding.kind for finding in found] == ["failed"]
    assert "a device assert failed: rank 0, kernel one_asserts_for_all" in found[0].message
