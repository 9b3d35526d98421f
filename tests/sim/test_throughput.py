"""The throughput mode against NumPy: every routing that hurts, bf16 and e4m3 rows, launches in a row."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np
import pytest
from device_ranks import ranks_on

import epdsl as ep
from epdsl.kernels.throughput import ThroughputExchange
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


@dataclass(frozen=True)
class Shares(ThroughputExchange):
    """Every block's part of a dispatch, without the dispatch."""

    @ep.kernel(max_threads=64, blocks=lambda self: self.n_blocks)
    def parts(self, totals: ep.Ptr[ep.i32], n_tokens: ep.i32, my_rank: ep.i32, out: ep.Ptr[ep.i32]):
        """out [n_blocks, 2 + n_ranks]: first token, the one after the last, whether rows of each rank are stored."""
        first, last, served = self.share(ep.block_idx.x, n_tokens, totals, my_rank)
        if ep.thread_idx.x == 0:
            at = out + ep.block_idx.x * (2 + self.n_ranks)
            at[0] = first
            at[1] = last
            for r in self.ranks:
                at[2 + r] = ep.i32(served[r])


# Blocks, tokens, this rank, how many tokens go to each rank, and how many blocks send, None where each does both. With 1024 threads a role
# needs a block for every 1024 tokens.
SHARES = [
    (24, 4096, 0, (4096, 4096), 16),
    (132, 4096, 1, (4080, 4080), 88),
    (24, 4096, 0, (4096, 2049), 12),
    (24, 4096, 1, (4096, 2049), 17),
    (24, 4096, 0, (4096, 2048), None),
    (24, 4096, 1, (4096, 2048), None),
    (24, 4096, 0, (4096, 0), None),
    (24, 4096, 0, (4096,), None),
    (24, 4096, 2, (2700, 2700, 2700, 2700, 2700, 2700, 2700, 2700), 20),
    (8, 4096, 0, (4096, 4096), 4),
    (7, 4096, 0, (4096, 4096), None),
    (2, 1, 0, (1, 1), 1),
    (24, 0, 0, (0, 0), None),
]


def share_out(rank: ep.Rank) -> None:
    for blocks, tokens, me, totals, senders in SHARES:
        k = Shares(128, 2 * len(totals), len(totals), 2, max(tokens, 1), blocks, send_blocks=1)
        out = rank.zeros("i32", (blocks, 2 + len(totals)))
        k.parts.launch(rank, grid=blocks, block=64, args=(rank.array(np.array(totals, np.int32)), tokens, me, out))
        rank.synchronize()
        found = out.numpy()
        first, last, served = found[:, 0], found[:, 1], found[:, 2:].astype(bool)
        case = f"{(blocks, tokens, me, totals, senders)}: {found.tolist()}"
        sends, keeps = np.delete(served, me, axis=1).all(axis=1), served[:, me]
        if senders is None:
            assert served.all(), case
        else:
            numbers = np.arange(blocks)
            assert (sends == (numbers < senders)).all(), case
            assert (keeps == (numbers >= senders)).all(), case
        assert ((last - first >= 0) & (last - first <= 1024)).all(), case
        for r in range(len(totals)):
            ends = np.concatenate([[0], last[served[:, r]]])
            assert (first[served[:, r]] == ends[:-1]).all() and ends[-1] == tokens, f"rank {r} of {case}"


def test_every_row_is_stored_once(device_name: str) -> None:
    ep.spawn(share_out, ranks=1, device=device_name)


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
    base = {"hidden": 512, "n_experts": 16, "n_ranks": 2, "top_k": 2, "max_tokens_per_rank": 64, "n_blocks": 4, "send_blocks": 2}
    with pytest.raises(ValueError, match=text):
        ThroughputExchange(**{**base, **changes})  # pyright: ignore[reportArgumentType]
