"""The `ep` dialect as built: its text, that it parses back, and where its operations say they come from."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
from mlir import ir

from epdsl.build import Built, build
from epdsl.compiler import CompileRequest
from epdsl.ir import dialect
from epdsl.targets import parse_target

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def kernel() -> Any:
    spec = importlib.util.spec_from_file_location("golden_kernel", HERE / "golden_kernel.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.kernel


@pytest.fixture(scope="module")
def built(kernel: Any) -> Built:
    return build(CompileRequest(kernel.name, kernel.function, None, kernel.parameters, {}, parse_target("sm_90"), None))


def test_text(built: Built) -> None:
    assert built.text == (HERE / "golden_kernel.mlir").read_text()


def test_the_text_parses_back(built: Built) -> None:
    with ir.Context() as context:
        dialect.register(context)
        module = ir.Module.parse(built.text)
        assert module.operation.verify()
        assert module.operation.get_asm() == built.module.operation.get_asm()


def operations(built: Built, name: str) -> list[str]:
    found: list[str] = []

    def visit(operation: Any) -> Any:
        if operation.name == name:
            found.append(str(operation.location))
        return ir.WalkResult.ADVANCE

    built.module.operation.walk(visit)
    return found


def test_locations(built: Built) -> None:
    file = HERE / "golden_kernel.py"
    lines = file.read_text().splitlines()
    barrier = next(i for i, line in enumerate(lines, 1) if line.strip() == "ep.barrier()")
    (location,) = operations(built, "ep.barrier")
    assert location == f'loc("{file}":{barrier}:5)'


def test_a_call_is_in_the_location(built: Built) -> None:
    file = HERE / "golden_kernel.py"
    lines = file.read_text().splitlines()
    inner = next(i for i, line in enumerate(lines, 1) if "ep.store(flag" in line)
    outer = next(i for i, line in enumerate(lines, 1) if "publish(flags[me]" in line)
    stores = operations(built, "ep.store")
    assert f'loc(callsite("{file}":{inner}:5 at "{file}":{outer}:13))' in stores


def test_every_operation_has_a_place(built: Built) -> None:
    unknown: list[str] = []

    def visit(operation: Any) -> Any:
        if str(operation.location) == "loc(unknown)" and operation.name not in ("builtin.module", "gpu.module"):
            unknown.append(operation.name)
        return ir.WalkResult.ADVANCE

    built.module.operation.walk(visit)
    assert not unknown
