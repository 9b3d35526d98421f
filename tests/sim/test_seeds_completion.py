"""`ep_signal_completion` by itself, reservations over very many launches, and everything random."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from epdsl_runtime.bootstrap import RankFailed
from epdsl_runtime.faults import PeerTimeout
from epdsl_runtime.rank import Rank
from epdsl_runtime.spawn import spawn
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from seeds_jobs import Job, run_job

import epdsl as ep
import epdsl.reference as ref
from epdsl.kernels import ep_signal_completion
from epdsl.kernels.signal import wait_for_consumption
from epdsl.lang.errors import CompileError
from epdsl.moe import ExpertParallel

EXPERTS, WORDS = 4, 8
FLAG = EXPERTS * 2


@ep.kernel
def publish(
    payload: ep.Peers[ep.u64],
    counts: ep.Peers[ep.u64],
    elections: ep.Ptr[ep.i32],
    tickets: ep.Ptr[ep.i32],
    seen: ep.Ptr[ep.u64],
    launch: ep.u64,
    me: ep.i32,
    mode: ep.Const[str],
):
    """Every block is a producer of one expert's payload for the other rank; the last block receives what the other rank publishes."""
    peer = 1 - me
    by_rank = mode == "rank"
    if ep.block_idx.x < EXPERTS:
        expert = ep.block_idx.x
        if ep.thread_idx.x < WORDS:
            payload[peer][expert * WORDS + ep.thread_idx.x] = launch * 1000 + ep.u64(expert * WORDS + ep.thread_idx.x)
        ep.barrier()
        if ep.thread_idx.x == 0:
            tickets[expert] = ep_signal_completion(
                me, peer, counts, expert * 2 + me, (launch << 32) | ep.u64(expert), elections, FLAG + me, p2p_world_size=2,
                n_experts_per_device=EXPERTS, has_rank_flag=by_rank, ep_ord_r=by_rank, release_every=mode == "every",
                ordering="seed" if mode == "seed" else "acq_rel",
            )  # fmt: skip
    else:
        if by_rank and ep.thread_idx.x == 0:
            ep.wait(counts[me] + (FLAG + peer), until=lambda v: v >> 32 == launch, order=ep.ACQUIRE, scope=ep.SYSTEM, timeout_ns=60 * 10**9)
        elif not by_rank and ep.thread_idx.x < EXPERTS:
            word = counts[me] + (ep.thread_idx.x * 2 + peer)
            ep.wait(word, until=lambda v: v >> 32 == launch, order=ep.ACQUIRE, scope=ep.SYSTEM, timeout_ns=60 * 10**9)
        ep.barrier()
        for i in range(ep.thread_idx.x, EXPERTS * WORDS, ep.block_dim.x):
            seen[i] = payload[me][i]
        for i in range(ep.thread_idx.x, EXPERTS, ep.block_dim.x):
            seen[EXPERTS * WORDS + i] = counts[me][i * 2 + peer]


def generations(rank: Rank, mode: str) -> list[str]:
    """Eight generations in both directions: every payload word, every count, the election counter back at 0."""
    payload, counts = rank.symmetric("u64", EXPERTS * WORDS), rank.symmetric("u64", FLAG + 2)
    elections, tickets = rank.zeros("i32", 2), rank.zeros("i32", EXPERTS)
    seen = rank.zeros("u64", EXPERTS * WORDS + EXPERTS)
    problems: list[str] = []
    for launch in range(1, 9):
        publish.launch(
            rank, grid=EXPERTS + 1, block=64, args=(payload.peers, counts.peers, elections, tickets, seen, launch, rank.index, mode),
            cooperative=True,
        )  # fmt: skip
        rank.synchronize()
        wanted = [launch * 1000 + i for i in range(EXPERTS * WORDS)] + [launch << 32 | i for i in range(EXPERTS)]
        if seen.numpy().tolist() != wanted:
            problems.append(f"{mode}, launch {launch}: {seen.numpy().tolist()}")
        drawn = sorted(tickets.numpy().tolist())
        if drawn != ([-1] * EXPERTS if mode == "every" else list(range(EXPERTS))):
            problems.append(f"{mode}: tickets {drawn}")
        flag = int(counts.local.numpy()[FLAG + 1 - rank.index])
        if flag != (launch << 32 | EXPERTS if mode == "rank" else 0):
            problems.append(f"{mode}: the flag is {flag:#x}")
        if elections.numpy().any():
            problems.append(f"{mode}: the election counter is {elections.numpy().tolist()}")
        rank.barrier()
    return problems


