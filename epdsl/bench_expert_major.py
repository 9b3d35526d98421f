"""Timing and checks of the throughput mode with expert-major rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from .bench import Stopwatch, remote_rows, uniform_routing

if TYPE_CHECKING:
    from epdsl_runtime.rank import Rank

FACTORS = np.array([1.0, 1.5, 0.75], np.float32)


class Job:
    """Tokens and routing of every rank, and what a rank's rows must then be.

    tokens [n_ranks * tokens, hidden] bf16 of all ranks; ids alike [.., top_k]
    chosen   for each of the rank's rows its token, in order of (expert, source, token); expert: the row's local expert
    """

    def __init__(self, rank: Rank, tokens: int, experts: int, top_k: int, hidden: int, seed: int) -> None:
        self.per_rank, self.local = tokens, experts // rank.size
        rngs = [np.random.default_rng([seed, r, tokens]) for r in range(rank.size)]
        self.tokens = np.concatenate([rng.standard_normal((tokens, hidden), np.float32).astype(ml_dtypes.bfloat16) for rng in rngs])
        self.ids = np.concatenate([uniform_routing(r, tokens, experts, top_k, seed) for r in range(rank.size)])
        self.weights = np.concatenate([rng.random((tokens, top_k), np.float32) for rng in rngs])
        local = self.ids - rank.index * self.local
        token, _ = np.nonzero((local >= 0) & (local < self.local))
        expert = local[(local >= 0) & (local < self.local)]
        order = np.argsort(expert, kind="stable")
        self.chosen, self.expert = token[order], expert[order]
        self.mine = slice(rank.index * tokens, (rank.index + 1) * tokens)

    def answers(self, max_rows: int) -> np.ndarray:
        """What the experts return: their tokens times a factor of the expert; poison in the rows that are not in use."""
        y = np.full((max_rows, self.tokens.shape[1]), np.nan, ml_dtypes.bfloat16)
        for number, factor in enumerate(FACTORS):
            rows = np.flatnonzero(self.expert % len(FACTORS) == number)
            y[rows] = (self.tokens[self.chosen[rows]].astype(np.float32) * factor).astype(ml_dtypes.bfloat16)
        return y

    def check_rows(self, rank: Rank, handle: Any) -> None:
        """Every row is the token it should be: bit for bit, or within FP8's rounding. Raises AssertionError."""
        used = len(self.chosen)
        assert handle.expert_rows.numpy()[-1] == used, f"rank {rank.index}: {handle.expert_rows.numpy()[-1]} rows, expected {used}"
        got = handle.rows[:used].numpy()
        wanted = self.tokens[self.chosen]
        if handle.scales is None:
            assert (got.view(np.uint16) == wanted.view(np.uint16)).all(), f"rank {rank.index}: rows differ"
            return
        scales = handle.scales[:used].numpy()
        wide = wanted.astype(np.float32).reshape(used, -1, 128)
        largest = np.maximum(np.abs(wide).max(axis=2), np.float32(1e-4))
        assert (scales == largest * np.float32(1 / 448)).all(), f"rank {rank.index}: scales differ"
        back = got.astype(np.float32).reshape(wide.shape) * scales[..., None]
        assert (np.abs(back - wide) <= np.abs(wide) / 16 + scales[..., None] * 2**-9).all(), f"rank {rank.index}: beyond FP8's rounding"

    def check_sums(self, rank: Rank, out: np.ndarray) -> None:
        """Within two roundings to bf16 of the weighted sum. Raises AssertionError."""
        x = self.tokens[self.mine].astype(np.float32)
        ids, weights = self.ids[self.mine], self.weights[self.mine]
        exact, size = np.zeros_like(x), np.zeros_like(x)
        for number, factor in enumerate(FACTORS):
            share = np.where((ids >= 0) & (ids % self.local % len(FACTORS) == number), weights, 0).sum(axis=1)[:, None]
            part = (x * factor).astype(ml_dtypes.bfloat16).astype(np.float32) * share
            exact, size = exact + part, size + np.abs(part)
        wrong = ~(np.abs(out.astype(np.float32) - exact) <= 2.0**-8 * (size + np.abs(exact)) * 1.02 + 1e-5)
        assert not wrong.any(), f"rank {rank.index}: combine differs for {int(wrong.any(axis=1).sum())} tokens"


def expert_major_rank(
    rank: Rank,
    shapes: Sequence[tuple[int, int, bool]],
    hidden: int,
    experts: int,
    top_k: int,
    seed: int,
    repetitions: int,
    **options: Any,
) -> list[dict[str, Any]]:
    """Dispatch, and combine where it is bf16, at each (tokens, blocks, fp8). options: of the layer."""
    from epdsl.moe_expert_major import ExpertMajorMoE

    watch = Stopwatch(rank, repetitions)
    rows: list[dict[str, Any]] = []
    jobs: dict[int, Job] = {}
    for tokens, n_blocks, fp8 in shapes:
        if tokens not in jobs:
            jobs = {tokens: Job(rank, tokens, experts, top_k, hidden, seed)}
        job = jobs[tokens]
        layer = ExpertMajorMoE(
            rank, hidden=hidden, n_experts=experts, top_k=top_k, max_tokens_per_rank=tokens, n_blocks=n_blocks, fp8=fp8, **options
        )
        k = layer.kernel
        arrays = (rank.array(job.tokens[job.mine], "bf16"), rank.array(job.ids[job.mine], "i32"), rank.array(job.weights[job.mine], "f32"))
        rank.device.memset(layer.rows.address, 0xFF, layer.rows.nbytes)
        layer.dispatch(*arrays)
        handle = layer.dispatch(*arrays)
        rank.synchronize()
        job.check_rows(rank, handle)
        name = f"{tokens} tokens, {k.n_blocks} blocks"
        sent = remote_rows(rank, job.ids[job.mine], experts)
        launch, handle = layer.prepare_dispatch(*arrays)
        timing = watch.time(f"dispatch {'FP8' if fp8 else 'BF16'}, {name}", launch, "expert-major")
        rows.append({**timing.row(), "remote_gb_s": sent * 4 * k.payload_words / timing.less_empty / 1e3})
        if not fp8:
            y = rank.array(job.answers(k.max_rows), "bf16")
            out = rank.empty("bf16", (tokens, hidden))
            rank.device.memset(out.address, 0xFF, out.nbytes)
            layer.combine(y, handle, out)
            rank.synchronize()
            job.check_sums(rank, out.numpy())
            timing = watch.time(f"combine BF16, {name}", layer.prepare_combine(y, handle, out), "expert-major, weighted")
            rows.append({**timing.row(), "remote_gb_s": sent * 2 * hidden / timing.less_empty / 1e3})
        rank.barrier()
        layer.close()
    return rows
