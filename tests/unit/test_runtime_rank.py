"""Ranks, symmetric memory and spawn, on a device that is host memory."""

import os
import signal
import threading
import time

import numpy as np
import pytest
from epdsl_runtime.bootstrap import RankFailed, ThreadBootstrap, ThreadHub
from epdsl_runtime.context_layout import RANK
from epdsl_runtime.launchers import Launched, job_token, launched
from epdsl_runtime.rank import CollectiveError, Rank
from epdsl_runtime.spawn import GpuFactory, _local_device, init, spawn
from runtime_fakes import FakeDevice


def each(body, size):
    """Runs body(rank) in a thread per rank; returns results or exceptions, and the devices."""
    hub, outcomes, devices = ThreadHub(size), {}, [FakeDevice(index) for index in range(size)]

    def run(index):
        try:
            outcomes[index] = body(Rank(index, size, devices[index], ThreadBootstrap(hub, index, timeout=10)))
        except Exception as error:
            outcomes[index] = error
            hub.abort(index, str(error))

    threads = [threading.Thread(target=run, args=(index,)) for index in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return [outcomes[index] for index in range(size)], devices


def exchange(rank):
    """Every rank writes its number into its slot of every peer's buffer, through the peer table."""
    made = rank.symmetric("i32", (rank.size, 2), name="slots")
    assert made.local.numpy().tolist() == [[0, 0]] * rank.size
    rank.barrier()
    table = made.peers.table.numpy()
    assert table.tolist() == list(made.peers.addresses) and made.peers.addresses[rank.index] == made.local.address
    for peer in range(rank.size):
        row = np.array([rank.index, peer], np.int32)
        rank.device.upload(int(table[peer]) + 8 * rank.index, row)
    rank.barrier()
    found = made.local.numpy()
    rank.close()
    return found.tolist()


def test_symmetric_memory_reaches_every_peer():
    outcomes, devices = each(exchange, 3)
    assert outcomes == [[[source, rank] for source in range(3)] for rank in range(3)]
    for device in devices:
        assert device.closed and [kind for kind, _ in device.events] == ["open", "open", "close", "close", "free", "free"]
    assert [int(device.context_words[RANK]) for device in devices] == [0, 1, 2]


def test_every_rank_unmaps_before_any_frees():
    log = []
    lock = threading.Lock()

    def body(rank):
        made = rank.symmetric("f32", 4)
        close, free = rank.device.close_memory, rank.device.free

        def logged(name, call):
            def run(address):
                with lock:
                    log.append(name)
                call(address)

            return run

        rank.device.close_memory, rank.device.free = logged("close", close), logged("free", free)
        rank.release(made)
        with pytest.raises(ValueError, match="released already"):
            rank.release(made)
        with pytest.raises(ValueError, match="was freed"):
            made.local.numpy()

    outcomes, _ = each(body, 3)
    assert outcomes == [None] * 3
    assert log[:6] == ["close"] * 6 and log[6:] == ["free"] * 6


def test_symmetric_memory_is_not_freed_by_hand():
    def body(rank):
        rank.symmetric("f32", 4, name="mine").local.free()

    outcomes, _ = each(body, 1)
    assert "belongs to mine of" in str(outcomes[0])


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        (512.0, "a shape is a whole number or a tuple of them, got 512.0; write 4 or (4, 8), n // 2 and not n / 2"),
        ((4, 2.5), "a shape is a whole number or a tuple of them, got (4, 2.5); write 4 or (4, 8), n // 2 and not n / 2"),
        ("8", "a shape is a whole number or a tuple of them, got '8'; write 4 or (4, 8), n // 2 and not n / 2"),
        (None, "a shape is a whole number or a tuple of them, got None; write 4 or (4, 8), n // 2 and not n / 2"),
        (-4, "the shape (-4,) has a negative length"),
        ((2, -1), "the shape (2, -1) has a negative length"),
    ],
)
@pytest.mark.parametrize("call", ["symmetric", "empty", "zeros"])
def test_what_is_no_shape_is_refused(call, shape, text):
    outcomes, devices = each(lambda rank: getattr(rank, call)("f32", shape), 2)
    assert {str(outcome) for outcome in outcomes} == {text}
    assert [device.events for device in devices] == [[], []]


def test_ranks_that_disagree_all_hear_of_it():
    def body(rank):
        try:
            rank.symmetric("f32", 4 + rank.index)
        except CollectiveError as error:
            text = str(error)
        rank.barrier()
        assert rank.allgather(rank.index) == [0, 1]
        return text

    outcomes, devices = each(body, 2)
    assert "rank 0 has ('f32', 4, (4,)), rank 1 has ('f32', 4, (5,))" in outcomes[0]
    assert "rank 1 has ('f32', 4, (5,)), rank 0 has ('f32', 4, (4,))" in outcomes[1]
    assert [[kind for kind, _ in device.events] for device in devices] == [["free"], ["free"]]