@pytest.mark.parametrize("mode", ["rank", "expert", "every", "seed"])
def test_every_completion_publishes_all_payload_and_rests(device_name: str, mode: str) -> None:
    assert spawn(generations, 2, device=device_name, args=(mode,)) == [[], []]


@ep.kernel
def misuse(counts: ep.Peers[ep.u64], counter: ep.Ptr[ep.i32], options: ep.Const[tuple]):
    ep_signal_completion(0, 0, counts, 0, ep.u64(0), counter, p2p_world_size=1, **dict(options))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"use_shmem": True, "n_experts_per_device": 1}, "use_shmem=True needs the SHMEM path"),
        ({"ep_ord_r": True, "n_experts_per_device": 1}, "has_rank_flag and ep_ord_r go together"),
        ({"has_rank_flag": True, "n_experts_per_device": 1}, "has_rank_flag and ep_ord_r go together"),
        ({"ep_ord_r": True, "has_rank_flag": True, "release_every": True, "n_experts_per_device": 1}, "exclude each other"),
        ({"ordering": "relaxed", "n_experts_per_device": 1}, "ordering='relaxed' is not known"),
        ({}, "an election needs n_experts_per_device"),
    ],
    ids=lambda v: str(v)[:40],
)
def test_misuse_of_completion_is_an_error_while_compiling(options: dict[str, Any], text: str) -> None:
    with pytest.raises(CompileError, match=text):
        misuse.compile("sim", options=tuple(options.items()))


def orders_of(mode: str, target: str) -> list[str]:
    text = publish.compile(target, mode=mode).text("ptx" if target.startswith("sm") else "gcn")
    lines = [line.strip().split()[0] for line in text.splitlines() if line.strip()]
    return [name for name in lines if name.startswith(("atom", "fence", "st.release", "st.relaxed", "global_atomic"))]


def test_the_seeds_ordering_elects_relaxed_and_ours_does_not() -> None:
    elections = {mode: Counter(orders_of(mode, "sm_90")) for mode in ("seed", "expert", "rank", "every")}
    # What is left without the counters of fault records, which every kernel has.
    added = {mode: [name for name in found - elections["every"] if name.startswith("atom")] for mode, found in elections.items()}
    assert added["seed"] == ["atom.relaxed.gpu.global.add.u32"] or added["seed"] == ["atom.relaxed.gpu.global.add.s32"], added
    for mode in ("expert", "rank"):
        assert [name.split(".")[1] for name in added[mode]] == ["acq_rel"], added


# ---- reservations


SMALL = Job(tokens=(2, 1), hidden=8, experts_per_rank=1, topk=1, layer={"n_sms": 2, "num_threads": 64})


@pytest.mark.parametrize("layout", ["early counts", "reservation"])
@pytest.mark.parametrize("completion", ["rank", "expert"])
def test_a_generation_that_passes_two_to_the_31_and_32(device_name: str, layout: str, completion: str) -> None:
    options = {"ep_final_layout": True, "ep_prod_reserve": layout == "reservation", "completion": completion}
    for first in (2**31 - 3, 2**32 - 3):
        job = replace(SMALL, launches=6, first_launch=first, layer={**SMALL.layer, **options})
        assert spawn(run_job, 2, device=device_name, args=(job,)) == [[], []]


