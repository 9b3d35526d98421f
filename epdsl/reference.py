"""What an expert-parallel layer computes, in NumPy, and sample inputs for it. Shares no code with the kernels.

Shapes: n tokens of H bf16 values on each of R ranks, E experts (L = E / R on each rank), K selections a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

BF16 = np.dtype(ml_dtypes.bfloat16)
F32_ROUNDOFF = 2.0**-24
BF16_ROUNDOFF = 2.0**-8
BF16_TINY = 2.0**-133
CHUNK = 256


@dataclass(frozen=True)
class Routing:
    """What a router decided for one rank's tokens: topk_idx i32 [n, K] (-1 for none), topk_weights f32 [n, K]."""

    topk_idx: NDArray[np.int32]
    topk_weights: NDArray[np.float32]

    @property
    def n_tokens(self) -> int:
        return self.topk_idx.shape[0]


def skewed_routing(seed: int, rank: int, launch: int, n_tokens: int, n_experts: int, top_k: int, skew: float = 0.7) -> Routing:
    """A seeded routing in which some experts are much busier than others, no expert twice in a row, weights of a row summing to 1.

    The i-th most popular expert has probability proportional to (i + 1) ** -skew; which expert that is depends on the seed alone.
    """
    popularity = np.random.default_rng([seed, 1]).permutation(n_experts)
    rng = np.random.default_rng([seed, 2, launch, rank])
    logits = -skew * np.log1p(popularity).astype(np.float32) + rng.gumbel(size=(n_tokens, n_experts)).astype(np.float32)
    topk_idx = np.argsort(-logits, axis=1, kind="stable")[:, :top_k].astype(np.int32)
    scores = np.exp(np.take_along_axis(logits, topk_idx.astype(np.int64), axis=1) - logits.max(axis=1, keepdims=True, initial=0))
    weights = scores / scores.sum(axis=1, keepdims=True)
    return Routing(topk_idx, weights.astype(np.float32))


def sample_tokens(seed: int, rank: int, launch: int, n_tokens: int, hidden: int) -> NDArray[Any]:
    """Normal bf16 values [n_tokens, hidden], different for every rank and launch."""
    rng = np.random.default_rng([seed, 3, launch, rank])
    return rng.standard_normal((n_tokens, hidden), dtype=np.float32).astype(BF16)


def expert_scale(expert: NDArray[Any] | int) -> NDArray[np.float32]:
    """The sample expert multiplies by this: 1, 1.125, ..., 1.875, exact in bf16."""
    return np.asarray(1 + (np.asarray(expert) % 8) / 8, np.float32)


def apply_expert(x: NDArray[Any], expert: NDArray[Any] | int) -> NDArray[Any]:
    """The sample expert: bf16 rows [..., H] times its factor, the f32 product rounded to bf16."""
    return (x.astype(np.float32) * expert_scale(expert)[..., None]).astype(BF16)


def sent_selections(topk_idx: NDArray[Any], n_experts: int) -> NDArray[np.bool_]:
    """Which selections are sent [n, K]: those that name an expert, for the first time in their row."""
    k = topk_idx.shape[1]
    sent = (topk_idx >= 0) & (topk_idx < n_experts)
    for column in range(1, k):
        sent[:, column] &= ~(topk_idx[:, :column] == topk_idx[:, column, None]).any(axis=1)
    return sent


def local_selections(topk_idx: NDArray[Any], n_experts: int, n_ranks: int, rank: int) -> NDArray[Any]:
    """topk_idx with every selection of another rank's expert as -1: what a layer with skip_a2a sends."""
    n_local = n_experts // n_ranks
    own = (topk_idx >= rank * n_local) & (topk_idx < (rank + 1) * n_local)
    return np.where(own, topk_idx, -1)


def expected_counts(routings: Sequence[Routing], n_experts: int, rank: int) -> NDArray[np.int64]:
    """Rows rank `rank` receives, [L, R]: for each of its experts, from each rank."""
    n_local = n_experts // len(routings)
    counts = np.zeros((n_local, len(routings)), np.int64)
    for source, routing in enumerate(routings):
        ids = routing.topk_idx[sent_selections(routing.topk_idx, n_experts)]
        local = ids[(ids >= rank * n_local) & (ids < (rank + 1) * n_local)] - rank * n_local
        counts[:, source] = np.bincount(local, minlength=n_local)
    return counts


