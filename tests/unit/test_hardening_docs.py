"""docs/hardening.md has a row for every kind of fault, and the tests it names exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "hardening.md").read_text()
ROWS = {int(number): (here, shown) for number, here, shown in re.findall(r"^\| (\d+)\. [^|]*\| (.*?) ?\| ?(.*?) ?\|$", TEXT, flags=re.M)}


def test_every_kind_has_a_row_in_order() -> None:
    assert list(ROWS) == list(range(1, 50))


def test_every_row_has_a_test_or_says_why_not() -> None:
    silent = [number for number, (here, shown) in ROWS.items() if "`test_" not in shown and "cannot happen on one node" not in here]
    assert silent == []


def test_the_tests_that_are_named_exist() -> None:
    defined: set[str] = set()
    for file in (ROOT / "tests").glob("*/test_*.py"):
        defined |= set(re.findall(r"^def (test_\w+)", file.read_text(), flags=re.M))
    assert sorted(set(re.findall(r"`(test_\w+)`", TEXT)) - defined) == []
