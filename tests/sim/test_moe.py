"""The expert-parallel layer against NumPy: odd shapes, odd routings, many launches, every mode, both vendors."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from device_ranks import ranks_on
from epdsl_runtime.bootstrap import RankFailed
from epdsl_runtime.rank import Rank
from epdsl_runtime.spawn import spawn

import epdsl.reference as ref
from epdsl.kernels.expert import expert_scale
from epdsl.moe import ExpertParallel, RoutingError

SEED = 20261130


@dataclass(frozen=True)
class Case:
    """One job.

    tokens     tokens of each rank in the first launch
    rotate     a launch later they move on to the next rank
    steps      of each launch: "c" dispatch and combine, "t" dispatch and combine twice, "d" dispatch alone
    skew_ms    rank r sleeps r times this before each step on the host
    """

    tokens: tuple[int, ...]
    hidden: int = 64
    experts_per_rank: int = 4
    topk: int = 3
    routing: str = "skewed"
    completion: str = "rank"
    fused: bool = True
    steps: str = "cc"
    output_type: str = "bf16"
    rotate: bool = True
    skew_ms: int = 0
    n_sms: int | None = None
    num_threads: int | None = None

    @property
    def ranks(self) -> int:
        return len(self.tokens)

    @property
    def experts(self) -> int:
        return self.ranks * self.experts_per_rank

    def n_tokens(self, rank: int, launch: int) -> int:
        return self.tokens[(rank + launch * self.rotate) % self.ranks]


def routing_of(case: Case, rank: int, launch: int) -> ref.Routing:
    n = case.n_tokens(rank, launch)
    routing = ref.skewed_routing(SEED, rank, launch, n, case.experts, case.topk)
    ids = routing.topk_idx.copy()
    rng = np.random.default_rng([SEED, rank, launch])
    match case.routing:
        case "skewed":
            pass
        case "dropped":
            ids[rng.random(ids.shape) < 0.4] = -1
        case "one expert":
            ids[:] = -1
            ids[:, case.topk - 1] = case.experts - 1
        case "first expert":
            ids[:] = -1
            ids[:, 0] = 0
        case "none":
            ids[:] = -1
        case "wrong":
            if n:
                ids[n - 1, 0] = case.experts
                ids[n // 2, case.topk - 1] = -7
                ids[0, 1] = ids[0, 0]
        case _:
            raise AssertionError(case.routing)
    return ref.Routing(ids, routing.topk_weights)


def make_layer(rank: Rank, case: Case) -> ExpertParallel:
    return ExpertParallel(
        rank,
        hidden=case.hidden,
        n_experts=case.experts,
        top_k=case.topk,
        max_tokens_per_rank=max(*case.tokens, 1),
        completion=case.completion,  # pyright: ignore[reportArgumentType]
        output_type=case.output_type,  # pyright: ignore[reportArgumentType]
        n_sms=case.n_sms,
        num_threads=case.num_threads,
        timeout_ns=120 * 10**9,
    )


def copy_of(rank: Rank, array: Any) -> Any:
    """A copy made in the device's order of work, without waiting."""
    kept = rank.empty(array.dtype_name, array.shape)
    rank.device.copy(kept.address, array.address, array.nbytes)
    return kept


def run_case(rank: Rank, case: Case) -> list[str]:
    """Launches all steps without waiting in between, then checks each. Returns what was wrong."""
    layer = make_layer(rank, case)
    local = case.experts_per_rank
    y = rank.empty("bf16", (layer.config.max_recv_tokens, case.hidden))
    kept: list[tuple[Any, ...]] = []
    for launch, step in enumerate(case.steps):
        if case.skew_ms:
            time.sleep(case.skew_ms * ((rank.index + launch) % case.ranks) / 1e3)
        routing = routing_of(case, rank.index, launch)
        x = ref.sample_tokens(SEED, rank.index, launch, routing.n_tokens, case.hidden)
        if case.fused:
            handle = layer.dispatch(x, routing.topk_idx, routing.topk_weights)
        else:
            handle = layer.dispatch_wait(layer.dispatch_async(x, routing.topk_idx, routing.topk_weights))
        outputs = [copy_of(rank, a) for a in (handle.output, handle.row_offsets, handle.expert_ids, handle.src_info)]
        combined = None
        if step in "ct":
            expert_scale.launch(
                rank, grid=2, block=128, args=(y, handle.output, handle.row_offsets, rank.index * local, local, case.hidden)
            )
            if case.fused:
                combined = layer.combine(y, handle)
            else:
                layer.combine_async(y, handle)
                combined = layer.combine_wait(handle)
            combined = copy_of(rank, combined)
        if step == "t":
            layer.combine(handle.output, handle)
        kept.append((outputs, combined, handle))
    problems: list[str] = []
    try:
        rank.synchronize()
    except RoutingError as error:
        problems.append(f"RoutingError: {error.kind} {error.count} {error.row} {error.column}")
        rank.synchronize()
    for launch, (outputs, combined, _) in enumerate(kept):
        problems += [f"launch {launch}: {p}" for p in check_launch(case, rank.index, launch, [o.numpy() for o in outputs], combined)]
    problems += rest_state(layer)
    return problems


