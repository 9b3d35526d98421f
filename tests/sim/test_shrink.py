"""A rank is killed between two launches; the others go on without it, and what they compute is a job of three ranks' own."""

from __future__ import annotations

import os
import signal
from typing import Any

import fault_jobs
import numpy as np
import pytest
from epdsl_runtime import PeerTimeout, RankFailed
from epdsl_runtime.sim_process import SimProcesses
from fault_jobs import exchange_once, kernels_of
from test_graphs import EXPERTS, TOP_K, Step, layer_of, scale_summed

import epdsl as ep
from epdsl.survivors import route_around

TOKENS, DEAD = 4, 1


def goes_on(rank: ep.Rank, mode: str, seed: int) -> Any:
    """Returns what it saw, who it became, and its tokens, routing and result after the others went on."""
    local = EXPERTS // rank.size
    # Four processes take turns, so a wait of the first exchange may take long.
    fault_jobs.DEADLINE = max(fault_jobs.DEADLINE, 3.0)
    step = exchange_once(rank, mode)
    step.fill(seed, 7)
    x, ids, weights = step.x.numpy(), step.ids.numpy(), step.weights.numpy()
    rank.barrier()
    if rank.index == DEAD:
        os.kill(os.getpid(), signal.SIGKILL)
    error = ""
    try:
        step()
        rank.barrier()
    except (PeerTimeout, RankFailed) as caught:
        error = type(caught).__name__
    rank = rank.shrink((DEAD,), timeout=20)
    layer = layer_of(rank, mode, timeout_ns=20 * 10**9, experts=local * rank.size)
    step = Step(rank, layer, mode, TOKENS, experts=local * rank.size)
    # Its experts multiply by their numbers of the first job.
    step.first = rank.original * local
    for kernel in kernels_of(layer, mode):
        kernel.compile(rank.device.info.target, **({"top_k": TOP_K} if kernel is scale_summed else {}))
    rank.barrier()
    around, dropped = route_around(ids, local, (DEAD,))
    for array, value in ((step.x, x), (step.ids, around), (step.weights, weights)):
        array.copy_from(value)
    for _ in range(3):
        step()
    rank.synchronize()
    return error, (rank.original, rank.index, rank.originals), x.astype(np.float32), ids, weights, dropped, step.out.numpy()


def check(found: list[Any], note: str) -> None:
    """Compares what `goes_on` returned with NumPy: the sums without the experts that are gone."""
    ranks, dead = len(found), found[DEAD]
    assert isinstance(dead, RankFailed) and dead.rank == DEAD and "was ended by signal SIGKILL" in dead.text, dead
    left = tuple(rank for rank in range(ranks) if rank != DEAD)
    total = 0
    for number, original in enumerate(left):
        error, who, x, ids, weights, dropped, out = found[original]
        assert error in ("PeerTimeout", "RankFailed") and who == (original, number, left), (note, error, who)
        lost = ids // (EXPERTS // ranks) == DEAD
        assert dropped.tolist() == lost.sum(axis=1).tolist(), note
        expected = x * (weights * (ids + 1) * ~lost).sum(axis=1, keepdims=True)
        np.testing.assert_array_equal(out.astype(np.float32), expected, err_msg=f"{note}, rank {original}")
        total += int(lost.sum())
    assert total > 0, f"{note}: nothing was routed to the dead"


@pytest.mark.parametrize("mode", ["latency", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("throughput", "base"))])
def test_three_of_four_go_on(mode: str) -> None:
    seed = 23
    found = ep.spawn(goes_on, 4, device=SimProcesses(), args=(mode, seed), timeout=240, survive=True)
    check(found, f"seed {seed} {mode}")


def exchanged(rank: ep.Rank) -> list[int]:
    """What the ranks wrote into one another's memory: each its first number."""
    words = rank.symmetric("u32", rank.size)
    for address in words.peers.addresses:
        rank.device.upload(address + 4 * rank.index, np.array([100 + rank.original], np.uint32))
    rank.barrier()
    return words.local.numpy().tolist()


def ends_badly(rank: ep.Rank) -> Any:
    """Rank 2 raises; the others go on, and exchange through memory made anew."""
    rank.symmetric("u32", 3)
    if rank.index == 2:
        raise ValueError("a bug in rank 2")
    with pytest.raises(RankFailed, match="a bug in rank 2"):
        rank.barrier()
    return exchanged(rank.shrink((2,)))


@pytest.mark.parametrize("device", ["sim", SimProcesses()])
def test_ranks_go_on_without_one_that_raised(device: Any) -> None:
    found = ep.spawn(ends_badly, 4, device=device, timeout=60, survive=True)
    assert isinstance(found[2], RankFailed) and "a bug in rank 2" in found[2].text
    assert [found[rank] for rank in (0, 1, 3)] == [[100, 101, 103]] * 3


def dies_twice(rank: ep.Rank, second: int) -> Any:
    """Rank 1 is killed, then of those that live `second`; the last two go on."""
    found: list[Any] = [exchanged(rank)]
    for victim in (1, second):
        if rank.original == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(RankFailed) as error:
            rank.barrier()
            rank.barrier()
        assert rank.originals[error.value.rank] == victim, error.value
        rank = rank.shrink([rank.originals.index(victim)], timeout=20)
        found.append((exchanged(rank), rank.index, rank.originals))
    return found


@pytest.mark.parametrize(("second", "left"), [(0, (2, 3)), (3, (0, 2))])
def test_two_of_four_go_on_when_another_dies(second: int, left: tuple[int, ...]) -> None:
    """Rank 0's process holds the rendezvous of four, and of the three that are left."""
    found = ep.spawn(dies_twice, 4, device=SimProcesses(), args=(second,), timeout=120, survive=True)
    assert [isinstance(one, RankFailed) for one in found] == [rank not in left for rank in range(4)]
    for number, rank in enumerate(left):
        three = tuple(other for other in range(4) if other != 1)
        assert found[rank] == [
            [100, 101, 102, 103],
            ([100, 102, 103], three.index(rank), three),
            ([100 + other for other in left], number, left),
        ]


def all_raise(rank: ep.Rank) -> None:
    raise ValueError(f"rank {rank.index} has a bug")


@pytest.mark.parametrize("device", ["sim", SimProcesses()])
def test_a_job_nobody_survives_fails(device: Any) -> None:
    with pytest.raises(RankFailed, match="has a bug"):
        ep.spawn(all_raise, 2, device=device, timeout=60, survive=True)
