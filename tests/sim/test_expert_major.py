"""The throughput mode with expert-major rows against NumPy: every routing that hurts, both formats, launches in a row."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from device_ranks import ranks_on
from epdsl_runtime import DeviceAssertionError, PeerTimeout

import epdsl as ep
from epdsl.moe_expert_major import ExpertMajorMoE

HIDDEN, EXPERTS, TOP_K, TOKENS = 512, 16, 3, 40


def routing(rng: np.random.Generator, kind: str, tokens: int) -> np.ndarray:
    ids = np.argsort(rng.random((tokens, EXPERTS)), axis=1)[:, :TOP_K].astype(np.int32)
    if kind == "dropped":
        ids[rng.random(ids.shape) < 0.6] = -1
    elif kind == "one rank":
        ids[:] = [EXPERTS - 1, EXPERTS - 2, EXPERTS + 5]
    elif kind == "repeated":
        ids[::2, 1] = ids[::2, 0]
    return ids


def quantised(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """e4m3 codes and scales of bf16 rows: f32 arithmetic as published, in NumPy."""
    wide = x.astype(np.float32).reshape(len(x), -1, 128)
    largest = np.maximum(np.abs(wide).max(axis=2), np.float32(1e-4))
    codes = (wide * (np.float32(448.0) / largest)[..., None]).clip(-448, 448).astype(ml_dtypes.float8_e4m3fn)
    return codes.reshape(len(x), -1), largest * np.float32(1.0 / 448.0)


def run(rank: ep.Rank, seed: int, kind: str, launches: int, **options: Any) -> None:
    layer = ExpertMajorMoE(rank, hidden=HIDDEN, n_experts=EXPERTS, top_k=TOP_K, max_tokens_per_rank=TOKENS, **options)
    local, alignment = EXPERTS // rank.size, options.get("alignment", 1)
    for launch in range(launches):
        job = []
        for r in range(rank.size):
            rng = np.random.default_rng([seed, launch, r])
            tokens = [TOKENS, 0, 17, 1][(r + launch) % 4] if kind != "full" else TOKENS
            x = rng.standard_normal((tokens, HIDDEN)).astype(ml_dtypes.bfloat16)
            job.append((x, routing(rng, kind, tokens), rng.random((tokens, TOP_K), np.float32)))
        handle = layer.dispatch(*job[rank.index])
        rank.synchronize()
        note = f"seed {seed} launch {launch} rank {rank.index}"
        expected = [
            [(r, t) for r in range(rank.size) for t, ids in enumerate(job[r][1]) if rank.index * local + e in ids] for e in range(local)
        ]
        starts = [0]
        for places in expected:
            starts.append(starts[-1] + -(-len(places) // alignment) * alignment)
        assert handle.expert_counts.numpy().tolist() == [len(places) for places in expected], note
        assert handle.expert_rows.numpy().tolist() == starts, note
        assert handle.source_tokens.numpy().tolist() == [len(x) for x, _, _ in job], note
        rows = handle.rows.numpy()
        y = np.zeros(rows.shape, ml_dtypes.bfloat16)
        for e, places in enumerate(expected):
            for row, (r, t) in enumerate(places, starts[e]):
                x = job[r][0][t : t + 1]
                if handle.scales is not None:
                    codes, scales = quantised(x)
                    assert rows[row].tobytes() == codes.tobytes(), f"{note} expert {e} row {row}"
                    assert handle.scales[row : row + 1].numpy().tobytes() == scales.tobytes(), f"{note} expert {e} row {row}"
                else:
                    assert rows[row].tobytes() == x.tobytes(), f"{note} expert {e} row {row}"
                y[row] = (x.astype(np.float32)[0] * (1 + rank.index * local + e)).astype(ml_dtypes.bfloat16)
        row_of = handle.row_of.numpy()
        for r in range(rank.size):
            for t, ids in enumerate(job[r][1]):
                here = [e - rank.index * local if e >= 0 and e // local == rank.index else -1 for e in ids]
                assert row_of[r, t].tolist() == [-1 if e < 0 else starts[e] + expected[e].index((r, t)) for e in here], note
        out = layer.combine(rank.array(y, "bf16"), handle)
        rank.synchronize()
        x, ids, weights = job[rank.index]
        exact, size = np.zeros((len(x), HIDDEN)), np.zeros((len(x), HIDDEN))
        for k in range(TOP_K):
            e = ids[:, k]
            value = (x.astype(np.float32) * (1 + e)[:, None].astype(np.float32)).astype(ml_dtypes.bfloat16).astype(np.float64)
            part = np.where(((e >= 0) & (e < EXPERTS))[:, None], value * weights[:, k : k + 1], 0.0)
            exact, size = exact + part, size + np.abs(part)
        if len(x):
            got = out.numpy()[: len(x)].astype(np.float64)
            # Each rank's sum is rounded to bf16 once for the link and the total once more.
            bound = 2.0**-8 * (size + np.abs(exact)) * 1.01 + 1e-6
            assert (np.abs(got - exact) <= bound).all(), f"{note}: {np.abs(got - exact).max()}"


FEW_SEND = {"n_blocks": 5, "num_threads": (256, 256), "send_blocks": (2, 3)}
MOST_SEND = {"n_blocks": 4, "num_threads": (384, 256), "send_blocks": (3, 1)}


@pytest.mark.parametrize("fp8", [True, False])
@pytest.mark.parametrize("kind", ["full", "dropped", "one rank", "repeated"])
def test_against_numpy(device_name: str, kind: str, fp8: bool) -> None:
    ranks = ranks_on(device_name, 4)
    roles = FEW_SEND if kind in ("full", "dropped") else MOST_SEND
    options = {"fp8": fp8, "alignment": 8 if kind == "dropped" else 1, **roles}
    ep.spawn(run_with, ranks=ranks, device=device_name, args=(11, kind, 4, options))


def run_with(rank: ep.Rank, seed: int, kind: str, launches: int, options: dict[str, Any]) -> None:
    run(rank, seed, kind, launches, **options)


def test_one_rank_alone(device_name: str) -> None:
    ep.spawn(run_with, ranks=1, device=device_name, args=(5, "dropped", 2, MOST_SEND))


@pytest.mark.parametrize("seed", [1, 2])
def test_schedules(device_name: str, seed: int) -> None:
    if not device_name.startswith("sim"):
        pytest.skip("the simulator's schedules")
    ep.spawn(run_with, ranks=2, device=device_name, args=(seed, "dropped", 5, FEW_SEND), seed=seed)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"hidden": 640}, "hidden=640 is not a multiple of 512"),
        ({"n_experts": 7}, "n_experts=7 does not divide among n_ranks=2"),
        ({"top_k": 17}, "top_k=17 of 16 experts"),
        ({"num_threads": (256, 200)}, "num_threads=200; it must be a multiple of 128"),
        ({"max_tokens_per_rank": 1 << 17}, "max_tokens_per_rank=131072"),
        ({"alignment": 0}, "alignment=0"),
        ({"send_blocks": (4, 1)}, "dispatch: 4 sending blocks of n_blocks=4"),
        ({"send_blocks": (1, 0)}, "combine: 0 sending blocks of n_blocks=4"),
    ],
)
def test_refused_configurations(changes: dict[str, Any], text: str) -> None:
    from epdsl.kernels.expert_major import ExpertMajorExchange

    base: dict[str, Any] = {
        "hidden": 512,
        "n_experts": 16,
        "n_ranks": 2,
        "top_k": 2,
        "max_tokens_per_rank": 64,
        "n_blocks": 4,
        "send_blocks": (1, 1),
    }
    with pytest.raises(ValueError, match=text):
        ExpertMajorExchange(**{**base, **changes})


def impatient(rank: ep.Rank) -> ExpertMajorMoE:
    return ExpertMajorMoE(
        rank, hidden=HIDDEN, n_experts=EXPERTS, top_k=TOP_K, max_tokens_per_rank=TOKENS, fp8=False, timeout_ns=3 * 10**8, **FEW_SEND
    )


def say(rank: ep.Rank, buffer: Any, value: int) -> None:
    """Rank 1 writes its part of rank 0's buffer, as of launch 1."""
    whole = np.full(buffer.local.size, value, buffer.local.dtype)
    # A bank has rank 0's part, then rank 1's; launch 1 uses the second bank.
    rank.device.upload(buffer.peers.addresses[0] + whole.nbytes // 4 * 3, whole[: whole.size // 4])


def dispatch_all(layer: ExpertMajorMoE) -> None:
    x = np.ones((TOKENS, HIDDEN), ml_dtypes.bfloat16)
    layer.dispatch(x, np.tile(np.arange(TOP_K, dtype=np.int32), (TOKENS, 1)), np.ones((TOKENS, TOP_K), np.float32))


def failure_of_rank_0(rank: ep.Rank, layer: ExpertMajorMoE, kind: type[Exception]) -> str:
    """What rank 0 raises that dispatches alone, once rank 1 has written its words."""
    rank.barrier()
    if rank.index == 1:
        return ""
    dispatch_all(layer)
    with pytest.raises(kind) as caught:
        rank.synchronize()
    return str(caught.value)


def garbled(rank: ep.Rank, word: int) -> str:
    """Rank 1 writes counts that cannot be into rank 0's memory, with the number of its launch; the rows lie before others' memory."""
    layer = impatient(rank)
    inside = layer.kernel.max_rows
    around = rank.empty("bf16", (2 * inside, HIDDEN)).fill_bytes(0x5A)
    layer._rows = around[:inside]
    rank.barrier()
    if rank.index == 1:
        # With tokens of rank 1 to look at: each in the last slot of the last expert.
        last = (EXPERTS // 2 - 1) << 16 | (TOKENS - 1)
        for buffer, value in ((layer._counts, 1 << 32 | word), (layer._headers, last), (layer._flags, 1)):
            say(rank, buffer, value)
    found = failure_of_rank_0(rank, layer, DeviceAssertionError)
    if rank.index == 0:
        assert (around[inside:].numpy().view(np.uint8) == 0x5A).all(), "rows were written outside their memory"
        assert layer._row_of.numpy().max() < inside
    return found


def told_but_not_sent(rank: ep.Rank) -> str:
    """Rank 1 says how many tokens it sends, in its launch's words, and sends none."""
    layer = impatient(rank)
    rank.barrier()
    if rank.index == 1:
        say(rank, layer._counts, 1 << 32 | 5)
    found = failure_of_rank_0(rank, layer, PeerTimeout)
    if rank.index == 0:
        # The kernel ends all the same: the device can be used.
        layer._row_of.numpy()
    return found


def test_a_warp_whose_lane_gave_up_a_token_takes_no_more(device_name: str) -> None:
    found = ep.spawn(told_but_not_sent, ranks=2, device=device_name, timeout=60)[0]
    assert "a wait timed out: rank 0" in found and "v == epoch" in found, found


@pytest.mark.parametrize(
    ("word", "text"),
    [
        (12345, "dispatch: rank 1 says 12345 tokens (count"),
        # Each may be, but not all of them: 8 experts, 40 tokens of 3 selections.
        (TOKENS, "dispatch: the ranks' counts need "),
    ],
)
def test_a_garbled_count_is_reported_and_nothing_is_written_outside(device_name: str, word: int, text: str) -> None:
    found = ep.spawn(garbled, ranks=2, device=device_name, args=(word,), timeout=60)[0]
    assert "a device assert failed: rank 0" in found and text in found, found
