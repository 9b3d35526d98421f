"""Compiling the kernel family: that it is found again without being built, together or apart, and where the time goes."""

from __future__ import annotations

import importlib.util
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import epdsl as ep
from epdsl.artifact_cache import quick_key
from epdsl.build import Built, build
from epdsl.codegen import optimise
from epdsl.compiler import CompileRequest, compile_kernel
from epdsl.ir.steps import Watch
from epdsl.kernel_object import Kernel, compile_all

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "compile_time.py"


@pytest.fixture(scope="module")
def benchmark() -> Any:
    """The benchmark of the same times, which has the family and the stages."""
    spec = importlib.util.spec_from_file_location("compile_time", BENCHMARK)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_kernel_of_the_family_is_found_without_being_built(benchmark: Any) -> None:
    family: dict[str, Kernel] = benchmark.family()
    assert len(family) == 8
    for name, kernel in family.items():
        request = kernel.request("sm_90")
        quick = quick_key(request)
        assert quick is not None, f"{name}: what building it reads cannot be told"
        assert build(request).annotated <= quick[1], f"{name}: names in annotations that its key says nothing of"


@ep.kernel
def adds(p: ep.Ptr[ep.i32]):
    p[ep.thread_idx.x] += 1


@ep.kernel
def doubles(p: ep.Ptr[ep.i32]):
    p[ep.thread_idx.x] *= 2


@ep.kernel
def wrong(p: ep.Ptr[ep.i32]):
    p[0] = "text"  # pyright: ignore[reportArgumentType]


def test_kernels_that_are_compiled_together_are_the_ones_compiled_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPDSL_CACHE_DIR", str(tmp_path / "together"))
    found = list(compile_all([Kernel(each.function) for each in (adds, doubles)], ["sm_90", "gfx942"]))
    assert [(each.name, each.target) for each in found] == [
        ("adds", "sm_90"),
        ("doubles", "sm_90"),
        ("adds", "gfx942"),
        ("doubles", "gfx942"),
    ]
    monkeypatch.setenv("EPDSL_CACHE_DIR", str(tmp_path / "apart"))
    for each, kernel in zip(found, (adds, doubles) * 2, strict=True):
        assert each.binary == Kernel(kernel.function).compile(each.target).binary


def test_one_is_built_while_llvm_has_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPDSL_CACHE_DIR", str(tmp_path))
    order: list[str] = []
    another = threading.Event()

    def noting(request: CompileRequest) -> Built:
        order.append(f"build {request.name}")
        made = build(request)
        order.append(f"built {request.name}")
        if len(order) == 4:
            another.set()
        return made

    def waiting(*given: Any) -> Any:
        assert another.wait(30), f"nothing was built beside LLVM: {order}"
        return optimise(*given)

    monkeypatch.setattr("epdsl.build.build", noting)
    monkeypatch.setattr("epdsl.codegen.optimise", waiting)
    found = list(compile_all([Kernel(each.function) for each in (adds, doubles)], ["sm_90"]))
    assert [each.name for each in found] == ["adds", "doubles"]
    # Two at once would both be late.
    assert sorted(order) == ["build adds", "build doubles", "built adds", "built doubles"]
    assert [line.split()[0] for line in order] == ["build", "built"] * 2
    assert order[0].split()[1] == order[1].split()[1]


def test_an_error_of_one_comes_at_its_place() -> None:
    made = compile_all([adds, wrong, doubles], ["sm_90"])
    assert next(made).name == "adds"
    with pytest.raises(ep.CompileError, match='p\\[0\\] = "text"'):
        next(made)


def test_building_takes_no_longer_than_generating_code(benchmark: Any) -> None:
    """The front end is Python: work that it did twice, or again for every line, would be most of a compilation. Half of it is usual."""
    kernel: Kernel = benchmark.family()["throughput combine"]
    compile_kernel(kernel.request("sm_90"), watch=Watch())
    stages = benchmark.Stages()
    compile_kernel(kernel.request("sm_90"), watch=stages)
    stages.finish()
    assert stages.seconds["build"] + stages.seconds["passes"] < 2 * (stages.seconds["optimise"] + stages.seconds["emit"]), stages.seconds
