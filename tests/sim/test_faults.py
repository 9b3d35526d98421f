"""Jobs in which a rank dies, does not come, is wrong or has no memory: each ends in time in an error that says so, and leaves nothing."""

from __future__ import annotations

import multiprocessing
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import fault_jobs
import numpy as np
import pytest
from device_ranks import ranks_on
from epdsl_runtime import DeviceAssertionError, PeerTimeout, RankFailed
from epdsl_runtime.devices import most_ranks, parse_spec
from epdsl_runtime.sim_process import SimProcesses
from test_graphs import Step, layer_of

import epdsl as ep

MARGIN = 2.0


def held() -> list[str]:
    """Sockets and memory files that this process has open."""
    found: list[str] = []
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            found.append(os.readlink(entry))
    return [name for name in found if name.startswith(("socket:", "/memfd:"))]


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Neither processes, nor open files and sockets, nor threads of ours, nor shared memory."""
    shared = Path("/dev/shm")
    if "device_name" in request.fixturenames:
        # A GPU's driver opens a socket of its own.
        most_ranks(parse_spec(request.getfixturevalue("device_name")))
    before = len(held())
    yield
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        threads = [t.name for t in threading.enumerate() if t.name.startswith("epdsl-hub")]
        if not multiprocessing.active_children() and len(held()) <= before and not threads:
            break
        time.sleep(0.05)
    else:
        pytest.fail(f"left: {multiprocessing.active_children()}, {held()} (before: {before}), {threads}")
    assert not [p.name for p in shared.iterdir() if p.name.startswith("epdsl")]


def under_a_launcher(name: str, *args: Any, size: int = 2, device: str = "sim", answers: int | None = None) -> dict[int, Any]:
    """Runs a job of `fault_jobs` in processes that meet by themselves, as under torchrun: nobody watches them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [
        context.Process(target=fault_jobs.launched, args=(index, size, port, results, name, args, device)) for index in range(size)
    ]
    for process in processes:
        process.start()
    found = dict(results.get(timeout=60) for _ in range(size if answers is None else answers))
    for process in processes:
        process.join(20)
        assert process.exitcode is not None, f"{process.name} still runs"
        process.close()
    results.close()
    results.join_thread()
    return found


def test_processes_that_meet_by_themselves_exchange(device_name: str) -> None:
    size = ranks_on(device_name, 3)
    wanted = [10 + rank for rank in range(size)]
    assert under_a_launcher("sums", size=size, device=device_name) == {rank: (wanted, size) for rank in range(size)}


@pytest.mark.parametrize("when", ["before", *(pytest.param(when, marks=pytest.mark.slow) for when in ("during", "after"))])
def test_a_killed_rank_is_named_by_the_one_that_waits(tmp_path: Path, when: str) -> None:
    ((kind, who, text), seconds) = under_a_launcher("killed", when, "latency", str(tmp_path / "note"), answers=1)[0]
    assert seconds < fault_jobs.DEADLINE + MARGIN
    # A rank that died after all its flags were out is noticed by its connection alone.
    if kind == "PeerTimeout":
        assert who == (1,) and "did not arrive: rank 1" in text and "rank 1: failed (its process ended without closing the rank" in text
    else:
        assert (kind, who) == ("RankFailed", 1) and when != "before"


@pytest.mark.parametrize(
    ("when", "mode"),
    [
        ("before", "latency"),
        pytest.param("during", "base", marks=pytest.mark.slow),
        pytest.param("after", "throughput", marks=pytest.mark.slow),
    ],
)
def test_a_killed_rank_ends_a_spawned_job(tmp_path: Path, when: str, mode: str) -> None:
    with pytest.raises(RankFailed, match="was ended by signal SIGKILL") as caught:
        ep.spawn(fault_jobs.killed, 2, device=SimProcesses(), args=(when, mode, str(tmp_path / "note")), timeout=60)
    seconds = time.monotonic() - float((tmp_path / "note").read_text())
    assert caught.value.rank == 1 and seconds < fault_jobs.DEADLINE + MARGIN


@pytest.mark.parametrize("mode", ["latency", "stamps", "throughput", "base"])
def test_a_rank_that_never_launches_is_named(mode: str) -> None:
    found: list[Any] = ep.spawn(fault_jobs.absent, 2, device="sim", args=(mode,), timeout=60)
    (kind, who, text), seconds = found[0]
    assert (kind, who) == ("PeerTimeout", (1,)) and seconds < fault_jobs.DEADLINE + MARGIN
    assert "did not arrive: rank 1" in text and "rank 1: in a meeting of the ranks (allgather)" in text