def test_a_rank_out_of_memory_is_told_to_all_and_the_job_can_go_on():
    def body(rank):
        rank.device.fail_allocations = rank.index == 1
        with pytest.raises(CollectiveError, match=r"symmetric failed on rank 1 \(1 of 3 ranks\): MemoryError: the fake has no memory left"):
            rank.symmetric("f32", 4)
        rank.device.fail_allocations = False
        return exchange(rank)

    outcomes, _ = each(body, 3)
    assert outcomes == [[[source, rank] for source in range(3)] for rank in range(3)]


def test_a_mapping_that_fails_leaves_nothing_open():
    def body(rank):
        if rank.index == 2:
            real, calls = rank.device.open_memory, []

            def once(handle):
                calls.append(1)
                if len(calls) == 2:
                    raise OSError("no more mappings")
                return real(handle)

            rank.device.open_memory = once
        with pytest.raises(CollectiveError, match=r"symmetric mapping failed on rank 2.*no more mappings"):
            rank.symmetric("f32", 4)
        rank.barrier()
        kinds = [kind for kind, _ in rank.device.events]
        return kinds.count("open"), kinds.count("close"), kinds.count("free")

    outcomes, _ = each(body, 3)
    assert outcomes[2] == (1, 1, 1)
    assert [o[:2] for o in outcomes[:2]] == [(2, 2)] * 2


def test_ranks_in_different_calls_hear_of_it():
    outcomes, _ = each(lambda rank: rank.barrier() if rank.index else rank.symmetric("f32", 1), 2)
    assert any("all ranks must make the same calls" in str(o) for o in outcomes)


def test_callbacks_run_at_every_synchronisation():
    def body(rank):
        calls = []
        remove = rank.on_synchronize(lambda: calls.append(1))
        rank.synchronize()
        rank.barrier()
        remove()
        rank.synchronize()
        return len(calls)

    assert each(body, 2)[0] == [2, 2]


def test_arrays_of_a_rank():
    rank = Rank(0, 1, FakeDevice())
    assert rank.array([1.5, 2.5], "bf16").numpy().astype(float).tolist() == [1.5, 2.5]
    assert rank.array(np.arange(6).reshape(2, 3)[:, ::2]).numpy().tolist() == [[0, 2], [3, 5]]
    assert rank.array(np.float32(3)).shape == ()
    assert rank.empty("u16", (2, 3)).shape == (2, 3)
    assert rank.zeros(np.int64, 3).numpy().tolist() == [0, 0, 0]
    made = rank.symmetric("u32", 2)
    assert (made.peers.size, made.peers.dtype_name, made.peers.nbytes) == (1, "u32", 8)
    rank.close()
    rank.close()
    with pytest.raises(ValueError, match="rank 1 of 2 was given the connection of rank 0 of 1"):
        Rank(1, 2, FakeDevice())


# Functions that spawned processes run.


def good(rank, factor):
    return [row[0] * factor for row in exchange(rank)]


def raises(rank):
    rank.symmetric("f32", 4)
    if rank.index == 1:
        raise ValueError("a bug in rank 1")
    rank.barrier()
    time.sleep(60)


def killed(rank):
    if rank.index == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    rank.barrier()


def exits(rank):
    if rank.index == 0:
        os._exit(7)
    time.sleep(60)


def crashes(rank):
    if rank.index == 1:
        import ctypes

        ctypes.string_at(0)
    rank.barrier()


def sleeps(rank):
    time.sleep(60)


def unpicklable(rank):
    return lambda: 1


def fast(body, args=(), ranks=3, **options):
    """What spawn raises, and that it takes seconds only."""
    start = time.monotonic()
    with pytest.raises(Exception) as caught:
        spawn(body, ranks, device=FakeDevice, args=args, **options)
    assert time.monotonic() - start < 15
    return caught.value


def test_spawned_processes_share_memory_and_return_results():
    assert spawn(good, 3, device=FakeDevice, args=(10,)) == [[0, 10, 20]] * 3


def test_a_spawned_rank_that_raises_ends_the_job_with_its_traceback():
    error = fast(raises)
    assert isinstance(error, RankFailed) and error.rank == 1
    assert "a bug in rank 1" in error.text and "in raises" in error.text and isinstance(error.error, ValueError)