def stale_mailbox(rank: Rank) -> str:
    """The mailbox holds a base with the tag of the launch before; whoever used it would write to row 1000."""
    layer = ExpertParallel(
        rank, hidden=8, n_experts=1, top_k=1, max_tokens_per_rank=2, n_sms=2, num_threads=64, ep_final_layout=True, ep_prod_reserve=True,
        first_launch=41,
    )  # fmt: skip
    layer._mailbox.copy_from(np.array([1000, 41, 0], np.int32))
    handle = layer.dispatch(np.ones((2, 8), np.float32).astype(ref.BF16), np.zeros((2, 1), np.int32), np.ones((2, 1), np.float32))
    rank.synchronize()
    return f"{handle.row_offsets.numpy().tolist()} {layer._mailbox.numpy().tolist()}"


def test_a_base_of_another_launch_is_not_used(device_name: str) -> None:
    assert spawn(stale_mailbox, 1, device=device_name) == ["[0, 2] [0, 42, 2]"]


def many_launches(rank: Rank, launches: int, first: int) -> list[str]:
    """Launch after launch with reservations; the mailbox, cursors and output are compared at every 5,000th and at the last."""
    layer = ExpertParallel(
        rank, hidden=8, n_experts=2, top_k=1, max_tokens_per_rank=2, n_sms=2, num_threads=64, ep_final_layout=True, ep_prod_reserve=True,
        first_launch=first, timeout_ns=10**12,
    )  # fmt: skip
    weights = rank.array(np.ones((2, 1), np.float32))
    ids = [rank.array(np.array([[(i + j) % 2] for j in range(2)], np.int32)) for i in range(2)]
    x = rank.array((np.arange(16).reshape(2, 8) + 16 * rank.index).astype(ref.BF16))
    problems: list[str] = []
    for launch in range(launches):
        handle = layer.dispatch(x, ids[launch % 2], weights)
        if launch % 5000 == 0 or launch == launches - 1:
            # A rank that goes on would reserve rows in this one's cursors.
            rank.barrier()
            rows = handle.output.numpy()[:2].astype(int)
            # One token of each rank comes here: token (launch + rank) % 2, in order of reservation.
            token = (launch + rank.index) % 2
            wanted = {16 * r + 8 * token for r in range(2)}
            tags = layer._mailbox.numpy()[2:4].tolist()
            tag = int(np.array(first + launch + 1, np.uint64).astype(np.uint32).astype(np.int32))
            if set(rows[:, 0].tolist()) != wanted or handle.row_offsets.numpy().tolist() != [0, 2] or tags != [tag, tag]:
                problems.append(f"launch {launch}: rows {rows[:, 0].tolist()}, expected {wanted}; tags {tags}, expected {tag}")
            if layer._recv_counts.local.numpy()[layer._dispatch_kernel.rc_cursor_base :].any():
                problems.append(f"launch {launch}: a cursor is not back to 0")
            rank.barrier()
    return problems


@ep.kernel
def wait_for_both(consumed: ep.Ptr[ep.u32], epoch: ep.u32, done: ep.Ptr[ep.u32]):
    wait_for_consumption(consumed, epoch, 2, 10**8, ep.Group(0, ep.target.warp_size, -1))
    if ep.thread_idx.x == 0:
        done[0] = 1


def waits_for_both(rank: Rank, epoch: int, acknowledged: tuple[int, int]) -> int:
    done = rank.zeros("u32", 1)
    warp = rank.device.info.warp_size
    wait_for_both.launch(rank, grid=1, block=warp, args=(rank.array(np.array(acknowledged, np.uint32)), np.uint32(epoch), done))
    rank.synchronize()
    return int(done.numpy()[0])


@pytest.mark.parametrize("epoch", [2, 1, 0])
def test_a_block_that_begins_late_finds_a_peer_that_has_consumed_this_launch_too(device_name: str, epoch: int) -> None:
    """A peer to which the block sends nothing needs only the other blocks to end its launch. The number may wrap."""
    before = (epoch - 1) % 2**32
    for acknowledged in ((before, before), (epoch, before), (before, epoch)):
        assert spawn(waits_for_both, 1, device=device_name, args=(epoch, acknowledged)) == [1]
    with pytest.raises(RankFailed, match="a wait timed out"):
        spawn(waits_for_both, 1, device=device_name, args=(epoch, (before, (epoch - 2) % 2**32)))