def test_a_rank_of_another_process_that_never_launches_is_named() -> None:
    found: list[Any] = ep.spawn(fault_jobs.absent, 2, device=SimProcesses(), args=("latency",), timeout=60)
    (kind, who, text), seconds = found[0]
    assert (kind, who) == ("PeerTimeout", (1,)) and fault_jobs.DEADLINE <= seconds < fault_jobs.DEADLINE + MARGIN
    assert "rank 1: in a meeting of the ranks (allgather)" in text
    assert "launched LowLatencyExchange_dispatch 1 times, scale_slots 1 times, LowLatencyExchange_combine 1 times" in text


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("hidden", r"LowLatencyMoE: hidden differs by rank: rank {me} has {mine}, rank {other} has {theirs}"),
        ("experts", r"ExpertParallel: n_experts differs by rank: rank {me} has {mine}, rank {other} has {theirs}"),
        ("buffer", r"symmetric differs by rank: rank {me} has ('u32', 4, ({mine},)), rank {other} has ('u32', 4, ({theirs},))"),
    ],
)
def test_a_rank_with_another_configuration_is_refused_with_both_values(what: str, text: str) -> None:
    values = {"hidden": (256, 512), "experts": (8, 16), "buffer": (4, 5)}[what]
    found: list[Any] = ep.spawn(fault_jobs.disagreeing, 2, device="sim", args=(what,), timeout=60)
    for me, (kind, _, said) in enumerate(found):
        assert kind == ("CollectiveError" if what == "buffer" else "Disagreement")
        assert said == {"buffer": "EP313"}.get(what, "EP312") + ": " + text.format(
            me=me, mine=values[me], other=1 - me, theirs=values[1 - me]
        )


def garbled(rank: ep.Rank, mode: str) -> Any:
    """Rank 1 writes a count that cannot be into rank 0's memory, with the number of rank 0's launch."""
    layer = layer_of(rank, mode, timeout_ns=10**9)
    step = Step(rank, layer, mode, 4)
    step.fill(3, rank.index)
    rank.barrier()
    if rank.index == 1:
        symmetric = {
            "latency": lambda: layer._wire[-1],
            "stamps": lambda: layer._wire[0],
            "throughput": lambda: layer._counts,
            "base": lambda: layer._recv_counts,
        }[mode]()
        words = np.full(symmetric.local.size, 1 << 32 | 12345, np.uint64)
        rank.device.upload(symmetric.peers.addresses[0], words)
    rank.barrier()
    if rank.index == 0:
        layer.dispatch(step.x, step.ids, step.weights)
        with pytest.raises(DeviceAssertionError) as caught:
            rank.synchronize()
        return str(caught.value)
    return None


@pytest.mark.parametrize("mode", ["latency", "stamps", "throughput", "base"])
def test_a_garbled_count_is_reported(device_name: str, mode: str) -> None:
    text = ep.spawn(garbled, 2, device=device_name, args=(mode,), timeout=60)[0]
    assert "12345" in text and "a device assert failed: rank 0" in text


def test_a_device_assert_is_named() -> None:
    first, second = ep.spawn(fault_jobs.asserting, 2, device=SimProcesses(), timeout=60)
    assert first == "nothing"
    kind, rank, text = second
    assert (kind, rank) == ("DeviceAssertionError", 1) and "row 95 of 95" in text and "fault_jobs.py" in text


def test_out_of_memory_in_the_middle_of_set_up() -> None:
    for (kind, _, text), held in ep.spawn(fault_jobs.out_of_memory, 2, device=SimProcesses(), args=(4,), timeout=60):
        assert kind == "CollectiveError" and text.startswith("EP313: symmetric failed on rank 1 (1 of 2 ranks): MemoryError: ")
        assert "0 are left" in text and held == 0


def test_more_memory_than_there_is() -> None:
    for kind, _, text in ep.spawn(fault_jobs.too_much, 2, device=SimProcesses(), args=(1 << 46,), timeout=60):
        assert kind == "CollectiveError" and f"MemoryError: {1 << 46} bytes of shared memory asked for, " in text


