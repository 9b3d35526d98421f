"""Going on without dead ranks: who agrees with whom, a hub that is gone, memory given back, and routings around experts that are gone."""

import threading
import time

import numpy as np
import pytest
from epdsl_runtime.bootstrap import BootstrapTimeout, Disagreement, RankFailed, ThreadBootstrap, ThreadHub
from epdsl_runtime.rank import Rank
from epdsl_runtime.rendezvous import Hub, SocketBootstrap
from runtime_fakes import FakeDevice

from epdsl.survivors import route_around

TOKEN = b"a token of this test"


def together(calls):
    """Runs each call in a thread of its own; by name what it returned or raised."""
    found = {}

    def run(name, call):
        try:
            found[name] = call()
        except Exception as error:
            found[name] = error

    threads = [threading.Thread(target=run, args=item) for item in calls.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    return found


def processes(size, timeout=5.0):
    """The connections of a job of `size` ranks that have met once, and its hub."""
    hub = Hub(size, TOKEN)
    made = together({i: lambda i=i: SocketBootstrap(i, size, hub.address, TOKEN, timeout=timeout) for i in range(size)})
    together({i: made[i].barrier for i in range(size)})
    return made, hub


def threads(size, timeout=5.0):
    hub = ThreadHub(size)
    made = {i: ThreadBootstrap(hub, i, timeout=timeout) for i in range(size)}
    together({i: made[i].barrier for i in range(size)})
    return made, None


@pytest.mark.parametrize("job", [processes, threads])
def test_the_living_meet_again_in_their_order(job):
    ranks, _ = job(4)
    ranks[1].abort("a bug")
    new = together({i: lambda i=i: ranks[i].without((1,)) for i in (0, 2, 3)})
    assert {i: (new[i].index, new[i].size) for i in new} == {0: (0, 3), 2: (1, 3), 3: (2, 3)}
    for number in range(3):
        found = together({i: lambda i=i, number=number: new[i].allgather((number, i)) for i in new})
        assert list(found.values()) == [[(number, i) for i in (0, 2, 3)]] * 3
    # A failure in the new job, told through the old connection as a launcher's hook does, ends the others' waits.
    ranks[0].abort("another")
    found = together({i: new[i].barrier for i in (2, 3)})
    assert [(type(found[i]), found[i].rank, found[i].text) for i in (2, 3)] == [(RankFailed, 0, "another")] * 2
    for rank in ranks.values():
        rank.close()


def test_neither_the_hub_nor_the_dead_are_needed():
    """The hub's process is the one that died; the dead rank's number and token open nothing of the new job."""
    ranks, hub = processes(3)
    hub.close()
    ranks[0]._standby.close()
    new = together({i: lambda i=i: ranks[i].without((0,)) for i in (1, 2)})
    assert together({i: lambda i=i: new[i].allgather(i) for i in (1, 2)}) == {1: [1, 2], 2: [1, 2]}
    with pytest.raises(ConnectionError, match="was refused"):
        SocketBootstrap(0, 2, new[1]._hub.address, TOKEN, timeout=2)
    # Once more, from what is left.
    again = new[2].without((0,))
    assert (again.index, again.size, again.allgather("alone")) == (0, 1, ["alone"])
    for rank in (ranks[1], ranks[2]):
        rank.close()


@pytest.mark.parametrize("job", [processes, threads])
def test_ranks_that_disagree_all_get_both_values_and_may_try_again(job):
    ranks, hub = job(4)
    found = together({0: lambda: ranks[0].without((3,)), 1: lambda: ranks[1].without((2, 3)), 2: lambda: ranks[2].without((3,))})
    assert [type(error) for error in found.values()] == [Disagreement] * 3
    assert "shrink: the dead differ by rank: rank 0 has (3,), rank 1 has (2, 3)" in str(found[0])
    assert "shrink: the dead differ by rank: rank 1 has (2, 3), rank 0 has (3,)" in str(found[1])
    assert "shrink: rank 1 goes on without (2, 3), and this is rank 2; end this process" in str(found[2])
    new = together({i: lambda i=i: ranks[i].without((2, 3)) for i in (0, 1)})
    assert [new[i].size for i in (0, 1)] == [2, 2]
    for rank in ranks.values():
        rank.close()
    if hub is not None:
        hub.close()


@pytest.mark.parametrize("job", [processes, threads])
def test_a_rank_that_is_held_to_be_dead_is_told_so(job):
    ranks, hub = job(3)
    found = together({0: lambda: ranks[0].without((2,)), 1: lambda: ranks[1].without((2,)), 2: lambda: ranks[2].without((0,))})
    assert (found[0].size, found[1].size) == (2, 2)
    assert type(found[2]) is Disagreement
    assert "shrink: rank 1 goes on without (2,), and this is rank 2; end this process" in str(found[2])
    for rank in ranks.values():
        rank.close()
    if hub is not None:
        hub.close()


def test_a_rank_that_ends_meanwhile_is_named_and_left_out_next():
    ranks, hub = processes(4)
    # As the end of its process does.
    ranks[2]._standby.close()
    found = together({i: lambda i=i: ranks[i].without((3,)) for i in (0, 1)})
    assert [(type(error), error.rank) for error in found.values()] == [(RankFailed, 2)] * 2
    assert "its process ended before it went on without (3,)" in found[0].text
    new = together({i: lambda i=i: ranks[i].without((2, 3)) for i in (0, 1)})
    assert [new[i].size for i in (0, 1)] == [2, 2]
    for rank in ranks.values():
        rank.close()
    hub.close()


@pytest.mark.parametrize("job", [processes, threads])
def test_a_rank_that_does_not_come_is_named_in_time(job):
    ranks, hub = job(3)
    start = time.monotonic()
    found = together({0: lambda: ranks[0].without((2,), timeout=0.3)})
    assert type(found[0]) is BootstrapTimeout and "1" in str(found[0]) and time.monotonic() - start < 2
    for rank in ranks.values():
        rank.close()
    if hub is not None:
        hub.close()


# ---- memory


def test_memory_is_given_back_without_the_dead():
    """Every survivor unmaps what it had of every rank, the dead included, before any frees its own; then all is as new."""
    hub, devices = ThreadHub(3), [FakeDevice(index) for index in range(3)]
    log, lock = [], threading.Lock()
    left = threading.Barrier(3)

    def noted(name, call):
        def run(address):
            with lock:
                log.append(name)
            call(address)

        return run

    def body(index):
        rank = Rank(index, 3, devices[index], ThreadBootstrap(hub, index, timeout=10))
        buffers = [rank.symmetric("i32", 4), rank.symmetric("f32", 2)]
        left.wait(10)
        if index == 1:
            return None
        devices[index].close_memory, devices[index].free = (noted(n, getattr(devices[index], n)) for n in ("close_memory", "free"))
        new = rank.shrink([1])
        assert buffers[0].allocation is not None and not buffers[0].allocation.alive
        assert (new.index, new.size, new.original, new.originals) == (index // 2, 2, index, (0, 2))
        for call in (lambda: rank.symmetric("i32", 2), lambda: rank.register(None), rank.barrier, lambda: rank.shrink([2 - index])):
            with pytest.raises(
                RuntimeError, match=rf"rank {index} of 3 .* goes on as <rank {index // 2} of 2 .*: use what shrink returned"
            ):
                call()
        made = new.symmetric("i32", 2)
        for address in made.peers.addresses:
            new.device.upload(address + 4 * new.index, np.array([10 + index], np.int32))
        new.barrier()
        found = made.local.numpy().tolist()
        rank.close()
        assert devices[index].closed
        return found

    found = together({index: lambda index=index: body(index) for index in range(3)})
    assert found == {0: [10, 12], 1: None, 2: [10, 12]}
    # Two buffers of two peers each on two survivors; then their tables and memory.
    assert log[:8] == ["close_memory"] * 8 and log[8:16] == ["free"] * 8


@pytest.mark.parametrize("dead", [(), (0,), (2,), (-1,)])
def test_dead_that_cannot_be_are_refused(dead):
    rank = Rank(0, 2, FakeDevice(), ThreadBootstrap(ThreadHub(2), 0))
    with pytest.raises(ValueError, match="shrink: rank 0 of 2 cannot go on without"):
        rank.shrink(dead)


# ---- routing


def test_a_routing_around_the_dead():
    ids = [[0, 3, 7], [-1, 2, 3], [6, 9, 1], [4, 5, 11]]
    # Ranks of 2 experts; ranks 1 and 3 are gone, with experts 2, 3, 6, 7. 11 is no expert of 5 ranks, nor 7 of the 3 that live.
    found, dropped = route_around(ids, 2, (3, 1))
    assert found.tolist() == [[0, -1, -1], [-1, -1, -1], [-1, 5, 1], [2, 3, 7]]
    assert dropped.tolist() == [2, 2, 1, 0] and (found.dtype, dropped.dtype) == (np.int32, np.int32)


@pytest.mark.parametrize(
    ("ids", "experts", "dead", "error", "text"),
    [
        ([1, 2], 2, (0,), ValueError, r"topk_idx has shape \(2,\)"),
        ([[1.0]], 2, (0,), TypeError, "topk_idx holds float64"),
        ([[1]], 0, (0,), ValueError, "experts_per_rank=0"),
        ([[1]], 2, (-1,), ValueError, "dead has rank -1"),
    ],
)
def test_routings_that_cannot_be_are_refused(ids, experts, dead, error, text):
    with pytest.raises(error, match=text):
        route_around(ids, experts, dead)