def check_launch(case: Case, rank: int, launch: int, outputs: list[Any], combined: Any) -> list[str]:
    routings = [routing_of(case, r, launch) for r in range(case.ranks)]
    tokens = [ref.sample_tokens(SEED, r, launch, routings[r].n_tokens, case.hidden) for r in range(case.ranks)]
    problems = ref.check_dispatch(tokens, routings, case.experts, rank, *outputs)
    if combined is not None:
        got = combined.numpy()
        wanted = ref.combine_in_order(tokens[rank], routings[rank], case.experts)
        if case.output_type == "bf16":
            wanted = wanted.astype(ref.BF16)
        if got.shape != wanted.shape or got.tobytes() != wanted.tobytes():
            problems.append(f"the combine is not what summing in order gives: {got.ravel()[:4]}..., expected {wanted.ravel()[:4]}...")
        error = ref.check_combine(tokens[rank], routings[rank], case.experts, got)
        if not error.ratio <= 1:
            problems.append(f"the combine is {error.ratio} times its bound away at {error.place}")
    return problems


def rest_state(layer: ExpertParallel) -> list[str]:
    """Everything the next launch starts from must be as before the first, without the host's help."""
    counters = layer._dispatch_kernel.counters
    words = layer._counters.numpy()
    dispatch = words[counters.dispatch_wait_base :]
    combine = words[counters.combine_base :]
    kernel = layer._combine_kernel
    resting = {
        "expert_reserved, expert_finished, rank_completion": words[: counters.dispatch_wait_base],
        "dispatch cleanup": dispatch[layer._dispatch_kernel.cleanup_counter_offset :][:1],
        "combine rank_completion": combine[: layer.rank.size],
        "combine cleanup": combine[kernel.cleanup_counter_offset :][:1],
    }
    return [f"{name} is not back to 0: {values.tolist()}" for name, values in resting.items() if values.any()]


def fit(case: Case, device: str) -> Case:
    """On GPUs, as many ranks as there are."""
    if device.startswith("sim"):
        return case
    count = ranks_on(device, case.ranks)
    # As many experts in all, so that top_k stays possible.
    return replace(case, tokens=case.tokens[:count], experts_per_rank=-(-case.experts // count))


def check(case: Case, device: str, seed: int = 0) -> None:
    """`seed` is of the simulator's schedule."""
    case = fit(case, device)
    found = spawn(run_case, case.ranks, device=device, args=(case,), seed=seed)
    assert found == [[] for _ in range(case.ranks)], f"{case}, seed {seed}"


@pytest.mark.parametrize("completion", ["rank", "expert"])
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "split"])
def test_every_mode_agrees_with_numpy(device_name: str, completion: str, fused: bool) -> None:
    check(Case(tokens=(5, 9, 2, 7), completion=completion, fused=fused, steps="cdc"), device_name)


@pytest.mark.parametrize(
    "case",
    [
        Case(tokens=(6, 0, 3)),
        Case(tokens=(0, 0)),
        Case(tokens=(17, 1, 0, 4), experts_per_rank=2, topk=5),
        Case(tokens=(4, 5), routing="dropped", topk=4),
        Case(tokens=(4, 5), routing="none"),
        Case(tokens=(6, 5, 4), routing="one expert"),
        Case(tokens=(7,), experts_per_rank=6),
        Case(tokens=(7,), experts_per_rank=1, topk=1),
        Case(tokens=(3, 2), experts_per_rank=1, topk=2),
        Case(tokens=(3, 4), hidden=8),
        Case(tokens=(3, 4), hidden=24),
        Case(tokens=(3, 4), hidden=1032),
        Case(tokens=(3, 4), experts_per_rank=2, topk=4),
        Case(tokens=(9, 3), experts_per_rank=40, topk=8),
        Case(tokens=(5, 3), output_type="f32"),
        Case(tokens=(3, 4), n_sms=2, num_threads=64),
        Case(tokens=(6, 4), n_sms=5, num_threads=128, experts_per_rank=3),
    ],
    ids=lambda c: (
        f"{c.routing},tokens={c.tokens},hidden={c.hidden},experts={c.experts},top{c.topk},{c.output_type},{c.n_sms}x{c.num_threads}"
    ),
)
def test_shapes_and_routings(device_name: str, case: Case) -> None:
    check(case, device_name)


