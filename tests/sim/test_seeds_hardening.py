"""Faults that other expert-parallel libraries shipped, by kind, as far as one node can have them and no other test names them.

docs/hardening.md names the test of every kind.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from epdsl_runtime.rank import Rank
from epdsl_runtime.spawn import spawn
from seeds_jobs import Job, run_job

import epdsl as ep
import epdsl.reference as ref
from epdsl.kernels import BF16TokenFormat, EPCombineKernel, EPDispatchKernel, EPLocalSyncCounters
from epdsl.moe import ExpertParallel

SMALL: dict[str, Any] = {"n_sms": 3, "num_threads": 64}


def good(job: Job, device: str) -> None:
    assert spawn(run_job, job.ranks, device=device, args=(job,)) == [[] for _ in job.tokens], job


@pytest.mark.parametrize("n", [1, 2, 3, 4, 7])
def test_small_sizes_hang_kind(device_name: str, n: int) -> None:
    """A timeout at one size of a sweep, and at a single token."""
    good(Job(tokens=(n, n), launches=2, layer=SMALL), device_name)


@pytest.mark.parametrize("token_format", ["bf16", "fp8", "nvfp4"])
def test_no_tokens_anywhere_divide_by_zero_kind(device_name: str, token_format: str) -> None:
    layer = {**SMALL, "token_format": token_format, "fused_shared_expert": True, "ep_final_layout": True, "sm_schedule": "proportional"}
    good(Job(tokens=(0, 0), launches=2, layer=layer), device_name)


@pytest.mark.parametrize("reserve", [False, True])
def test_heavy_imbalance_wrong_counts_kind(device_name: str, reserve: bool) -> None:
    layer = {**SMALL, "ep_final_layout": reserve, "ep_prod_reserve": reserve, "combine_schedule": "balanced", "sm_schedule": "proportional"}
    good(Job(tokens=(130, 3), hidden=8, routing="one expert", launches=2, layer=layer), device_name)


def test_the_world_size_is_odd_kind(device_name: str) -> None:
    if not device_name.startswith("sim"):
        pytest.skip("five ranks")
    good(Job(tokens=(3, 0, 4, 1, 2), experts_per_rank=1, launches=2, layer={**SMALL, "ep_final_layout": True}), device_name)


def test_many_selections_of_a_token_kind(device_name: str) -> None:
    """Lists of supported shapes: top-16 of 3 x 128 elements here."""
    good(Job(tokens=(3, 2), hidden=384, experts_per_rank=9, topk=16, launches=2, layer=SMALL), device_name)


def two_layers(rank: Rank, device: str) -> list[str]:
    """Two layers of other sizes, their launches interleaved and one of them idle on rank 0."""
    jobs = [
        Job(tokens=(4, 2), hidden=64, launches=2, layer=SMALL),
        Job(tokens=(9, 0), hidden=128, experts_per_rank=2, launches=2, layer={**SMALL, "token_format": "fp8", "completion": "expert"}),
    ]
    layers = [
        ExpertParallel(rank, hidden=j.hidden, n_experts=j.experts, top_k=j.topk, max_tokens_per_rank=max(j.tokens), **j.layer) for j in jobs
    ]
    kept: list[Any] = []
    for launch in range(2):
        for job, layer in zip(jobs, layers, strict=True):
            x, routing = job.tokens_of(rank.index, launch), job.routing_of(rank.index, launch)
            kept.append((job, layer, launch, layer.dispatch(x, routing.topk_idx, routing.topk_weights)))
        if launch == 0:
            rank.synchronize()
    rank.synchronize()
    problems: list[str] = []
    for job, layer, launch, handle in kept[2:]:
        routings = [job.routing_of(r, launch) for r in range(2)]
        tokens = [job.tokens_of(r, launch) for r in range(2)]
        problems += job.reference.check_dispatch(layer, handle, rank.index, tokens, routings)
    return problems


def test_a_second_layer_hangs_kind(device_name: str) -> None:
    assert spawn(two_layers, 2, device=device_name, args=(device_name,)) == [[], []]


def dropped_without_close(rank: Rank) -> bool:
    layer = ExpertParallel(rank, hidden=8, n_experts=2, top_k=1, max_tokens_per_rank=2, **SMALL)
    if rank.index == 0:
        layer.dispatch(np.ones((1, 8), ref.BF16), np.zeros((1, 1), np.int32), np.ones((1, 1), np.float32))
    else:
        layer.dispatch(np.ones((0, 8), ref.BF16), np.zeros((0, 1), np.int32), np.ones((0, 1), np.float32))
    rank.synchronize()
    del layer
    return True


def test_a_collective_in_a_destructor_hangs_kind(device_name: str) -> None:
    assert spawn(dropped_without_close, 2, device=device_name) == [True, True]


def forget_inputs(rank: Rank) -> list[str]:
    """Drops each launch's inputs and takes as much memory again before the kernels have run."""
    job = Job(tokens=(40, 33), launches=3, layer=SMALL)
    layer = ExpertParallel(
        rank, hidden=job.hidden, n_experts=job.experts, top_k=job.topk, max_tokens_per_rank=max(job.tokens), timeout_ns=120 * 10**9, **SMALL
    )
    kept: list[Any] = []
    for launch in range(job.launches):
        x, routing = job.tokens_of(rank.index, launch), job.routing_of(rank.index, launch)
        inputs = [rank.array(a) for a in (x, routing.topk_idx, routing.topk_weights)]
        if launch < job.launches - 1:
            layer.dispatch(*inputs)
        else:
            kept.append(layer.dispatch(*inputs))
        del inputs
        kept += [rank.array(np.full(a.shape, 85, a.dtype)) for a in (x, routing.topk_idx, routing.topk_weights)]
    rank.synchronize()
    tokens = [job.tokens_of(r, job.launches - 1) for r in range(2)]
    routings = [job.routing_of(r, job.launches - 1) for r in range(2)]
    handle = next(each for each in kept if hasattr(each, "row_offsets"))
    return job.reference.check_dispatch(layer, handle, rank.index, tokens, routings)