def test_reservations_of_many_launches(device_name: str) -> None:
    assert spawn(many_launches, 2, device=device_name, args=(300, 2**31 - 150)) == [[], []]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_stale_reservation_is_never_used_in_70000_launches(device_name: str) -> None:
    assert spawn(many_launches, 2, device=device_name, args=(70_000, 2**31 - 35_000)) == [[], []]


# ---- everything random


layers = st.fixed_dictionaries(
    {
        "completion": st.sampled_from(["rank", "expert", "every"]),
        "token_format": st.sampled_from(["bf16", "fp8", "mxfp8", "mxfp4", "nvfp4"]),
        "prequantized": st.booleans(),
        "fused_shared_expert": st.booleans(),
        "skip_a2a": st.booleans(),
        "ep_final_layout": st.booleans(),
        "ep_prod_reserve": st.booleans(),
        "ep_copy_role_split": st.booleans(),
        "ep_send_join_named": st.booleans(),
        "combine_schedule": st.sampled_from(["auto", "legacy", "balanced"]),
        "sm_schedule": st.sampled_from(["auto", "round_robin", "proportional"]),
        "num_threads": st.sampled_from([64, 192, 320]),
        "n_sms": st.integers(2, 6),
    }
)


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    layer = draw(layers)
    layer["ep_prod_reserve"] = layer["ep_prod_reserve"] and layer["ep_final_layout"]
    ranks, local = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    tokens = tuple(draw(st.integers(0, 12)) for _ in range(ranks))
    return Job(
        tokens=tokens,
        hidden=128 * draw(st.integers(1, 3)),
        experts_per_rank=local,
        topk=draw(st.integers(1, min(6, ranks * local))),
        fused=draw(st.booleans()),
        routing=draw(st.sampled_from(["skewed", "dropped", "one expert"])),
        seed=draw(st.integers(0, 2**31)),
        layer=layer,
    )


@settings(max_examples=6, deadline=None, derandomize=False, print_blob=True, suppress_health_check=list(HealthCheck), database=None)
@given(job=jobs(), schedule=st.integers(0, 2**31))
def check_random(device_name: str, job: Job, schedule: int) -> None:
    note(f"{job}, schedule {schedule}")
    assert spawn(run_job, job.ranks, device=device_name, args=(job,), seed=schedule) == [[] for _ in job.tokens]


def test_random_shapes_and_parameters(device_name: str) -> None:
    if not device_name.startswith("sim"):
        pytest.skip("compiles a kernel for every example; the simulator's test")
    check_random(device_name)


@pytest.mark.parametrize("token_format", ["bf16", "fp8", "mxfp8", "mxfp4", "nvfp4"])
def test_quantised_input_is_moved_as_it_is(device_name: str, token_format: str) -> None:
    layer = {"token_format": token_format, "prequantized": True, "fused_shared_expert": token_format == "nvfp4"}
    assert spawn(run_job, 2, device=device_name, args=(Job(layer=layer, launches=2),)) == [[], []]


def test_a_timeout_in_a_reservation_names_its_line() -> None:
    """A rank that waits for a count of a peer that never launches is told where."""

    def alone(rank: Rank) -> str:
        layer = ExpertParallel(
            rank, hidden=8, n_experts=2, top_k=1, max_tokens_per_rank=1, n_sms=2, num_threads=64, ep_final_layout=True, timeout_ns=10**8
        )
        text = ""
        if rank.index == 1:
            layer.dispatch(np.zeros((0, 8), np.float32).astype(ref.BF16), np.zeros((0, 1), np.int32), np.zeros((0, 1), np.float32))
            with pytest.raises(PeerTimeout) as caught:
                rank.synchronize()
            text = str(caught.value)
        rank.barrier()
        return text

    found = spawn(alone, 2, device="sim")
    assert found[0] == "" and "rank 1" in found[1]
