"""What ranks compare of their kernels: the same wherever the files lie, other when any code that is reached differs."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from epdsl.fingerprint import source_digests

SOURCE = """
from dataclasses import dataclass
import epdsl as ep

@ep.func
def twice(v: ep.i32):
    return v * 2

@dataclass(frozen=True)
class Family:
    n: int

    @ep.func
    def start(self, v: ep.i32):
        return twice(v) + 1

    @ep.kernel
    def fill(self, p: ep.Ptr[ep.i32]):
        p[ep.thread_idx.x] = self.start(self.n)
"""


def digest(path: Path, source: str, n: int = 1) -> dict[str, str]:
    path.parent.mkdir(exist_ok=True)
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("family_of_this_test", path)
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    sys.modules["family_of_this_test"] = module
    spec.loader.exec_module(module)
    return source_digests(module.Family(n).fill)


@pytest.mark.parametrize(("old", "new"), [("v * 2", "v * 3"), ("+ 1", "+ 2"), ("p[ep.thread_idx.x]", "p[ep.lane_id()]")])
def test_code_that_differs(tmp_path: Path, old: str, new: str) -> None:
    first = digest(tmp_path / "one" / "family.py", SOURCE)
    assert list(first) == ["the source of kernel Family_fill"]
    assert digest(tmp_path / "other place" / "family.py", SOURCE, n=2) == first
    assert digest(tmp_path / "one" / "family.py", SOURCE.replace(old, new)) != first
