"""Routings to time an exchange with, and what they make it move. NumPy alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Routing:
    """How a router chooses experts; `parse_routing` reads it from text.

    kind      "uniform": top_k different experts, all equally likely
              "zipf": the i-th most popular expert with a probability in proportion to i to the power of -exponent, without repetition;
              which experts are popular is a permutation of the seed, equal on every rank
              "one-rank": every token's selections are experts of rank 0, equally likely; where it has fewer than top_k the rest is -1
    exponent  of "zipf"
    """

    kind: str
    exponent: float = 0.0

    def __str__(self) -> str:
        return f"zipf:{self.exponent:g}" if self.kind == "zipf" else self.kind

    def selections(self, rank: int, n_ranks: int, tokens: int, experts: int, top_k: int, seed: int) -> np.ndarray:
        """[tokens, top_k] i32: the experts of a rank's tokens, -1 for none. The same for the same arguments."""
        rng = np.random.default_rng([seed, rank])
        if self.kind == "one-rank":
            local = experts // n_ranks
            found = np.full((tokens, top_k), -1, np.int32)
            chosen = np.argsort(rng.random((tokens, local)), axis=1)[:, :top_k]
            found[:, : chosen.shape[1]] = chosen
            return found
        if self.kind == "uniform":
            return np.argsort(rng.random((tokens, experts)), axis=1)[:, :top_k].astype(np.int32)
        popularity = np.random.default_rng(seed).permutation(experts)
        log_weights = -self.exponent * np.log1p(popularity)
        # The top_k largest of log weight + Gumbel noise are drawn one after the other without replacement, in proportion to the weights.
        return np.argsort(-(log_weights + rng.gumbel(size=(tokens, experts))), axis=1)[:, :top_k].astype(np.int32)


UNIFORM = Routing("uniform")


def parse_routing(text: str) -> Routing:
    """`uniform`, `zipf:EXPONENT` or `one-rank`. Raises ValueError for anything else."""
    kind, colon, number = text.partition(":")
    if kind in ("uniform", "one-rank") and not colon:
        return Routing(kind)
    if kind == "zipf":
        try:
            exponent = float(number)
        except ValueError:
            exponent = -1.0
        if 0 < exponent < 100:
            return Routing("zipf", exponent)
    raise ValueError(f"routing {text!r} is not known; it is uniform, one-rank, or zipf: and a number above 0 and below 100, as zipf:1.2")


@dataclass(frozen=True)
class Traffic:
    """What the selections of all ranks make an exchange move.

    rows        [n_ranks, n_ranks]: tokens of rank s that have an expert on rank d, each counted once
    selections  [n_ranks]: (token, expert) pairs whose expert is on the rank
    tokens      of each rank
    """

    rows: np.ndarray
    selections: np.ndarray
    tokens: int

    @property
    def busiest_link_rows(self) -> int:
        """The most rows that one rank sends over its link, or receives over it: each direction of a link is a resource of its own."""
        remote = self.rows - np.diag(np.diag(self.rows))
        return int(max(remote.sum(axis=1).max(), remote.sum(axis=0).max()))

    def remote_rows(self, rank: int) -> int:
        """Rows that a rank's tokens send over the link."""
        return int(self.rows[rank].sum() - self.rows[rank, rank])


def traffic(selections: np.ndarray, experts: int) -> Traffic:
    """selections [n_ranks, tokens, top_k]: of all ranks."""
    n_ranks, tokens, _ = selections.shape
    local = experts // n_ranks
    owner = np.where(selections >= 0, selections // local, -1)
    rows = np.array([[(owner[s] == d).any(axis=1).sum() for d in range(n_ranks)] for s in range(n_ranks)])
    return Traffic(rows, np.array([(owner == d).sum() for d in range(n_ranks)]), tokens)


@dataclass(frozen=True)
class Floor:
    """The least an exchange can take: bytes of the busiest direction of a link, and of the memory of the rank that moves most."""

    link_bytes: int
    memory_bytes: int

    def us(self, link_gb_s: float, memory_gb_s: float) -> float:
        """Microseconds at these rates: link and memory work at the same time, so the longer of the two."""
        return max(self.link_bytes / link_gb_s, self.memory_bytes / memory_gb_s) / 1e3


def dispatch_floor(of: Traffic, row_bytes: int, expanded: bool, read_bytes: int | None = None) -> Floor:
    """A dispatch that reads each token once, sends it once to each rank, and writes it where it is needed.

    row_bytes   of a token on the link and in the output, scales included
    expanded    whether the output has a row for each (token, expert), made from the one that crossed the link
    read_bytes  of a token in the input, where that differs: it is quantised on the way
    """
    own = of.tokens * (row_bytes if read_bytes is None else read_bytes)
    arrived = of.rows.sum(axis=0)
    remote = arrived - np.diag(of.rows)
    # Expanded: the link's copy is written and read again, then a row is written for each selection.
    moved = own + row_bytes * (2 * remote + of.selections if expanded else arrived)
    return Floor(of.busiest_link_rows * row_bytes, int(moved.max()))


def combine_floor(of: Traffic, row_bytes: int, expanded: bool) -> Floor:
    """A combine that reads each expert's row once, sends one sum a rank and token, and adds what arrived.

    expanded: whether there is a row for each (token, expert), or one summed over the rank's experts already
    """
    back = of.rows.sum(axis=1) - np.diag(of.rows)
    read = of.selections if expanded else of.rows.sum(axis=0)
    return Floor(of.busiest_link_rows * row_bytes, int((row_bytes * (read + 2 * back + of.tokens)).max()))
