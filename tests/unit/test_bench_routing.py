"""The routings of `epdsl bench` and the bytes they make an exchange move, against other arithmetic and literals."""

from __future__ import annotations

import numpy as np
import pytest

from epdsl.bench_routing import Floor, Routing, combine_floor, dispatch_floor, parse_routing, traffic


def test_text() -> None:
    assert parse_routing("uniform") == Routing("uniform")
    assert parse_routing("one-rank") == Routing("one-rank")
    assert parse_routing("zipf:1.2") == Routing("zipf", 1.2)
    assert [str(parse_routing(text)) for text in ("uniform", "zipf:1.2", "one-rank")] == ["uniform", "zipf:1.2", "one-rank"]


@pytest.mark.parametrize(
    "text", ["", "zipf", "zipf:", "zipf:x", "zipf:0", "zipf:-1", "zipf:nan", "zipf:1e9", "uniform:2", "Uniform", "one-rank:"]
)
def test_text_that_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not known; it is uniform, one-rank, or zipf"):
        parse_routing(text)


@pytest.mark.parametrize("text", ["uniform", "zipf:1.2", "one-rank"])
def test_selections_are_different_experts_and_repeat_with_the_seed(text: str) -> None:
    chosen = parse_routing(text)
    ids = chosen.selections(1, 4, 500, 64, 6, 3)
    assert ids.shape == (500, 6) and ids.dtype == np.int32
    assert all(len(set(row)) == 6 for row in ids.tolist())
    assert ids.min() >= 0 and ids.max() < (16 if text == "one-rank" else 64)
    assert (ids == chosen.selections(1, 4, 500, 64, 6, 3)).all()
    assert (ids != chosen.selections(2, 4, 500, 64, 6, 3)).any() and (ids != chosen.selections(1, 4, 500, 64, 6, 4)).any()


def test_one_rank_with_fewer_experts_than_selections() -> None:
    ids = parse_routing("one-rank").selections(0, 4, 50, 8, 3, 0)
    assert (np.sort(ids, axis=1) == [-1, 0, 1]).all()


def test_uniform_is_level() -> None:
    counts = np.bincount(parse_routing("uniform").selections(0, 2, 20_000, 16, 4, 11).ravel(), minlength=16)
    # 5000 each; five standard deviations of a hypergeometric share are 306.
    assert np.abs(counts - 5000).max() < 306, "seed 11"


def test_zipf_follows_its_law() -> None:
    """One selection a token: the i-th most popular expert's share is i ** -1.2 of the sum."""
    tokens, experts = 40_000, 12
    found = [np.bincount(parse_routing("zipf:1.2").selections(r, 2, tokens, experts, 1, 7).ravel(), minlength=experts) for r in range(2)]
    weights = [
        1.0,
        0.43527528,
        0.26758052,
        0.18946457,
        0.14495593,
        0.11647324,
        0.09680190,
        0.08246924,
        0.07159934,
        0.06309573,
        0.05627671,
        0.05069792,
    ]
    shares = np.array(weights) / sum(weights)
    bound = 5 * np.sqrt(tokens * shares * (1 - shares))
    # Popular on one rank is popular on the other.
    order = np.argsort(-(found[0] + found[1]))
    for counts in found:
        assert (np.abs(counts[order] - tokens * shares) < bound).all(), f"seed 7: {counts[order]}"


def test_zipf_takes_several_without_replacement() -> None:
    """Two of three experts: the chance of each pair is that of drawing one after the other."""
    tokens = 60_000
    ids = parse_routing("zipf:1").selections(0, 1, tokens, 3, 2, 5)
    popular = np.argsort(-np.bincount(ids.ravel(), minlength=3))
    missing = 3 - ids.sum(axis=1)
    # Weights 6/11, 3/11, 2/11: the one that is left out.
    left_out = [3 / 11 * (2 / 8) + 2 / 11 * (3 / 9), 6 / 11 * (2 / 5) + 2 / 11 * (6 / 9), 6 / 11 * (3 / 5) + 3 / 11 * (6 / 8)]
    for expert, share in zip(popular, left_out, strict=True):
        assert abs((missing == expert).sum() - tokens * share) < 5 * np.sqrt(tokens * share * (1 - share)), "seed 5"


def test_traffic_counts_a_token_once_a_rank() -> None:
    # Two ranks of two experts each; three tokens each.
    ids = np.array([[[0, 1], [1, 2], [-1, -1]], [[0, 3], [2, 3], [3, -1]]])
    found = traffic(ids, 4)
    assert found.rows.tolist() == [[2, 1], [1, 3]]
    assert found.selections.tolist() == [4, 5]
    assert (found.remote_rows(0), found.remote_rows(1), found.busiest_link_rows) == (1, 1, 1)


def test_the_busiest_link_is_the_receiver_of_all() -> None:
    ids = np.zeros((4, 10, 1), np.int32)
    found = traffic(ids, 8)
    assert found.rows.tolist() == [[10, 0, 0, 0]] * 4
    assert found.busiest_link_rows == 30


def test_floors() -> None:
    ids = np.array([[[0, 1], [1, 2], [-1, -1]], [[0, 3], [2, 3], [3, -1]]])
    found = traffic(ids, 4)
    # Rank 1: reads 3 tokens, writes 1 + 3 rows.
    assert dispatch_floor(found, 100, False) == Floor(100, 700)
    # Rank 1: reads 3 of 200 bytes, writes and reads the one that arrived, writes 5 rows.
    assert dispatch_floor(found, 100, True, 200) == Floor(100, 1300)
    # Rank 1: reads 4 rows, or 5; writes and reads the sum that arrived, writes 3.
    assert combine_floor(found, 100, False) == Floor(100, 900)
    assert combine_floor(found, 100, True) == Floor(100, 1000)
    assert Floor(4_000_000, 4_000_000).us(link_gb_s=400, memory_gb_s=4000) == 10
    assert Floor(4_000_000, 4_000_000).us(link_gb_s=400, memory_gb_s=200) == 20
    assert Floor(0, 4_000_000).us(link_gb_s=float("inf"), memory_gb_s=4000) == 1