@pytest.mark.parametrize(
    ("body", "rank", "text"),
    [
        (killed, 2, "was ended by signal SIGKILL"),
        (exits, 0, "ended with exit status 7"),
        (crashes, 1, "was ended by signal SIGSEGV"),
        (unpicklable, 0, "pickle"),
    ],
)
def test_a_spawned_rank_that_dies_ends_the_job(body, rank, text):
    error = fast(body)
    assert isinstance(error, RankFailed) and text in error.text
    assert error.rank == rank or body is unpicklable


def test_a_job_that_takes_too_long_names_who_still_runs():
    error = fast(sleeps, timeout=4.0)
    assert isinstance(error, TimeoutError) and "took more than 4 s; still running: ranks [0, 1, 2]" in str(error)


def test_spawn_refuses_what_cannot_work(monkeypatch):
    with pytest.raises(ValueError, match="at least 1 rank, got 0"):
        spawn(good, 0)
    monkeypatch.setattr("epdsl_runtime.devices.device_count", lambda kind: 2)
    with pytest.raises(ValueError, match=r"4 ranks need 4 GPUs, this process sees 2 of kind cuda; .* share one GPU \(device='cuda:0'\)"):
        spawn(good, 4, device="cuda")


def test_ranks_share_a_gpu_that_is_named(monkeypatch):
    from epdsl_runtime.devices import Spec, most_ranks

    monkeypatch.setattr("epdsl_runtime.devices.device_count", lambda kind: 2)
    assert [most_ranks(spec) for spec in (Spec("cuda"), Spec("cuda", 1), Spec("sim"))] == [2, None, None]
    assert [GpuFactory(Spec("cuda", 1)).spec_of(index) for index in range(2)] == [Spec("cuda", 1)] * 2
    assert [GpuFactory(Spec("cuda")).spec_of(index) for index in range(2)] == [Spec("cuda", 0), Spec("cuda", 1)]


def test_the_environments_of_launchers():
    torchrun = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
    assert launched(torchrun) == Launched("torchrun", 3, 8, 1, "node0", 29501)
    mpirun = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0", "EPDSL_PORT": "4000"}
    assert launched(mpirun) == Launched("mpirun", 0, 2, 0, "127.0.0.1", 4000)
    slurm = {"SLURM_PROCID": "5", "SLURM_NTASKS": "6", "SLURM_LOCALID": "2"}
    assert launched(slurm) == Launched("Slurm", 5, 6, 2, "127.0.0.1", 29511)
    with pytest.raises(RuntimeError, match=r"torchrun: RANK, WORLD_SIZE; mpirun: OMPI_COMM_WORLD_RANK.*; Slurm: SLURM_PROCID"):
        launched({})
    with pytest.raises(RuntimeError, match="RANK=8 is not a rank of WORLD_SIZE=8"):
        launched({**torchrun, "RANK": "8"})
    assert job_token({"EPDSL_TOKEN": "x"}) == b"x"
    assert job_token({"SLURM_JOB_ID": "1"}) != job_token({"SLURM_JOB_ID": "2"})


def test_a_rank_takes_its_gpu_of_the_node(monkeypatch):
    from epdsl_runtime.devices import Spec

    job = Launched("torchrun", 3, 8, 1, "", 1)
    monkeypatch.setattr("epdsl_runtime.spawn.device_count", lambda kind: 2)
    assert _local_device(Spec("cuda"), job) == Spec("cuda", 1)
    monkeypatch.setattr("epdsl_runtime.spawn.device_count", lambda kind: 1)
    assert _local_device(Spec("cuda"), job) == Spec("cuda", 0)
    monkeypatch.setattr("epdsl_runtime.spawn.device_count", lambda kind: 2)
    with pytest.raises(ValueError, match="rank 3 is number 4 on its node and needs that GPU, this process sees 2"):
        _local_device(Spec("cuda"), Launched("torchrun", 3, 8, 4, "", 1))


def torchrun_rank(index, port, results):
    os.environ.update(RANK=str(index), WORLD_SIZE="2", LOCAL_RANK=str(index), EPDSL_PORT=str(port))
    import epdsl_runtime.spawn as module

    module.open_spec = lambda spec: FakeDevice(spec.index or 0)
    module.device_count = lambda kind: 2
    with init("cuda") as rank:
        results.put((index, exchange(rank)))


def test_init_under_a_launchers_environment():
    import multiprocessing
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [context.Process(target=torchrun_rank, args=(index, port, results)) for index in range(2)]
    for process in processes:
        process.start()
    assert sorted(results.get(timeout=60) for _ in range(2)) == [(0, [[0, 0], [1, 0]]), (1, [[0, 1], [1, 1]])]
    for process in processes:
        process.join(20)
        assert process.exitcode == 0