def test_a_job_of_the_simulator_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    """Its ranks' processes end with the one that started them."""
    code = f"""
import os, sys, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_faults import linger
import epdsl as ep
from epdsl_runtime.sim_process import SimProcesses
if __name__ == "__main__":
    ep.spawn(linger, 2, device=SimProcesses(), args=({str(tmp_path)!r},))
"""
    script = tmp_path / "job.py"
    script.write_text(code)
    process = subprocess.Popen([sys.executable, str(script)])
    deadline = time.monotonic() + 30
    while len(pids := list(tmp_path.glob("*.pid"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(pids) == 2
    process.kill()
    process.wait(10)
    deadline = time.monotonic() + MARGIN
    while alive := [p for p in pids if Path(f"/proc/{p.stem}").exists()]:
        assert time.monotonic() < deadline, f"still running: {alive}"
        time.sleep(0.02)


def linger(rank: ep.Rank, folder: str) -> None:
    rank.symmetric("u32", 1 << 20)
    Path(folder, f"{os.getpid()}.pid").touch()
    rank.barrier()
    time.sleep(60)


@ep.kernel
def one_waits_the_others_wait_for_it(word: ep.Peers[ep.u32], out: ep.Ptr[ep.u32], me: ep.i32):
    """Thread 0 waits for rank 1, which never comes; the others wait for thread 0 where no deadline ends the wait."""
    if ep.thread_idx.x == 0:
        ep.wait(word[me], until=lambda v: v == 7, order=ep.ACQUIRE, scope=ep.SYSTEM, timeout_ns=10**8)
    ep.named_barrier(1, 64)
    out[ep.thread_idx.x] = 1


def left_at_a_barrier(rank: ep.Rank) -> str:
    word = rank.symmetric("u32", 1, "mailbox", lambda _: 1)
    out = rank.zeros("u32", 64)
    rank.barrier()
    text = ""
    if rank.index == 0:
        one_waits_the_others_wait_for_it.launch(rank, grid=1, block=64, args=(word.peers, out, 0))
        with pytest.raises(PeerTimeout) as caught:
            rank.synchronize()
        assert caught.value.peers == (1,) and caught.value.__cause__ is None
        text = str(caught.value)
        assert out.numpy().tolist() == [0] * 64
    rank.allgather("seen")
    return text


@pytest.mark.parametrize("device", ["sim", SimProcesses()])
def test_threads_left_at_a_barrier_are_a_note_of_the_timeout(device: Any) -> None:
    text = ep.spawn(left_at_a_barrier, 2, device=device, timeout=60)[0]
    first, *_, before, left = (line for line in text.splitlines() if not line.startswith("  rank 1: "))
    assert "a wait timed out: rank 0, kernel one_waits_the_others_wait_for_it" in first
    assert before == "  after that nothing could go on, so the kernel was ended:"
    assert "63 threads at a named barrier" in left and "63 of 64 threads have arrived" in left


# ---- looking at a job that seems stuck


@ep.kernel
def wait_for_a_word(word: ep.Peers[ep.u32], me: ep.i32, wanted: ep.u32):
    """Waits for what the other rank writes when it has been told of the wait."""
    ep.wait(word[me], until=lambda v: v == wanted, order=ep.ACQUIRE, scope=ep.SYSTEM, timeout_ns=20 * 10**9)


@ep.kernel
def write_a_word(word: ep.Peers[ep.u32], peer: ep.i32, value: ep.u32):
    if ep.thread_idx.x == 0:
        ep.store(word[peer], value, order=ep.RELEASE, scope=ep.SYSTEM)


def looked_at(rank: ep.Rank) -> list[str]:
    """Rank 1: what health() says of rank 0 while it waits, a line each, and what it says afterwards as the last."""
    words = rank.symmetric("u32", 1, "mailbox", lambda _: 1)
    rank.barrier()
    if rank.index == 0:
        wait_for_a_word.launch(rank, grid=1, block=64, args=(words.peers, 0, 7))
        rank.synchronize()
        rank.barrier()
        rank.barrier()
        return []
    deadline = time.monotonic() + 20
    while "waiting for memory" not in (text := str(rank.health()[0])) and time.monotonic() < deadline:
        time.sleep(0.1)
    write_a_word.launch(rank, grid=1, block=64, args=(words.peers, 0, 7))
    rank.barrier()
    while "waiting for memory" in (afterwards := str(rank.health()[0])) and time.monotonic() < deadline:
        time.sleep(0.1)
    rank.barrier()
    return [*text.splitlines(), afterwards]


def test_health_says_who_waits_where(device_name: str) -> None:
    on_sim = device_name.startswith("sim")
    device = SimProcesses(vendor=device_name.partition(":")[2]) if on_sim else device_name
    (_, lines) = ep.spawn(looked_at, 2, device=device, timeout=60)
    assert lines[0].startswith("rank 0: in a wait for its device for ") and "launched wait_for_a_word 1 times" in lines[0]
    assert lines[1].startswith("  rank 0 wait_for_a_word: " + ("64 threads " if on_sim else "waiting for memory at "))
    memory = lines[2 if on_sim else 3]
    assert memory.startswith("    address 0x") and " holds 0 (mailbox (u32 [1]) of rank 0" in memory
    (place,) = re.findall(r"test_faults\.py:(\d+): v == wanted", lines[1])
    assert "ep.wait(word[me]" in Path(__file__).read_text().splitlines()[int(place) - 1]
    if not on_sim:
        assert "(compared with 7) for " in lines[1]
        assert re.fullmatch(r"    block 0 thread \d+; not yet from rank 1", lines[2])
    assert "launched wait_for_a_word 1 times" in lines[-1] and "waiting for memory" not in lines[-1]
