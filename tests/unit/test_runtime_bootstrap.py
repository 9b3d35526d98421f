"""Ranks meeting on the host: threads, and real processes that come, fail, die or do not come."""

import multiprocessing
import os
import pickle
import signal
import socket
import threading
import time

import pytest
from epdsl_runtime.bootstrap import BootstrapTimeout, RankFailed, ThreadBootstrap, ThreadHub
from epdsl_runtime.rendezvous import Hub, SocketBootstrap
from epdsl_runtime.wire import GATHER, send

TOKEN = b"a token of this test"
RANKS = 4


def member(index, address, behaviour, results, timeout=20.0):
    """One process. Puts (index, what came of it, seconds the last wait took)."""
    rank = SocketBootstrap(index, RANKS, address, TOKEN, timeout=timeout)
    assert rank.allgather(("first", index)) == [("first", r) for r in range(RANKS)]
    if index == 2 and behaviour == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if index == 2 and behaviour == "raises":
        rank.abort("Traceback: ValueError: a bug in rank 2")
        os._exit(1)
    start = time.monotonic()
    try:
        big = rank.allgather(bytes([index]) * (1 << 20))
        assert [len(part) for part in big] == [1 << 20] * RANKS and [part[0] for part in big] == list(range(RANKS))
        for number in range(200):
            assert rank.allgather(number * RANKS + index) == [number * RANKS + r for r in range(RANKS)]
        rank.barrier()
        rank.check()
        rank.close()
        results.put((index, "done", time.monotonic() - start))
    except RankFailed as error:
        results.put((index, f"{error.rank}: {error.text}", time.monotonic() - start))


def run(behaviour):
    context = multiprocessing.get_context("spawn")
    hub, results = Hub(RANKS, TOKEN), context.Queue()
    processes = [context.Process(target=member, args=(index, hub.address, behaviour, results)) for index in range(RANKS)]
    for process in processes:
        process.start()
    expected = RANKS if behaviour == "good" else RANKS - 1
    told = sorted(results.get(timeout=60) for _ in range(expected))
    for process in processes:
        process.join(20)
        assert process.exitcode is not None
    hub.close()
    return told


def test_four_processes_exchange_objects():
    assert [(index, text) for index, text, _ in run("good")] == [(r, "done") for r in range(RANKS)]


def test_a_killed_process_ends_every_wait_within_a_second():
    told = run("killed")
    assert [index for index, _, _ in told] == [0, 1, 3]
    for _, text, seconds in told:
        assert text.startswith("2: its process ended without closing the rank") and seconds < 1


def test_the_traceback_of_a_rank_that_fails_reaches_the_others():
    for _, text, seconds in run("raises"):
        assert text == "2: Traceback: ValueError: a bug in rank 2" and seconds < 1