def test_more_rows_of_an_expert_than_a_tile(device_name: str) -> None:
    check(Case(tokens=(150, 140), hidden=8, experts_per_rank=1, topk=1, routing="one expert", steps="c"), device_name)


@pytest.mark.parametrize("completion", ["rank", "expert"])
def test_dispatches_alone_need_no_combine_between_them(device_name: str, completion: str) -> None:
    check(Case(tokens=(3, 8, 1), completion=completion, steps="d" * 8), device_name)


def test_a_rank_may_run_far_ahead(device_name: str) -> None:
    check(Case(tokens=(3, 8, 1), steps="ddcdccd", skew_ms=15), device_name)


@pytest.mark.parametrize("seed", range(1, 5))
@pytest.mark.parametrize("completion", ["rank", "expert"])
def test_no_schedule_matters(device_name: str, completion: str, seed: int) -> None:
    check(Case(tokens=(4, 7, 1), hidden=16, completion=completion, steps="dct"), device_name, seed)


def test_one_dispatch_may_be_combined_twice(device_name: str) -> None:
    """Rank 0 sums many tokens while the others are ready to send the second combine's rows into the same places."""
    check(Case(tokens=(60, 1, 1), rotate=False, hidden=2048, steps="tct"), device_name)


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "split"])
def test_a_busy_receiver_is_not_overwritten_by_the_next_launch(device_name: str, fused: bool) -> None:
    """Rank 0 copies out many of its own rows before the others' one row each, which their next launch would overwrite."""
    case = Case(tokens=(60, 1, 1), rotate=False, hidden=2048, topk=1, routing="first expert", steps="ddcd", fused=fused)
    check(case, device_name)


def test_many_launches_leave_nothing_behind(device_name: str) -> None:
    check(Case(tokens=(2, 3), hidden=16, experts_per_rank=2, topk=2, steps="cd" * 12), device_name)


@pytest.mark.parametrize("completion", ["rank", "expert"])
def test_wrong_ids_are_left_out_and_named(device_name: str, completion: str) -> None:
    case = fit(Case(tokens=(6, 4, 0), routing="wrong", completion=completion, steps="c"), device_name)
    found = spawn(run_case, case.ranks, device=device_name, args=(case,))
    # Two ids out of range, the first in row n // 2; they are reported before the repeated one.
    wanted = [[f"RoutingError: out of range 2 {n // 2} 2"] if n else [] for n in case.tokens]
    assert found == wanted


def raise_of_repeats(rank: Rank) -> str:
    layer = ExpertParallel(rank, hidden=16, n_experts=4, top_k=2, max_tokens_per_rank=3)
    ids = np.array([[0, 1], [2, 3], [3, 3]], np.int32)
    layer.dispatch(np.ones((3, 16), ref.BF16), ids, np.ones((3, 2), np.float32))
    with pytest.raises(RoutingError) as caught:
        rank.synchronize()
    assert (caught.value.rank, caught.value.kind, caught.value.row, caught.value.column) == (rank.index, "repeated", 2, 1)
    return str(caught.value)


def test_a_repeated_id_names_rank_and_row(device_name: str) -> None:
    texts = spawn(raise_of_repeats, 2, device=device_name)
    assert texts == [f"EP320: rank {r}: topk_idx[2, 1] repeats an expert of its row; each may be named once" for r in range(2)]


def damage_src_info(rank: Rank) -> list[str]:
    """Combines with a garbled source; the row must go nowhere and be named."""
    layer = ExpertParallel(rank, hidden=16, n_experts=2, top_k=1, max_tokens_per_rank=4)
    x = np.full((4, 16), 2, ref.BF16)
    handle = layer.dispatch(x, np.full((4, 1), 1 - rank.index, np.int32), np.ones((4, 1), np.float32))
    rank.synchronize()
    sources = handle.src_info.numpy()
    sources[1] = (4, 0)
    sources[3] = (0, 1)
    handle.src_info.copy_from(sources)
    layer.combine(handle.output, handle)
    try:
        rank.synchronize()
    except RoutingError as error:
        return [error.kind, error.count, error.row]  # pyright: ignore[reportReturnType]
    return []


def test_a_garbled_source_is_not_written_anywhere(device_name: str) -> None:
    assert spawn(damage_src_info, 2, device=device_name) == [["source", 2, 1]] * 2


