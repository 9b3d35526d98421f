"""Random programs: the kernel must do what Python does with the same text."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from language_run import run
from random_programs import run_in_python, write_program

THREADS = 64
PER_TEST = 6


def imported(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def inputs_of(seed: int) -> np.ndarray:
    found = np.random.default_rng(seed).integers(-10, 11, 3 * THREADS).astype(np.int32)
    found[:9] = [2**31 - 1, -(2**31), 5, -1, 0, 3, 2**30, -7, 1]
    return found


def agrees(device_name: str, seed: int, directory: Path) -> None:
    source = write_program(seed)
    path = directory / f"program_{seed}.py"
    path.write_text(source)
    blank = np.zeros(THREADS, np.int32)
    _, out, trace = run(device_name, imported(path).program, inputs_of(seed), blank, blank, block=THREADS)
    want_out, want_trace = run_in_python(source, inputs_of(seed).tolist(), THREADS)
    for name, got, want in (("out", out, want_out), ("trace", trace, want_trace)):
        wrong = np.flatnonzero(got != np.array(want))
        assert not len(wrong), f"program {seed}: {name}[{wrong[0]}] is {got[wrong[0]]}, Python has {want[wrong[0]]}\n{source}"


@pytest.mark.parametrize("first", range(0, 24, PER_TEST))
def test_random_programs_do_what_python_does(device_name: str, first: int, tmp_path: Path) -> None:
    for seed in range(first, first + PER_TEST):
        print(f"program {seed}")
        agrees(device_name, seed, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(24, 600, 96))
def test_more_random_programs(device_name: str, first: int, tmp_path: Path) -> None:
    for seed in range(first, first + 96):
        print(f"program {seed}")
        agrees(device_name, seed, tmp_path)
