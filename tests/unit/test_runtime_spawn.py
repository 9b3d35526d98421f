"""What `spawn` refuses before it starts anything, and programs around it: without a guard, from no file, interrupted once and twice."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from epdsl_runtime import JobTimeout, RankFailed, SpawnError
from epdsl_runtime.spawn import init, spawn
from runtime_fakes import FakeDevice
from test_runtime_rank import good


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        ({"ranks": 2.0}, TypeError, "ranks is a whole number, not 2.0"),
        ({"ranks": "2"}, TypeError, "ranks is a whole number, not '2'"),
        ({"ranks": -1}, ValueError, "a job has at least 1 rank, got -1"),
        ({"main": 5}, TypeError, r"main is a function that every rank calls as main\(rank, \*args\), not 5"),
        ({"args": 5}, TypeError, r"args is a tuple or a list of what main gets after the rank, not 5; write args=\(5,\) for one"),
        ({"args": "ab"}, TypeError, "args is a tuple or a list"),
        ({"timeout": -1}, ValueError, "timeout=-1: a number of seconds above 0"),
        ({"timeout": float("nan")}, ValueError, "timeout=nan: a number of seconds above 0"),
        ({"timeout": "5"}, TypeError, "timeout is a number of seconds, not '5'"),
        ({"seed": -1}, ValueError, "seed=-1: a seed is 0 or more"),
        ({"device": None}, TypeError, "device is sim, sim:nvidia, .*, or a function from a rank's number to a device, not None"),
        ({"device": "cpu"}, ValueError, "'cpu' names no device; it is sim, "),
        ({"peer_memory": "smoke"}, ValueError, "peer memory by 'smoke': it is fabric, fd, ipc or auto"),
    ],
)
@pytest.mark.parametrize("device", ["sim", FakeDevice])
def test_wrong_arguments_start_nothing(wrong, error, text, device, monkeypatch):
    def started(*args):
        raise AssertionError("something was started")

    monkeypatch.setattr("epdsl_runtime.spawn_processes.Hub", started)
    monkeypatch.setattr("epdsl_runtime.spawn.ThreadHub", started)
    with pytest.raises(error, match=text):
        spawn(**{"main": good, "ranks": 2, "device": device, "args": (1,), **wrong})


def test_a_wrong_device_names_the_variable_that_chose_it(monkeypatch):
    monkeypatch.setenv("EPDSL_DEVICE", "cpu")
    with pytest.raises(ValueError, match="EPDSL_DEVICE='cpu' names no device"):
        spawn(good, 2)


def test_a_gpu_that_is_not_there_is_refused_before_a_process_is_started(monkeypatch):
    monkeypatch.setattr("epdsl_runtime.devices.device_count", lambda kind: 2)
    monkeypatch.setattr("epdsl_runtime.spawn_processes.spawn_processes", None)
    with pytest.raises(RuntimeError, match="EP221: cuda:2 does not exist: this process sees 2 GPUs of kind cuda"):
        spawn(good, 2, device="cuda:2")


def test_init_refuses_a_timeout_that_cannot_be():
    with pytest.raises(ValueError, match="timeout=0: a number of seconds above 0"):
        init("sim", timeout=0)


def test_main_that_a_process_cannot_be_given():
    def inside(rank):
        return rank.index

    for main, name in ((lambda rank: 1, r"\S*<lambda>"), (inside, r"\S*<locals>.inside")):
        with pytest.raises(SpawnError, match=f"EP317: main is {name}, which a rank's process cannot import; write it with def"):
            spawn(main, 2, device=FakeDevice)
    with pytest.raises(SpawnError, match=r"EP317: main, args or device cannot be sent to a rank's process: .*args what pickle takes"):
        spawn(good, 2, device=FakeDevice, args=(lambda: 1,))


def spawns(rank):
    return spawn(good, 2, device=FakeDevice, args=(1,))


def test_a_rank_starts_no_processes_of_its_own():
    with pytest.raises(RankFailed, match=r"EP317: spawn was called in epdsl-rank-0, a process that may start no others \(a rank of a job"):
        spawn(spawns, 1, device=FakeDevice)


def stops(rank):
    if rank.index == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    rank.barrier()


def test_a_job_that_takes_too_long_says_what_its_ranks_do():
    """Rank 1 is stopped, and has to be killed: it cannot hear that it is to end."""
    start = time.monotonic()
    with pytest.raises(JobTimeout, match=r"EP318: the job took more than 4 s; still running: ranks \[0, 1\]") as caught:
        spawn(stops, 2, device=FakeDevice, timeout=4)
    assert "\n  rank 0: in a meeting of the ranks (barrier) for " in str(caught.value)
    assert re.search(r"\n  rank 1: (in its own work for|running)", str(caught.value)) and time.monotonic() - start < 12


def ends_with_another_job(rank):
    """A job inside a rank fails, which is that rank's own failure."""
    if rank.index == 1:
        spawn(fails, 1, device="sim")
    rank.barrier()


