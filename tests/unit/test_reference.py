"""The NumPy reference itself, on cases small enough to work out by hand."""

from __future__ import annotations

import numpy as np
import pytest

import epdsl.reference as ref

IDS = [np.array([[0, 3], [1, 1], [-1, 2]], np.int32), np.array([[3, 4], [-2, 0]], np.int32)]
ROUTINGS = [ref.Routing(ids, np.full(ids.shape, 0.5, np.float32)) for ids in IDS]
TOKENS = [np.arange(3 * 8).reshape(3, 8).astype(ref.BF16), (100 + np.arange(2 * 8).reshape(2, 8)).astype(ref.BF16)]


def test_which_selections_are_sent() -> None:
    assert ref.sent_selections(IDS[0], 4).tolist() == [[True, True], [True, False], [False, True]]
    assert ref.sent_selections(IDS[1], 4).tolist() == [[True, False], [False, True]]


def test_counts_by_expert_and_source() -> None:
    assert ref.expected_counts(ROUTINGS, 4, 0).tolist() == [[1, 1], [1, 0]]
    assert ref.expected_counts(ROUTINGS, 4, 1).tolist() == [[1, 0], [1, 1]]


def received() -> dict[str, np.ndarray]:
    """What rank 1 of 2 must get: expert 2 from rank 0; expert 3 from rank 0, then from rank 1."""
    return {
        "output": np.stack([TOKENS[0][2], TOKENS[0][0], TOKENS[1][0]]),
        "row_offsets": np.array([0, 1, 3], np.uint32),
        "expert_ids": np.array([0, 1], np.int32),
        "src_info": np.array([[2, 1], [0, 1], [0, 0]], np.int32),
    }


def test_a_right_dispatch_has_no_problems() -> None:
    assert ref.check_dispatch(TOKENS, ROUTINGS, 4, 1, **received()) == []


@pytest.mark.parametrize(
    ("name", "at", "value", "text"),
    [
        ("output", (1, 3), 77, "rows 1 to 2: 1 values differ, first row 1 (token 0) column 3"),
        ("row_offsets", 1, 2, "row_offsets is [0, 2, 3], expected [0, 1, 3]"),
        ("expert_ids", 0, 1, "expert_ids is [1, 1]"),
        ("src_info", (2, 1), 1, "expert 3, from rank 1, rows 2 to 3: src_info is [[0, 1]]"),
    ],
)
def test_every_kind_of_wrong_dispatch_is_found(name: str, at: int | tuple[int, int], value: int, text: str) -> None:
    given = received()
    given[name][at] = value
    (problem,) = ref.check_dispatch(TOKENS, ROUTINGS, 4, 1, **given)
    assert text in problem


def test_the_sum_by_hand() -> None:
    x = np.full((1, 8), 3, ref.BF16)
    routing = ref.Routing(np.array([[2, -1, 9]], np.int32), np.array([[0.5, 4.0, 2.0]], np.float32))
    # Expert 2 multiplies by 1.25, expert 9 by 1.125: 0.5 * 3.75 + 2 * 3.375.
    assert ref.combine_in_order(x, routing, 16).tolist() == [[8.625] * 8]
    exact, magnitude = ref.combine_exact(x, routing, 16)
    assert exact.tolist() == magnitude.tolist() == [[8.625] * 8]


def test_the_bound_lets_a_rounding_pass_and_not_two() -> None:
    x = ref.sample_tokens(1, 0, 0, 5, 64)
    routing = ref.skewed_routing(1, 0, 0, 5, 16, 4)
    right = ref.combine_in_order(x, routing, 16).astype(ref.BF16)
    assert ref.check_combine(x, routing, 16, right).ratio <= 1
    wrong = right.copy()
    wrong[3, 7] = np.float32(wrong[3, 7]) * np.float32(1 + 2**-6)
    found = ref.check_combine(x, routing, 16, wrong)
    assert found.ratio > 1 and found.place == (3, 7)
    wrong[2, 1] = np.nan
    assert ref.check_combine(x, routing, 16, wrong).ratio == np.inf


def test_routing_is_seeded_unique_and_skewed() -> None:
    routing = ref.skewed_routing(7, 1, 2, 2000, 64, 8)
    again = ref.skewed_routing(7, 1, 2, 2000, 64, 8)
    assert np.array_equal(routing.topk_idx, again.topk_idx) and np.array_equal(routing.topk_weights, again.topk_weights)
    assert ref.sent_selections(routing.topk_idx, 64).all()
    assert np.allclose(routing.topk_weights.sum(axis=1), 1, atol=1e-5)
    load = np.bincount(routing.topk_idx.ravel(), minlength=64)
    assert load.max() > 2 * load.mean() and load.min() > 0
    assert not np.array_equal(routing.topk_idx, ref.skewed_routing(7, 0, 2, 2000, 64, 8).topk_idx)