def refusals(rank: Rank) -> list[str]:
    layer = ExpertParallel(rank, hidden=16, n_experts=4, top_k=2, max_tokens_per_rank=3)
    x, ids, weights = np.ones((3, 16), ref.BF16), np.array([[0, 1]] * 3, np.int32), np.ones((3, 2), np.float32)
    many = [np.concatenate([a, a]) for a in (x, ids, weights)]
    bad_range, bad_repeat = ids.copy(), ids.copy()
    bad_range[2, 1], bad_repeat[1, 1] = 4, 0
    handle = layer.dispatch(x, ids, weights)
    open_handle = handle

    def late() -> Any:
        return layer.combine(handle.output, handle)

    texts: list[str] = []
    attempts = [
        lambda: layer.dispatch(*many),
        lambda: layer.dispatch(x.astype(np.float32), ids, weights),
        lambda: layer.dispatch(x, ids.astype(np.int64), weights),
        lambda: layer.dispatch(x[:, :8], ids, weights),
        lambda: layer.dispatch(x, ids[:2], weights),
        lambda: layer.dispatch(x, ids, weights[:, :1]),
        lambda: layer.dispatch(x, bad_range, weights, validate=True),
        lambda: layer.dispatch(x, bad_repeat, weights, validate=True),
        lambda: layer.combine(rank.empty("bf16", (5, 16)), handle),
        lambda: layer.combine_wait(handle),
        lambda: layer.dispatch_wait(open_handle),
    ]
    for attempt in attempts:
        with pytest.raises((ValueError, TypeError, RuntimeError)) as caught:
            attempt()
        texts.append(str(caught.value))
    layer.dispatch(x, ids, weights)
    with pytest.raises(RuntimeError) as caught:
        late()
    texts.append(str(caught.value))
    rank.synchronize()
    return texts


def test_what_the_host_can_see_is_refused_with_both_numbers(device_name: str) -> None:
    for rank, texts in enumerate(spawn(refusals, 2, device=device_name)):
        assert texts == [
            f"rank {rank}: x has 6 tokens, but the layer was made for max_tokens_per_rank=3",
            "x holds f32, expected bf16",
            "topk_idx holds i64, expected i32",
            "x has shape (3, 8), expected (3, 16)",
            "topk_idx has shape (2, 2), expected (3, 2)",
            "topk_weights has shape (3, 1), expected (3, 2)",
            f"EP320: rank {rank}: topk_idx[2, 1] is not an expert: ids go from 0 to 3, or -1 for none",
            f"EP320: rank {rank}: topk_idx[1, 1] repeats an expert of its row; each may be named once",
            "y has shape (5, 16), expected (12, 16)",
            "combine_wait of launch 1, but no combine is under way",
            "dispatch_wait of launch 1, but no dispatch is under way",
            "a combine of launch 1, but the layer is at launch 2, which has overwritten what it needs; combine before the next dispatch",
        ]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"n_experts": 7}, "7 experts cannot be divided over 2 ranks"),
        ({"hidden": 12}, "hidden=12 is 24 bytes a token, which is not a multiple of 16 bytes"),
        ({"top_k": 9}, "top_k=9 of 8 experts"),
        ({"max_tokens_per_rank": 0}, "max_tokens_per_rank=0"),
        ({"num_threads": 96}, "num_threads=96 must be a multiple of 64"),
        ({"n_sms": 1}, "n_sms=1, but at least 2 blocks"),
        ({"completion": "pair"}, "completion='pair' is not known"),
    ],
    ids=lambda v: str(v)[:24],
)
def test_configurations_that_cannot_work(change: dict[str, Any], text: str) -> None:
    base: dict[str, Any] = {"hidden": 16, "n_experts": 8, "top_k": 2, "max_tokens_per_rank": 4}
    with pytest.raises(RankFailed) as caught:
        spawn(build_layer, 2, device="sim", args=({**base, **change},))
    assert text in str(caught.value)


def build_layer(rank: Rank, options: dict[str, Any]) -> None:
    ExpertParallel(rank, **options)


def build_different(rank: Rank) -> None:
    ExpertParallel(rank, hidden=16, n_experts=4, top_k=2, max_tokens_per_rank=3 + rank.index)


def test_ranks_must_be_given_the_same_layer() -> None:
    with pytest.raises(RankFailed, match="max_tokens_per_rank differs by rank"):
        spawn(build_different, 2, device="sim")


def launch_too_wide(rank: Rank) -> str:
    info = rank.device.info
    layer = ExpertParallel(rank, hidden=16, n_experts=4, top_k=2, max_tokens_per_rank=3, n_sms=info.num_sms * 64, num_threads=1024)
    with pytest.raises(ValueError) as caught:
        layer.dispatch(np.ones((1, 16), ref.BF16), np.zeros((1, 2), np.int32), np.ones((1, 2), np.float32))
    return str(caught.value)


def test_a_grid_that_cannot_be_resident_is_refused() -> None:
    (text,) = spawn(launch_too_wide, 1, device="sim")
    assert "blocks wait for each other" in text and "use a grid of at most" in text
