"""The throughput mode against NumPy: every routing that hurts, bf16 and e4m3 rows, launches in a row."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from device_ranks import ranks_on

import epdsl as ep
from epdsl.moe_throughput import ThroughputMoE

HIDDEN, EXPERTS, TOP_K, TOKENS, BLOCKS = 512, 16, 3, 40, 3


def routing(rng: np.random.Generator, kind: str, tokens: int) -> np.ndarray:
    ids = np.argsort(rng.random((tokens, EXPERTS)), axis=1)[:, :TOP_K].astype(np.int32)
    if kind == "dropped":
        ids[rng.random(ids.shape) < 0.6] = -1
    elif kind == "one rank":
        ids[:] = [EXPERTS - 1, EXPERTS - 2, -1]
    return ids


def answer(seed: int, launch: int, at: int, source: int, token: int) -> np.ndarray:
    """What the experts of rank `at` return for a row."""
    return np.random.default_rng([seed, launch, at, source, token]).standard_normal(HIDDEN).astype(ml_dtypes.bfloat16)


def run(rank: ep.Rank, seed: int, kind: str, fp8: bool, launches: int) -> None:
    layer = ThroughputMoE(
        rank,
        hidden=HIDDEN,
        n_experts=EXPERTS,
        top_k=TOP_K,
        max_tokens_per_rank=TOKENS,
        n_blocks=BLOCKS,
        num_threads=256,
        fp8=fp8,
    )
    local = EXPERTS // rank.size
    for launch in range(launches):
        job = []
        for r in range(rank.size):
            rng = np.random.default_rng([seed, launch, r])
            tokens = [TOKENS, 0, 17, 1][(r + launch) % 4] if kind != "full" else TOKENS
            x = rng.standard_normal((tokens, HIDDEN)).astype(ml_dtypes.float8_e4m3fn if fp8 else ml_dtypes.bfloat16)
            scales = rng.random((tokens, HIDDEN // 128), np.float32)
            job.append((x, routing(rng, kind, tokens), rng.random((tokens, TOP_K), np.float32), scales))
        x, ids, weights, scales = job[rank.index]
        handle = layer.dispatch(x, ids, weights, scales if fp8 else None)
        rank.synchronize()
        note = f"seed {seed} launch {launch} rank {rank.index}"
        expected = [
            (s, t) for s in range(rank.size) for t, row in enumerate(job[s][1]) if ((row >= 0) & (row // local == rank.index)).any()
        ]
        starts = [sum(s < r for s, _ in expected) for r in range(rank.size + 1)]
        assert handle.rank_rows.numpy().tolist() == starts, note
        rows, tokens = handle.rows.numpy(), handle.token.numpy()
        got_ids, got_weights = handle.topk_idx.numpy(), handle.weights.numpy()
        for row, (s, t) in enumerate(expected):
            assert tokens[row] == t and rows[row].tobytes() == job[s][0][t].tobytes(), f"{note} row {row}"
            chosen = job[s][1][t]
            here = (chosen >= 0) & (chosen // local == rank.index)
            assert got_ids[row].tolist() == np.where(here, chosen - rank.index * local, -1).tolist(), note
            assert got_weights[row].tobytes() == job[s][2][t].tobytes(), note
            if fp8:
                assert handle.scales is not None and handle.scales.numpy()[row].tobytes() == job[s][3][t].tobytes(), note

        y = np.zeros((max(1, len(expected)), HIDDEN), ml_dtypes.bfloat16)
        for row, (s, t) in enumerate(expected):
            y[row] = answer(seed, launch, rank.index, s, t)
        out = layer.combine(rank.array(y, "bf16"), handle)
        rank.synchronize()
        if len(x):
            total = np.zeros((len(x), HIDDEN), np.float32)
            for r in range(rank.size):
                for t in range(len(x)):
                    if ((ids[t] >= 0) & (ids[t] // local == r)).any():
                        total[t] += answer(seed, launch, r, rank.index, t).astype(np.float32)
            assert out.numpy().tobytes() == total.astype(ml_dtypes.bfloat16).tobytes(), note


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("kind", ["full", "dropped", "one rank"])
def test_against_numpy(device_name: str, kind: str, fp8: bool) -> None:
    ranks = ranks_on(device_name, 4)
    ep.spawn(run, ranks=ranks, device=device_name, args=(11, kind, fp8, 4))


def test_one_rank_alone(device_name: str) -> None:
    ep.spawn(run, ranks=1, device=device_name, args=(5, "dropped", False, 2))


@pytest.mark.parametrize("seed", [1, 2])
def test_schedules(device_name: str, seed: int) -> None:
    if not device_name.startswith("sim"):
        pytest.skip("the simulator's schedules")
    ep.spawn(run, ranks=2, device=device_name, args=(seed, "dropped", False, 5), seed=seed)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"hidden": 192}, "hidden=192 is not a multiple of 128"),
        ({"hidden": 640, "fp8": True}, "hidden=640 is not a multiple of 512"),
        ({"n_experts": 7, "n_ranks": 2}, "n_experts=7 does not divide among n_ranks=2"),
        ({"max_tokens_per_rank": 4096, "n_blocks": 3}, "4096 tokens in 3 blocks are 1366 a block"),
        ({"send_blocks": 4}, "combine: 4 sending blocks of n_blocks=4"),
        ({"n_ranks": 16, "n_experts": 16}, "n_ranks=16; the throughput mode"),
    ],
)
def test_refused_configurations(changes: dict[str, int], text: str) -> None:
    from epdsl.kernels.throughput import ThroughputExchange

    base = {"hidden": 512, "n_experts": 16, "n_ranks": 2, "top_k": 2, "max_tokens_per_rank": 64, "n_blocks": 4, "send_blocks": 2}
    with pytest.raises(ValueError, match=text):
        ThroughputExchange(**{**base, **changes})  # pyright: ignore[reportArgumentType]