def fails(rank):
    raise ValueError("the job inside")


def test_the_failure_of_a_job_inside_a_rank_is_that_ranks_own():
    with pytest.raises(RankFailed) as caught:
        spawn(ends_with_another_job, 2, device=FakeDevice)
    assert caught.value.rank == 1 and "the job inside" in caught.value.text


def waits(rank, folder):
    Path(folder, str(rank.index)).touch()
    if rank.index == 1:
        time.sleep(2)
    else:
        rank.barrier()


def test_threads_end_when_what_started_them_does(tmp_path):
    def watch(ranks):
        if len(list(tmp_path.iterdir())) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        spawn(waits, 3, device="sim", args=(tmp_path,), watch=watch)
    deadline = time.monotonic() + 10
    while [t for t in threading.enumerate() if t.name in ("epdsl-rank-0", "epdsl-rank-2")]:
        assert time.monotonic() < deadline, "ranks still wait for each other"
        time.sleep(0.05)


# ---- programs

HEAD = f"""
import os, signal, sys, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
from epdsl_runtime.spawn import spawn
from runtime_fakes import FakeDevice
"""
STUBBORN = """
def main(rank):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    print(os.getpid(), flush=True)
    time.sleep(60)


if __name__ == "__main__":
    # A shell that runs the tests in the background has them, and what they start, ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    spawn(main, 2, device=FakeDevice)
"""
NO_GUARD = """
def main(rank):
    return 1


spawn(main, 2, device=FakeDevice)
"""


def started(tmp_path, text, **options):
    script = tmp_path / "job.py"
    script.write_text(HEAD + text)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment, **options}
    return subprocess.Popen([sys.executable, str(script)] if "stdin" not in pipes else [sys.executable, "-"], **pipes)


@pytest.mark.parametrize("times", [1, 2])
def test_an_interrupted_job_leaves_no_process_however_stubborn(tmp_path, times):
    """The end of a Python program waits for its child processes, and these do not end when they are asked."""
    process = started(tmp_path, STUBBORN, start_new_session=True)
    assert process.stdout is not None
    pids = [int(process.stdout.readline()) for _ in range(2)]
    try:
        for _ in range(times):
            os.kill(process.pid, signal.SIGINT)
            time.sleep(0.4)
        _, said = process.communicate(timeout=15)
        assert said.strip().endswith("KeyboardInterrupt")
        assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    finally:
        for pid in [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
            os.kill(pid, signal.SIGKILL)
        process.kill()
        process.communicate()


def test_a_program_without_a_guard_is_told_so(tmp_path):
    _, said = started(tmp_path, NO_GUARD).communicate(timeout=60)
    assert "spawn was called while a rank's process was importing this script; put the call under: if __name__ == '__main__':" in said
    assert "and before it met the others: it may have failed in importing the script that starts the ranks. What it printed says" in said


def test_a_program_that_is_no_file_is_refused(tmp_path):
    _, said = started(tmp_path, "", stdin=subprocess.PIPE).communicate(HEAD + NO_GUARD, timeout=60)
    assert "EP317: this program is <stdin>, which is no file: a rank's process cannot import it. Put it into a file" in said
    assert said.count("Traceback") == 1
