"""Every code block of the docs and the README does what the page says."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from page_blocks import ROOT, Wrong, blocks_of, matches, run_page

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_the_blocks_of_a_page_run(page: Path, tmp_path: Path) -> None:
    run_page(page, tmp_path)


def unguarded(source: str) -> list[int]:
    """Lines that call `spawn` when the program is imported, as a rank's process does."""
    program = ast.parse(source)
    run = [node for node in program.body if not isinstance(node, (ast.FunctionDef, ast.ClassDef)) and "__name__" not in ast.unparse(node)]
    calls = [found for node in run for found in ast.walk(node) if isinstance(found, ast.Call)]
    return [call.lineno for call in calls if ast.unparse(call.func).rpartition(".")[2] == "spawn"]


def test_every_program_that_starts_ranks_has_the_guard_of_main() -> None:
    """Without it a page's program works on the simulator alone."""
    programs = {block.place: block.body for page in PAGES for block in blocks_of(page) if block.language == "python"}
    programs |= {path.name: path.read_text() for folder in ("examples", "benchmarks") for path in (ROOT / folder).glob("*.py")}
    assert sum("spawn(" in text for text in programs.values()) > 8
    assert {place: found for place, text in programs.items() if "spawn(" in text and (found := unguarded(text))} == {}
    assert unguarded("import epdsl as ep\nprint(ep.spawn(1))\n") == [2]


def test_few_blocks_are_left_out() -> None:
    """Each with its reason. A page of records of runs on GPUs is a record, not code."""
    left_out = [(block.place, block.skip) for page in PAGES for block in blocks_of(page) if block.skip and page.name != "verified-on.md"]
    print("\n".join(f"{place}: {why}" for place, why in left_out))
    assert len(left_out) <= 8, left_out


@pytest.mark.parametrize(
    ("page", "problem"),
    [
        ("```python\n1 / 0\n```\n", "raised ZeroDivisionError"),
        ("```python\nprint(1)\n```\n\n```text\n2\n```\n", "it prints\n1\n"),
        ("```console\n$ echo a\nb\n```\n", "it prints\na\n"),
        ("```console\n$ false\n```\n", "(exit status 1)"),
        ("```text\nx\n```\n", "nothing checks"),
        ('```python title="a.py"\nx = 1\n```\n\n```diff title="a.py"\n-x = 2\n+x = 3\n```\n', "a.py 0 times"),
    ],
)
def test_a_wrong_page_fails(page: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("page_blocks.ROOT", tmp_path)
    file = tmp_path / "page.md"
    file.write_text(page)
    with pytest.raises(Wrong) as raised:
        run_page(file, tmp_path)
    assert problem in str(raised.value)


def test_what_a_comparison_overlooks(tmp_path: Path) -> None:
    assert matches("took 1.2 ms\n", "took 33 ms\n", tmp_path)
    assert matches("a\n...\nd\n", "a\nb\nc\nd\n", tmp_path)
    assert matches("x.py\n", f"{tmp_path}/x.py\n", tmp_path)
    assert not matches("12 rows\n", "13 rows\n", tmp_path)
    assert not matches("a\n...\nd\n", "a\nb\nc\n", tmp_path)
