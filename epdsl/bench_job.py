"""What the timed exchanges are given, and what must come out: tokens, routing and answers of all ranks, held by each."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from .bench_routing import UNIFORM, Routing, Traffic, traffic

if TYPE_CHECKING:
    from collections.abc import Iterator

    from epdsl_runtime.rank import Rank

# What local expert e multiplies its rows by: entry e modulo their number.
FACTORS = np.array([1.0, 1.5, 0.75], np.float32)
# Rows compared at once, so that the float copies of a large job fit.
ROWS_AT_ONCE = 8192


@dataclass(frozen=True)
class Settings:
    """What a series of measurements has in common. hidden: elements of a token; experts: of the whole layer."""

    hidden: int = 7168
    experts: int = 256
    top_k: int = 8
    routing: Routing = UNIFORM
    seed: int = 1
    repetitions: int = 50
    flush_bytes: int = 256 << 20


class Job:
    """Tokens and routing of every rank, and what one rank's rows must then be.

    tokens   [n_ranks * per_rank, hidden] bf16 of all ranks, in order of ranks; ids, weights alike [.., top_k]
    mine     where this rank's are
    """

    def __init__(self, rank: Rank, per_rank: int, settings: Settings) -> None:
        s = settings
        self.rank, self.per_rank, self.local = rank, per_rank, s.experts // rank.size
        rngs = [np.random.default_rng([s.seed, r, per_rank]) for r in range(rank.size)]
        self.tokens = np.concatenate([rng.standard_normal((per_rank, s.hidden), np.float32).astype(ml_dtypes.bfloat16) for rng in rngs])
        self.ids = np.concatenate([s.routing.selections(r, rank.size, per_rank, s.experts, s.top_k, s.seed) for r in range(rank.size)])
        self.weights = np.concatenate([rng.random((per_rank, s.top_k), np.float32) for rng in rngs])
        self.mine = slice(rank.index * per_rank, (rank.index + 1) * per_rank)
        self.traffic: Traffic = traffic(self.ids.reshape(rank.size, per_rank, s.top_k), s.experts)

    # ---- what each format carries

    @cached_property
    def quantised(self) -> tuple[np.ndarray, np.ndarray]:
        """All ranks' tokens as e4m3 with a f32 scale per 128 elements: max(largest, 1e-4) / 448, in f32 arithmetic."""
        codes = np.empty(self.tokens.shape, ml_dtypes.float8_e4m3fn)
        scales = np.empty((len(self.tokens), self.tokens.shape[1] // 128), np.float32)
        for part in parts(len(self.tokens)):
            wide = self.tokens[part].astype(np.float32).reshape(-1, scales.shape[1], 128)
            largest = np.maximum(np.abs(wide).max(axis=2), np.float32(1e-4))
            scales[part] = largest * np.float32(1 / 448)
            codes[part] = (wide * (np.float32(448) / largest)[..., None]).astype(codes.dtype).reshape(len(wide), -1)
        return codes, scales

    # ---- what must arrive

    @cached_property
    def selected(self) -> tuple[np.ndarray, np.ndarray]:
        """(token, local expert) of every selection of this rank's experts, in order of (token, selection)."""
        local = self.ids - self.rank.index * self.local
        here = (self.ids >= 0) & (local >= 0) & (local < self.local)
        return np.nonzero(here)[0], local[here]

    def expert_major(self, own_first: bool) -> tuple[np.ndarray, np.ndarray]:
        """(token, local expert) of this rank's rows in order of (expert, source, token); own_first: sources from this rank on, around."""
        token, expert = self.selected
        source = token // self.per_rank
        if own_first:
            source = (source - self.rank.index) % self.rank.size
        order = np.lexsort((token, source, expert))
        return token[order], expert[order]

    @cached_property
    def once_a_rank(self) -> np.ndarray:
        """Tokens that have an expert on this rank, in order of (source, token)."""
        return np.unique(self.selected[0])

    def check_rows(self, what: str, got: Any, wanted: np.ndarray, tokens: np.ndarray) -> None:
        """Rows of a device array are those of these tokens in `wanted`, bit for bit. Raises AssertionError."""
        for part in parts(len(tokens)):
            found, right = got[part].numpy(), wanted[tokens[part]]
            assert found.tobytes() == right.tobytes(), f"rank {self.rank.index}: {what} of rows {part.start} to {part.stop - 1} differ"

    # ---- what the experts answer, and the sums of it

    def answer(self, token: np.ndarray, expert: np.ndarray) -> np.ndarray:
        """What local experts return for tokens: the token times the expert's factor, bf16."""
        factor = FACTORS[expert % len(FACTORS)][:, None]
        return (self.tokens[token].astype(np.float32) * factor).astype(ml_dtypes.bfloat16)

    def check_sums(self, out: Any, slack: float = 1.0) -> None:
        """A device array of this rank's combined tokens is within two roundings to bf16 of the weighted sums. Raises AssertionError.

        slack: how many times that is allowed, for sums that are rounded more often
        """
        for part in parts(self.per_rank):
            at = slice(self.mine.start + part.start, self.mine.start + part.stop)
            exact, size = self.weighted_sum(at)
            wrong = ~(np.abs(out[part].numpy().astype(np.float32) - exact) <= 2.0**-8 * (size + np.abs(exact)) * 1.02 * slack + 1e-5)
            assert not wrong.any(), f"rank {self.rank.index}: combine differs for {int(wrong.any(axis=1).sum())} tokens of {len(exact)}"

    def weighted_sum(self, at: slice | np.ndarray, rank: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """f32 sums of the answers of all ranks' experts, or of one rank's, for tokens `at`; and the same sums of magnitudes."""
        x, ids, weights = self.tokens[at].astype(np.float32), self.ids[at], self.weights[at]
        exact, size = np.zeros_like(x), np.zeros_like(x)
        chosen = (ids >= 0) if rank is None else (ids >= 0) & (ids // self.local == rank)
        for number, factor in enumerate(FACTORS):
            share = np.where(chosen & (ids % self.local % len(FACTORS) == number), weights, 0).sum(axis=1)[:, None]
            part = (x * factor).astype(ml_dtypes.bfloat16).astype(np.float32) * share
            exact, size = exact + part, size + np.abs(part)
        return exact, size


def parts(count: int) -> Iterator[slice]:
    """Slices that cover `count` rows, ROWS_AT_ONCE at a time."""
    return (slice(first, min(first + ROWS_AT_ONCE, count)) for first in range(0, count, ROWS_AT_ONCE))
