"""Every mistake in `errors/NAME.py` is refused while building, with the whole text of `errors/NAME.txt`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

import epdsl as ep

FOLDER = Path(__file__).parent / "errors"
TARGETS = {"part_of_a_wave": "gfx942", "assembly_on_the_simulator": "sim"}


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.py")))
def test_the_whole_text(name: str) -> None:
    path = FOLDER / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"errors_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    with pytest.raises(ep.CompileError) as caught:
        spec.loader.exec_module(module)
        module.kernel.compile(TARGETS.get(name, "sm_90"))
    assert str(caught.value).replace(str(path), path.name) == (FOLDER / f"{name}.txt").read_text().rstrip("\n")
    assert all("/mlir/" not in part for part in str(caught.value).splitlines())


def test_outside_a_kernel() -> None:
    with pytest.raises(ep.CompileError, match=r"ep\.barrier exists only inside a kernel"):
        ep.barrier()