def connect_all(hub, timeout=5.0, ranks=range(2)):
    made = {}

    def connect(index):
        made[index] = SocketBootstrap(index, hub.size, hub.address, TOKEN, timeout=timeout)

    threads = [threading.Thread(target=connect, args=(index,)) for index in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    return [made[index] for index in ranks]


def test_a_rank_that_does_not_come_is_named():
    hub = Hub(2, TOKEN)
    (zero,) = connect_all(hub, 0.3, [0])
    with pytest.raises(BootstrapTimeout, match=r"rank 0 waited 0.3 s for the other ranks; missing: rank 1"):
        zero.barrier()
    hub.close()


def test_check_tells_of_a_failure_without_waiting():
    hub = Hub(2, TOKEN)
    zero, one = connect_all(hub)
    zero.check()
    one.abort("gone")
    deadline = time.monotonic() + 5
    with pytest.raises(RankFailed, match="rank 1 failed:\ngone"):
        while time.monotonic() < deadline:
            zero.check()
            time.sleep(0.01)
    with pytest.raises(RankFailed):
        zero.allgather(1)
    hub.close()


class SlowAfterwards:
    """A connection that takes its time after each frame it has sent."""

    def __init__(self, connection, seconds):
        self._connection, self._seconds = connection, seconds

    def __getattr__(self, name):
        return getattr(self._connection, name)

    def sendall(self, data):
        self._connection.sendall(data)
        time.sleep(self._seconds)


@pytest.mark.parametrize("end", ["aborts", "leaves without a word"])
def test_a_failure_never_overtakes_a_meeting_that_was_complete_before_it(end):
    """Rank 0 has its result, and fails, before the hub has handed the others theirs."""
    hub = Hub(4, TOKEN)
    ranks = connect_all(hub, ranks=range(4))
    hub._lines[0].connection = SlowAfterwards(hub._lines[0].connection, 0.3)
    found = {}

    def body(rank):
        found[rank.index] = rank.allgather(rank.index)
        if rank.index == 0 and end == "aborts":
            rank.abort("a bug")
        elif rank.index == 0:
            rank._connection.shutdown(socket.SHUT_RDWR)
        else:
            with pytest.raises(RankFailed, match="rank 0 failed") as caught:
                rank.barrier()
            found[rank.index] = found[rank.index], caught.value.rank

    threads = [threading.Thread(target=body, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    hub.close()
    assert found == {0: [0, 1, 2, 3], **{rank: ([0, 1, 2, 3], 0) for rank in (1, 2, 3)}}


def test_a_rank_that_does_not_read_holds_up_nobody():
    """Rank 1 reads nothing of a meeting larger than what a connection buffers; rank 0 has it, and the hub ends."""
    hub = Hub(2, TOKEN)
    zero, one = connect_all(hub)
    payload = bytes(32 << 20)
    send(one._connection, GATHER, 1, 0, pickle.dumps((("127.0.0.1", 1), payload)))
    start = time.monotonic()
    assert [len(part) for part in zero.allgather(payload)] == [32 << 20] * 2
    hub.abort(1, "it does not read")
    with pytest.raises(RankFailed, match="it does not read"):
        zero.barrier()
    hub.close()
    assert time.monotonic() - start < 5


def test_a_late_rank_hears_of_an_earlier_failure():
    hub = Hub(2, TOKEN)
    (zero,) = connect_all(hub, ranks=[0])
    zero.abort("early")
    (one,) = connect_all(hub, ranks=[1])
    with pytest.raises(RankFailed, match="early"):
        one.barrier()
    hub.close()


def test_a_stranger_and_a_double_are_refused():
    hub = Hub(2, TOKEN)
    with pytest.raises(ConnectionError, match="was refused"):
        SocketBootstrap(0, 2, hub.address, b"another token", timeout=2)
    (zero,) = connect_all(hub, ranks=[0])
    with pytest.raises(ConnectionError, match="rank 0 came twice"):
        SocketBootstrap(0, 2, hub.address, TOKEN, timeout=2)
    assert zero.index == 0
    hub.close()


def test_a_rendezvous_that_is_not_there_is_named():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = free.getsockname()
    with pytest.raises(BootstrapTimeout, match=f"rank 1 could not reach the rendezvous at 127.0.0.1:{address[1]} in 0.2 s"):
        SocketBootstrap(1, 2, address, TOKEN, timeout=0.2)


def threads_of(body, size, on_block=None, timeout=10.0):
    hub, outcomes = ThreadHub(size), {}

    def run_one(index):
        rank = ThreadBootstrap(hub, index, on_block, timeout)
        try:
            outcomes[index] = body(rank)
        except Exception as error:
            outcomes[index] = error
            rank.abort(str(error))

    threads = [threading.Thread(target=run_one, args=(index,)) for index in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return [outcomes[index] for index in range(size)], hub


def test_threads_exchange_objects():
    outcomes, hub = threads_of(lambda rank: [rank.allgather((n, rank.index)) for n in range(50)], 5)
    assert outcomes == [[[(n, r) for r in range(5)] for n in range(50)]] * 5
    assert not hub.values and not hub.taken


def test_a_thread_that_fails_ends_the_others_wait():
    def body(rank):
        if rank.index == 1:
            raise ValueError("a bug")
        rank.barrier()

    outcomes, _ = threads_of(body, 3)
    assert isinstance(outcomes[1], ValueError)
    assert [(type(o), o.rank, o.text) for o in (outcomes[0], outcomes[2])] == [(RankFailed, 1, "a bug")] * 2


def test_a_thread_that_does_not_come_is_named():
    outcomes, _ = threads_of(lambda rank: rank.barrier() if rank.index else None, 2, timeout=0.1)
    assert "rank 1 waited 0.1 s for the other ranks; missing: 0" in str(outcomes[1])


def test_threads_wait_the_way_they_are_told():
    calls = []

    def on_block(predicate):
        calls.append(1)
        while not predicate():
            time.sleep(0.001)

    outcomes, _ = threads_of(lambda rank: rank.allgather(rank.index), 3, on_block)
    assert outcomes == [[0, 1, 2]] * 3 and len(calls) == 3