def check_dispatch(
    tokens: Sequence[NDArray[Any]],
    routings: Sequence[Routing],
    n_experts: int,
    rank: int,
    output: NDArray[Any],
    row_offsets: NDArray[Any],
    expert_ids: NDArray[Any],
    src_info: NDArray[Any],
    *,
    padding: int = 1,
    shared: tuple[int, int] | None = None,
    any_order: bool = False,
) -> list[str]:
    """What is wrong with what `rank` received; nothing when it is right bit for bit.

    Rows are in order of (local expert, source rank); within that any order is right. Every row must say which token and selection it is and
    equal that token in every bit. `tokens` are rows of any type, the output's bytes are compared.

    padding    every expert's rows begin at a multiple of it
    shared     (first, count) of this rank's tokens that come first, as an expert of their own
    any_order  the sources' blocks of an expert may be in any order
    """
    counts = expected_counts(routings, n_experts, rank)
    n_local, n_ranks = counts.shape
    problems: list[str] = []
    rows = ([] if shared is None else [shared[1]]) + counts.sum(axis=1).tolist()
    offsets = np.concatenate([[0], np.cumsum([-(-n // padding) * padding for n in rows])])
    n_slots = len(rows)
    if not np.array_equal(row_offsets[: n_slots + 1], offsets):
        return [f"rank {rank}: row_offsets is {row_offsets[: n_slots + 1].tolist()}, expected {offsets.tolist()}"]
    if not np.array_equal(expert_ids[:n_slots], np.arange(n_slots)):
        problems.append(f"rank {rank}: expert_ids is {expert_ids[:n_slots].tolist()}, expected 0 to {n_slots - 1}")
    sent = [sent_selections(routing.topk_idx, n_experts) for routing in routings]
    if shared is not None:
        found = np.stack([np.arange(shared[0], sum(shared)), np.full(shared[1], -1)], axis=1)
        problems += _check_block(f"rank {rank}, shared expert", tokens[rank], found, 0, output, src_info)
    for local in range(n_local):
        expert = rank * n_local + local
        row = int(offsets[local + (shared is not None)])
        left = list(range(n_ranks))
        while left:
            tried: list[str] = []
            for source in left if any_order else left[:1]:
                wanted = np.argwhere((routings[source].topk_idx == expert) & sent[source])
                where = f"rank {rank}, expert {expert}, from rank {source}, rows {row} to {row + len(wanted)}"
                wrong = _check_block(where, tokens[source], wanted, row, output, src_info)
                tried = tried or wrong
                if not wrong:
                    break
            else:
                problems += tried
                source = left[0]
            row += int(counts[local, source])
            left.remove(source)
    return problems


def _check_block(
    where: str, tokens: NDArray[Any], wanted: NDArray[Any], row: int, output: NDArray[Any], src_info: NDArray[Any]
) -> list[str]:
    """Compares the rows from `row` on with the (token, k) pairs `wanted`, in any order."""
    end = row + len(wanted)
    found = src_info[row:end].astype(np.int64)
    order = np.lexsort((found[:, 1], found[:, 0]))
    if not np.array_equal(found[order], wanted):
        return [f"{where}: src_info is {found[:4].tolist()}..., expected the (token, k) pairs {wanted[:4].tolist()}..."]
    if end == row:
        return []
    got, want = np.ascontiguousarray(output[row:end]), np.ascontiguousarray(tokens[found[:, 0]])
    kind = np.uint16 if got.dtype.itemsize == 2 else np.uint8
    got, want = got.view(kind), want.view(kind)
    if np.array_equal(got, want):
        return []
    bad = np.argwhere(got != want)
    r, c = bad[0]
    width = 2 + 2 * got.dtype.itemsize
    return [
        f"{where}: {len(bad)} values differ, first row {row + r} (token {found[r, 0]}) column {c}: "
        f"{got[r, c]:#0{width}x}, expected {want[r, c]:#0{width}x}"
    ]


@dataclass(frozen=True)
class CombineError:
    """How far a combine is from the exact sum.

    largest   largest absolute difference
    ratio     largest difference divided by its bound; at most 1 when the combine is right
    place     (token, column) of the largest ratio
    """

    largest: float
    ratio: float
    place: tuple[int, int]


def combine_exact(
    tokens: NDArray[Any], routing: Routing, n_experts: int, shared: NDArray[Any] | None = None
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The weighted sum of the experts' rows in f64 [n, H], and the sum of the magnitudes of its terms.

    shared  which of the tokens [n] also have the sample shared expert's row, their own in bf16
    """
    sent = sent_selections(routing.topk_idx, n_experts)
    exact = np.zeros(tokens.shape, np.float64)
    magnitude = np.zeros(tokens.shape, np.float64)
    for k in range(routing.topk_idx.shape[1]):
        y = apply_expert(tokens, routing.topk_idx[:, k]).astype(np.float64)
        term = np.where(sent[:, k, None], routing.topk_weights[:, k, None].astype(np.float64) * y, 0.0)
        exact += term
        magnitude += np.abs(term)
    if shared is not None:
        term = np.where(shared[:, None], tokens.astype(BF16).astype(np.float64), 0.0)
        exact += term
        magnitude += np.abs(term)
    return exact, magnitude


def combine_in_order(tokens: NDArray[Any], routing: Routing, n_experts: int, shared: tuple[int, int] | None = None) -> NDArray[np.float32]:
    """The same sum in f32, k by k, each product rounded before it is added: bit for bit what the kernel has before its last rounding.

    shared  (first, count) of the tokens to which the sample shared expert's row, their own in bf16, is added last
    """
    sent = sent_selections(routing.topk_idx, n_experts)
    total = np.zeros(tokens.shape, np.float32)
    for k in range(routing.topk_idx.shape[1]):
        term = routing.topk_weights[:, k, None] * apply_expert(tokens, routing.topk_idx[:, k]).astype(np.float32)
        total = np.where(sent[:, k, None], total + term, total)
    if shared is not None:
        part = slice(shared[0], sum(shared))
        total[part] += tokens[part].astype(BF16).astype(np.float32)
    return total


def combine_unreduced(tokens: NDArray[Any], routing: Routing, n_experts: int) -> NDArray[Any]:
    """The sample experts' rows, not summed: bf16 [n * K, H], zero where a selection is not sent."""
    sent = sent_selections(routing.topk_idx, n_experts)
    rows = np.stack([apply_expert(tokens, routing.topk_idx[:, k]) for k in range(routing.topk_idx.shape[1])], axis=1)
    return np.where(sent[:, :, None], rows, np.zeros((), BF16)).reshape(-1, tokens.shape[1])


def check_combine(
    tokens: NDArray[Any], routing: Routing, n_experts: int, combined: NDArray[Any], shared: tuple[int, int] | None = None
) -> CombineError:
    """Compares a combine of the sample expert with the exact sum; `shared` as in `combine_in_order`.

    The bound on |combined - exact|, with S the sum of the magnitudes of the K terms: (K + 1) 2**-24 S for f32 products and additions in any
    order, and for a bf16 result 2**-8 of the f32 value and half the smallest bf16 on top.
    """
    worst = CombineError(0.0, 0.0, (0, 0))
    factor = (routing.topk_idx.shape[1] + 1 + (shared is not None)) * F32_ROUNDOFF * 1.001
    is_bf16 = combined.dtype == BF16
    for start in range(0, routing.n_tokens, CHUNK):
        part = slice(start, start + CHUNK)
        place = np.arange(start, start + len(tokens[part]))
        own = None if shared is None else (place >= shared[0]) & (place < sum(shared))
        exact, magnitude = combine_exact(tokens[part], Routing(routing.topk_idx[part], routing.topk_weights[part]), n_experts, own)
        error = np.abs(combined[part].astype(np.float64) - exact)
        bound = factor * magnitude
        bound = bound + (BF16_ROUNDOFF * (np.abs(exact) + bound) + BF16_TINY if is_bf16 else F32_ROUNDOFF * 2.0**-120)
        ratio = np.where(np.isfinite(error), error / bound, np.inf)
        at = np.unravel_index(int(np.argmax(ratio)), ratio.shape)
        largest = max(worst.largest, float(np.max(np.where(np.isfinite(error), error, np.inf))))
        if ratio[at] > worst.ratio:
            worst = CombineError(largest, float(ratio[at]), (start + int(at[0]), int(at[1])))
        else:
            worst = CombineError(largest, worst.ratio, worst.place)
    return worst
