"""What kernels report: printf, asserts, timeouts and traps, as whole texts."""

from __future__ import annotations

import numpy as np
import pytest
from epdsl_runtime.faults import DeviceAssertionError, PeerTimeout
from language_run import fresh_rank, rank_on, warp_size

import epdsl as ep

HERE = __file__


def line_of(text: str) -> int:
    """The number of this file's line that ends in a mark."""
    with open(HERE) as file:
        return next(i for i, line in enumerate(file, 1) if line.rstrip().endswith(f"# {text}"))


@ep.kernel
def prints(a: ep.Ptr[ep.f32], n: ep.i32):
    t = ep.thread_idx.x
    if t == 1 and ep.block_idx.x == 1:
        ep.printf("n is {}, a[1] is {:.2f}, {} {}", n, a[1], ep.u8(200), t == 1)
        ep.printf("plain")
        ep.printf("{:#x} {} {} {}", ep.u64(2**63), ep.i8(-5), ep.bf16(1.5), ep.f8e4m3(-0.5))


def test_printf_shows_rank_block_and_thread(device_name: str, capsys: pytest.CaptureFixture[str]) -> None:
    rank = rank_on(device_name)
    a = rank.array(np.array([1, 2.345], np.float32))
    prints.launch(rank, grid=2, block=rank.device.info.warp_size, args=(a, -7))
    rank.synchronize()
    assert capsys.readouterr().out == (
        "[rank 0 block 1 thread 1] n is -7, a[1] is 2.35, 200 1\n"
        "[rank 0 block 1 thread 1] plain\n"
        "[rank 0 block 1 thread 1] 0x8000000000000000 -5 1.5 -0.5\n"
    )
    prints.launch(rank, grid=2, block=rank.device.info.warp_size, args=(a, 3))
    rank.synchronize()
    assert capsys.readouterr().out.startswith("[rank 0 block 1 thread 1] n is 3")


@ep.kernel
def prints_much(n: ep.i32):
    for i in range(n):
        ep.printf("{}", i)


def test_printf_counts_what_does_not_fit(device_name: str, capsys: pytest.CaptureFixture[str]) -> None:
    rank = rank_on(device_name)
    w = warp_size(device_name)
    prints_much.launch(rank, grid=1, block=w, args=(100,))
    rank.synchronize()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2049
    assert lines[-1] == f"[rank 0] {100 * w - 2048} printf records lost: a device holds 2048 between two synchronisations"


@ep.func
def check(value: ep.i32, limit: ep.f32, flag: ep.i1):
    ep.device_assert(ep.f32(value) < limit, "value {} reaches {} ({})", value, limit, flag)  # assert


@ep.kernel
def asserts(a: ep.Ptr[ep.i32], out: ep.Ptr[ep.i32]):
    t = ep.thread_idx.x
    check(a[t], 10.5, t == 3)
    ep.device_assert(a[t] != 5)
    out[t] = 1


def test_a_failed_assert_raises_with_its_values(device_name: str) -> None:
    rank = fresh_rank(device_name)
    w = warp_size(device_name)
    a, out = np.zeros(w, np.int32), rank.zeros(ep.i32, w)
    a[3] = 11
    asserts.launch(rank, grid=1, block=w, args=(rank.array(a), out))
    with pytest.raises(DeviceAssertionError) as caught:
        rank.synchronize()
    assert str(caught.value) == (
        f"EP302: a device assert failed: rank 0, kernel asserts, {HERE}:{line_of('assert')}, block 0 thread 3\n  value 11 reaches 10.5 (1)"
    )
    # The thread left the kernel; the others went on, and so does the device.
    assert out.numpy().tolist() == [int(t != 3) for t in range(w)]
    a[3], a[4], a[6] = 5, 5, 5
    asserts.launch(rank, grid=1, block=w, args=(rank.array(a), out))
    with pytest.raises(DeviceAssertionError, match=r"no message\n  and 2 more faults$"):
        rank.synchronize()


@ep.kernel
def waits_in_vain(flag: ep.Ptr[ep.u32], wanted: ep.u32):
    if ep.thread_idx.x == 2:
        ep.wait(flag, until=lambda v: v == wanted, order=ep.ACQUIRE, scope=ep.SYSTEM, timeout_ns=10**6)  # wait


def test_a_wait_that_times_out_raises(device_name: str) -> None:
    rank = fresh_rank(device_name)
    flag = rank.array(np.array([41], np.uint32))
    waits_in_vain.launch(rank, grid=1, block=warp_size(device_name), args=(flag, 42))
    with pytest.raises(PeerTimeout) as caught:
        rank.synchronize()
    report = caught.value.report
    assert (report.expected, report.last, report.address) == (42, 41, flag.address)
    text = str(caught.value).splitlines()
    assert text[:4] == [
        f"EP301: a wait timed out: rank 0, kernel waits_in_vain, {HERE}:{line_of('wait')}, block 0 thread 2",
        "  waited for: v == wanted (compared with 42)",
        f"  address: 0x{flag.address:x}",
        "  last value: 41",
    ]
    flag.copy_from(np.array([42], np.uint32))
    waits_in_vain.launch(rank, grid=1, block=warp_size(device_name), args=(flag, 42))
    rank.synchronize()


@ep.kernel
def traps(a: ep.Ptr[ep.i32]):
    if a[0] == 1:
        ep.trap()
    a[1] = 5


def test_a_trap_is_an_error(device_name: str) -> None:
    if not device_name.startswith("sim"):
        pytest.skip("a trap leaves a GPU's context unusable")
    from epdsl_runtime.sim import TrapError

    rank = fresh_rank(device_name)
    a = rank.array(np.array([1, 0], np.int32))
    traps.launch(rank, grid=1, block=warp_size(device_name), args=(a,))
    with pytest.raises(
        TrapError, match=rf"^EP305: rank 0 traps: 1 thread trapped at {HERE}:\d+: ep.trap\(\) \(first: block 0 thread \d+\)$"
    ):
        rank.synchronize()
    a.copy_from(np.array([0, 0], np.int32))
    traps.launch(rank, grid=1, block=warp_size(device_name), args=(a,))
    assert a.numpy().tolist() == [0, 5]


def test_assembly_needs_its_vendor_and_no_simulator() -> None:
    @ep.kernel
    def assembly(out: ep.Ptr[ep.u32]):
        if ep.target.simulated:
            out[0] = 7
        elif ep.target.vendor == "nvidia":
            out[0] = ep.inline_asm("mov.u32 $0, %laneid;", "=r", result=ep.u32, vendor="nvidia")
        else:
            out[0] = ep.inline_asm("v_mov_b32 $0, $1", "=v,v", ep.u32(3), result=ep.u32, vendor="amd")

    assert "%laneid" in assembly.compile("sm_90").text("ptx")
    assert "v_mov_b32" in assembly.compile("gfx942").text("gcn")
    assembly.compile("sim:amd")
