"""The latency mode against NumPy, by both protocols: every routing that hurts, bf16 and fp8, launches in a row."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from device_ranks import ranks_on

import epdsl as ep
from epdsl.moe_low_latency import LowLatencyMoE, Protocol

HIDDEN, EXPERTS, TOP_K, TOKENS = 256, 8, 3, 12


def routing(rng: np.random.Generator, kind: str, tokens: int) -> np.ndarray:
    if kind == "one":
        ids = np.tile(np.array([EXPERTS - 1, -1, -1], np.int32), (tokens, 1))
    else:
        ids = np.stack([rng.permutation(EXPERTS)[:TOP_K] for _ in range(tokens)] or [np.zeros(TOP_K)]).astype(np.int32)[:tokens]
        if kind == "dropped":
            ids[rng.random(ids.shape) < 0.4] = -1
    return ids.reshape(tokens, TOP_K)


def quantised(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """e4m3 codes and scales of bf16 rows: f32 arithmetic as published, in NumPy."""
    wide = x.astype(np.float32).reshape(len(x), -1, 128)
    largest = np.maximum(np.abs(wide).max(axis=2), np.float32(1e-4))
    codes = (wide * (np.float32(448.0) / largest)[..., None]).clip(-448, 448).astype(ml_dtypes.float8_e4m3fn)
    return codes.reshape(len(x), -1), largest * np.float32(1.0 / 448.0)


def run(rank: ep.Rank, seed: int, kind: str, fp8: bool, launches: int, protocol: Protocol, hidden: int = HIDDEN) -> None:
    layer = LowLatencyMoE(
        rank,
        hidden=hidden,
        n_experts=EXPERTS,
        top_k=TOP_K,
        max_tokens_per_rank=TOKENS,
        fp8=fp8,
        n_blocks=4 if protocol == "flags" else None,
        num_threads=64,
        protocol=protocol,
    )
    local = EXPERTS // rank.size
    for launch in range(launches):
        job = []
        for r in range(rank.size):
            rng = np.random.default_rng([seed, launch, r])
            tokens = [TOKENS, 0, 5, 1][(r + launch) % 4] if kind != "full" else TOKENS
            x = rng.standard_normal((tokens, hidden)).astype(ml_dtypes.bfloat16)
            job.append((x, routing(rng, kind, tokens), rng.random((tokens, TOP_K), np.float32)))
        handle = layer.dispatch(*job[rank.index])
        for bank in (handle.rows,):
            assert bank.shape == (local, rank.size * TOKENS, hidden)
        rank.synchronize()
        rows, counts = handle.rows.numpy(), handle.expert_counts.numpy()
        order = [(rank.index + step) % rank.size for step in range(rank.size)]
        expected: list[list[tuple[int, int, int]]] = [[] for _ in range(local)]
        for r in order:
            for t, ids in enumerate(job[r][1]):
                for k, e in enumerate(ids):
                    if e // local == rank.index and e >= 0:
                        expected[e - rank.index * local].append((r, t, k))
        assert counts.tolist() == [len(e) for e in expected], f"seed {seed} launch {launch}"
        y = np.zeros((local, rank.size * TOKENS, hidden), ml_dtypes.bfloat16)
        for e, places in enumerate(expected):
            for row, (r, t, _) in enumerate(places):
                x = job[r][0][t : t + 1]
                if fp8:
                    codes, scales = quantised(x)
                    assert rows[e, row].tobytes() == codes.tobytes(), f"seed {seed} launch {launch} expert {e} row {row}"
                    assert handle.scales is not None
                    assert handle.scales[e].numpy()[row].tobytes() == scales.tobytes()
                else:
                    assert rows[e, row].tobytes() == x.tobytes(), f"seed {seed} launch {launch} expert {e} row {row}"
                y[e, row] = (x.astype(np.float32)[0] * (1 + rank.index * local + e)).astype(ml_dtypes.bfloat16)
        out = layer.combine(rank.array(y, "bf16"), handle)
        rank.synchronize()
        x, ids, weights = job[rank.index]
        exact = np.zeros((len(x), hidden))
        size = np.zeros((len(x), hidden))
        for k in range(TOP_K):
            e = ids[:, k]
            value = (x.astype(np.float32) * (1 + e)[:, None].astype(np.float32)).astype(ml_dtypes.bfloat16).astype(np.float64)
            part = np.where((e >= 0)[:, None], value * weights[:, k : k + 1], 0.0)
            exact, size = exact + part, size + np.abs(part)
        if len(x):
            got = out.numpy()[: len(x)].astype(np.float64)
            # Each rank's sum is rounded to bf16 once for the link and the total once more.
            bound = 2.0**-8 * (size + np.abs(exact)) * 1.01 + 1e-6
            assert (np.abs(got - exact) <= bound).all(), f"seed {seed} launch {launch}: {np.abs(got - exact).max()}"


both = pytest.mark.parametrize("protocol", ["flags", "stamps"])


@both
@pytest.mark.parametrize("fp8", [True, False])
@pytest.mark.parametrize("kind", ["full", "dropped", "one"])
def test_against_numpy(device_name: str, kind: str, fp8: bool, protocol: Protocol) -> None:
    ranks = ranks_on(device_name, 4)
    ep.spawn(run, ranks=ranks, device=device_name, args=(7, kind, fp8, 4, protocol))


@both
def test_one_rank_alone(device_name: str, protocol: Protocol) -> None:
    ep.spawn(run, ranks=1, device=device_name, args=(3, "dropped", True, 2, protocol))


@both
def test_more_pieces_than_threads(device_name: str, protocol: Protocol) -> None:
    ep.spawn(run, ranks=2, device=device_name, args=(4, "dropped", True, 2, protocol, 640))


@both
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_schedules(device_name: str, seed: int, protocol: Protocol) -> None:
    if not device_name.startswith("sim"):
        pytest.skip("the simulator's schedules")
    ep.spawn(run, ranks=2, device=device_name, args=(seed, "dropped", True, 5, protocol), seed=seed)


def around(rank: ep.Rank, seed: int) -> None:
    """Three launches without tokens, then the combine's numbers go on before they wrap around."""
    layer = LowLatencyMoE(
        rank, hidden=HIDDEN, n_experts=4, top_k=2, max_tokens_per_rank=3, fp8=False, num_threads=64, protocol="stamps", timeout_ns=10**9
    )
    ids = np.array([[0, 3], [1, 2], [2, 0]], np.int32)
    for launch in range(9):
        tokens = 0 if launch < 3 else 3
        if launch == 3:
            layer._back_epochs.copy_from(np.full(3, 2**32 - 2, np.uint32))
        handle = layer.dispatch(np.zeros((tokens, HIDDEN), ml_dtypes.bfloat16), ids[:tokens], np.ones((tokens, 2), np.float32))
        y = np.full((4 // rank.size, rank.size * 3, HIDDEN), launch + 1).astype(ml_dtypes.bfloat16)
        out = layer.combine(rank.array(y, "bf16"), handle)
        rank.synchronize()
        assert (out.numpy()[:tokens].astype(np.float32) == 2 * (launch + 1)).all(), f"seed {seed} launch {launch}"
        rank.barrier()


@pytest.mark.parametrize("seed", [1, 2])
def test_numbers_that_wrap_around(device_name: str, seed: int) -> None:
    """At the number 0 no place may pass for sent because it still holds what it was made with."""
    ep.spawn(around, ranks=2, device=device_name, args=(seed,), seed=seed if device_name.startswith("sim") else None)


def test_refusals(device_name: str) -> None:
    ep.spawn(refuse, ranks=1, device=device_name)


def refuse(rank: ep.Rank) -> None:
    layer = LowLatencyMoE(rank, hidden=256, n_experts=8, top_k=2, max_tokens_per_rank=4, n_blocks=2, num_threads=64)
    x = np.zeros((5, 256), ml_dtypes.bfloat16)
    with pytest.raises(ValueError, match="5 tokens, the layer was made for max_tokens_per_rank=4"):
        layer.dispatch(x, np.zeros((5, 2), np.int32), np.zeros((5, 2), np.float32))
    with pytest.raises(ValueError, match=r"x has shape \(3, 128\), expected \(3, 256\)"):
        layer.dispatch(x[:3, :128].copy(), np.zeros((3, 2), np.int32), np.zeros((3, 2), np.float32))
    with pytest.raises(TypeError, match="topk_idx holds i64, expected i32"):
        layer.dispatch(x[:3], np.zeros((3, 2), np.int64), np.zeros((3, 2), np.float32))
    with pytest.raises(ValueError, match="hidden=192 is not a multiple of 128"):
        LowLatencyMoE(rank, hidden=192, n_experts=8, top_k=2, max_tokens_per_rank=4, n_blocks=2, num_threads=64)