def test_inputs_are_forgotten_recycled_memory_kind(device_name: str) -> None:
    assert spawn(forget_inputs, 2, device=device_name) == [[], []]


def test_counters_of_64_bits_are_misaligned_kind() -> None:
    """Pair words are read eight bytes at a time, and so are count words."""
    for n_experts in range(1, 40):
        for n_ranks in (1, 3, 5, 8):
            counters = EPLocalSyncCounters(n_experts, n_ranks)
            assert counters.dispatch_wait_base % 4 == 0 and counters.combine_base % 4 == 0 and counters.total_size % 4 == 0


@ep.kernel
def offsets(out: ep.Ptr[ep.i64], expert: ep.i32, rank: ep.i32, slot: ep.i32):
    if ep.thread_idx.x == 0:
        out[0] = LARGE.recv_buf_layout(expert, rank, slot)
        out[1] = LARGE_COMBINE.recv_buf_layout(slot, 7)


LARGE = EPDispatchKernel(1024, 132, 256, 8, 524288, 8, BF16TokenFormat(7168, 8))
LARGE_COMBINE = EPCombineKernel(1024, 132, 8, 256, 8, 14336, 524288, 8)


def large_offsets(rank: Rank) -> list[int]:
    out = rank.zeros("i64", 2)
    offsets.launch(rank, grid=1, block=64, args=(out, 31, 7, 524287))
    return out.numpy().tolist()


def test_offsets_of_more_than_31_bits_overflow_kind(device_name: str) -> None:
    wanted = [((31 * 8 + 7) * 524288 + 524287) * 14368, (524287 * 8 + 7) * 14336]
    assert spawn(large_offsets, 1, device=device_name) == [wanted]


def padded_counts(rank: Rank) -> list[list[int]]:
    layer = ExpertParallel(rank, hidden=128, n_experts=2, top_k=1, max_tokens_per_rank=7, token_format="fp8", **SMALL)
    ids = np.array([[0]] * 5 + [[1]] * 2, np.int32)
    handle = layer.dispatch(np.ones((7, 128), ref.BF16), ids, np.ones((7, 1), np.float32))
    return [handle.row_offsets.numpy().tolist(), handle.expert_counts.numpy().tolist()]


def test_padded_counts_are_taken_for_true_ones_kind(device_name: str) -> None:
    assert spawn(padded_counts, 1, device=device_name) == [[[0, 8, 12], [5, 2]]]


def test_a_shared_expert_is_no_routed_id_kind(device_name: str) -> None:
    """The shared expert is slot 0 of the output, never an id: the first expert's id is 0 with and without one."""
    job = Job(tokens=(4, 3), experts_per_rank=1, topk=2, launches=2, layer={**SMALL, "fused_shared_expert": True})
    good(job, device_name)
    good(replace(job, layer=SMALL), device_name)
