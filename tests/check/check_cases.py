"""Finding and loading the scenarios beside the tests, and the lines they mark."""

from __future__ import annotations

import importlib.util
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
BUGS = sorted((HERE / "bugs").glob("*.py"))
LEGAL = sorted((HERE / "legal").glob("*.py"))
LEGAL_PTX = sorted((HERE / "legal" / "ptx").glob("*.py"))


@dataclass(frozen=True)
class Case:
    """A scenario in a file of its own. `lines` has the line numbers that carry a mark `# expect: first, second, repair`."""

    path: Path
    scenario: Any
    expected: str
    lines: dict[str, set[int]]


def load_case(path: Path) -> Case:
    name = f"check_case_{path.parent.name}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    lines: dict[str, set[int]] = {}
    for number, text in enumerate(path.read_text().splitlines(), 1):
        if found := re.search(r"# expect: (.*)$", text):
            for mark in found[1].split(", "):
                lines.setdefault(mark, set()).add(number)
    expected = re.search(r"Expect: ([a-z-]+)", module.__doc__ or "")
    return Case(path, module.main, expected[1] if expected else "", lines)
