"""Arrows point down: what a layer may import, what importing the package loads, and that there is no cycle."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# A layer and the project's own modules it may import, by prefix.
ALLOWED = {
    "runtime/epdsl_runtime": ("epdsl_runtime",),
    "epdsl/ir": ("epdsl.ir", "epdsl_runtime"),
    "epdsl/lang": ("epdsl.lang", "epdsl.ir", "epdsl.targets", "epdsl.env", "epdsl_runtime"),
    "epdsl/targets.py": (),
    "epdsl/lower_nvvm.py": ("epdsl.ir", "epdsl.lowering", "epdsl.targets", "epdsl_runtime"),
    "epdsl/lower_rocdl.py": ("epdsl.ir", "epdsl.lowering", "epdsl.lower_rocdl_helpers", "epdsl.targets", "epdsl_runtime"),
    "epdsl/lower_sim.py": ("epdsl.ir", "epdsl.targets", "epdsl_runtime"),
}


def modules() -> dict[str, Path]:
    found: dict[str, Path] = {}
    for base, package in ((ROOT, "epdsl"), (ROOT / "runtime", "epdsl_runtime")):
        for path in (base / package).rglob("*.py"):
            parts = path.relative_to(base).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(name: str, path: Path, at_import_only: bool) -> set[str]:
    """The project's modules that a module imports. Imports for types alone do not count."""
    known = modules()
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for each in node.orelse:
                visit(each)
            return
        if at_import_only and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = name if path.name == "__init__.py" else name.rpartition(".")[0]
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                found.add(f"{module}.{alias.name}" if f"{module}.{alias.name}" in known else module)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text()))
    return {m for m in found if m.split(".")[0] in ("epdsl", "epdsl_runtime")}


@pytest.mark.parametrize("layer", ALLOWED)
def test_a_layer_imports_nothing_above_it(layer: str) -> None:
    wrong: list[str] = []
    for name, path in modules().items():
        if not str(path.relative_to(ROOT)).startswith(layer):
            continue
        for imported in imports(name, path, at_import_only=False):
            if not any(imported == allowed or imported.startswith(f"{allowed}.") for allowed in ALLOWED[layer]):
                wrong.append(f"{name} imports {imported}")
    assert not wrong


def test_no_import_cycle() -> None:
    graph = {name: imports(name, path, at_import_only=True) & modules().keys() - {name} for name, path in modules().items()}
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"cycle: {' -> '.join([*path[path.index(name) :], name])}"
        if name in done:
            return
        for following in sorted(graph.get(name, ())):
            visit(following, (*path, name))
        done.add(name)

    for name in sorted(graph):
        visit(name, ())


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import epdsl", ("mlir", "numpy", "llvmlite", "cuda", "hip", "rich", "typer")),
        ("import epdsl as ep; ep.kernel", ("mlir", "llvmlite", "cuda", "hip")),
        ("import epdsl_runtime.rank, epdsl_runtime.spawn, epdsl_runtime.launch", ("epdsl", "mlir", "llvmlite", "cuda", "hip")),
    ],
)
def test_what_an_import_loads(statement: str, absent: tuple[str, ...]) -> None:
    code = f"{statement}\nimport sys\nprint([m for m in sys.modules if m.split('.')[0] in {absent!r}])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert shown.stdout.strip() == "[]"
