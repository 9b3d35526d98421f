"""Every stage of one small kernel on each target, as text and as files.

python tests/ir/test_dump.py    writes the expected files anew
"""

from __future__ import annotations

import json
import os
import re
import threading
from pathlib import Path
from typing import Any

import pytest
from mlir import ir
from typer.testing import CliRunner

from epdsl import dump, machine_code
from epdsl.cli import app
from epdsl.cli_dump import coloured
from epdsl.ir import dialect
from epdsl.lang.errors import CompileError
from epdsl.stages import MEANING
from epdsl.targets import parse_target

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
KERNEL = "tests/ir/dump_kernel.py"
EXPECTED = HERE / "stages"
TARGETS = ("sm_90", "gfx942", "sim:nvidia")
# What the machine's own processor and tools decide.
HOST = {"sim:nvidia": ("asm.s", "llvm-opt.ll"), "sm_90": ("resources.txt",), "gfx942": ()}


def load(name: str) -> Any:
    """A kernel of the file by its name below ROOT, which is the current directory: the paths in the stages are then the same everywhere."""
    namespace: dict[str, Any] = {"__name__": "dump_kernel"}
    exec(compile(Path(KERNEL).read_text(), KERNEL, "exec"), namespace)
    return namespace[name]


@pytest.fixture(autouse=True)
def in_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("EPDSL_CACHE_DIR", str(tmp_path / "cache"))


def written(target: str, directory: Path, stages: str = "source,ep,ep-pretty,passes,llvm,llvm-opt,asm,resources") -> dict[str, str]:
    """Files of `publish`, without their first lines."""
    made = dump.write_stages(load("publish"), target, {}, stages, directory)
    return {path.name: path.read_text().partition("\n")[2] for path in sorted(made.iterdir()) if path.is_file()}


@pytest.mark.parametrize("target", TARGETS)
def test_stages(target: str, tmp_path: Path) -> None:
    found = {name: text for name, text in written(target, tmp_path).items() if name not in HOST[target]}
    expected = {path.name: path.read_text() for path in sorted((EXPECTED / target.replace(":", "_")).iterdir())}
    assert list(found) == list(expected)
    for name, text in found.items():
        assert text == expected[name], name


@pytest.mark.parametrize("target", TARGETS)
def test_printed_modules_parse_back(target: str, tmp_path: Path) -> None:
    written(target, tmp_path, "ep,passes")
    files = list(tmp_path.rglob("*.mlir"))
    assert len(files) >= 8
    for path in files:
        with ir.Context() as context:
            dialect.register(context)
            text = path.read_text()
            module = ir.Module.parse(text)
            assert module.operation.verify()
            if "unchanged" not in text:
                assert module.operation.get_asm().count("\n") == text.count("\n") - 1


def test_the_directory_tells_kernel_content_and_rank(tmp_path: Path) -> None:
    written("sm_90", tmp_path, "ep")
    (found,) = tmp_path.rglob("ep.mlir")
    assert re.fullmatch(r"publish-[0-9a-f]{8}/0/ep\.mlir", str(found.relative_to(tmp_path)))
    said = json.loads(found.read_text().splitlines()[0].removeprefix("// epdsl: "))
    assert (said["kernel"], said["target"], said["stage"], said["constants"]) == ("publish", "sm_90", "ep", {})
    assert said["hash"].startswith(found.parts[-3].removeprefix("publish-"))
    written("sm_80", tmp_path, "ep")
    assert len(list(tmp_path.iterdir())) == 2


def test_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(dump.rank()), name="epdsl-rank-5")
    thread.start()
    thread.join()
    assert found == [5] and dump.rank() == 0
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "3")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    assert dump.rank() == 3


def test_ranks_write_beside_each_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EPDSL_DUMP", "ep, asm")
    monkeypatch.setenv("EPDSL_DUMP_DIR", str(tmp_path))
    monkeypatch.setenv("WORLD_SIZE", "2")
    for index in ("0", "1"):
        monkeypatch.setenv("RANK", index)
        load("publish").compile("gfx942")
    (directory,) = tmp_path.iterdir()
    assert sorted(str(p.relative_to(directory)) for p in directory.rglob("*.*")) == ["0/asm.s", "0/ep.mlir", "1/asm.s", "1/ep.mlir"]


def test_an_unknown_stage_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPDSL_DUMP", "ep,ast")
    with pytest.raises(CompileError, match=r"EPDSL_DUMP: no stage ast; stages are all, source, ep, ep-pretty, passes, llvm, llvm-opt, asm"):
        load("publish").compile("sm_90")


def test_an_artifact_has_every_stage() -> None:
    artifact = load("publish").compile("sm_90")
    assert list(artifact.texts) == ["ep", "llvm", "llvm-opt", "ptx"]
    assert artifact.text("asm") == artifact.text("ptx") == artifact.binary.decode()
    assert artifact.text("source").startswith("# tests/ir/dump_kernel.py:12 publish\n@ep.kernel")
    assert "ep.store release system 1, %flag" in artifact.ir("ep-pretty")
    assert artifact.ir("03_ep-to-nvvm") == artifact.ir("passes/03_ep-to-nvvm") and "st.release.sys" in artifact.ir("03_ep-to-nvvm")
    assert "// ---- 01_check-math: unchanged\n" in artifact.text("passes")
    assert "fmul" in artifact.text("llvm") and "tail call" in artifact.text("llvm-opt") and "tail call" not in artifact.text("llvm")
    with pytest.raises(KeyError, match=r"publish for sm_90 has no 'gcn' text; it has ep, llvm, llvm-opt, ptx, source, ep-pretty, passes"):
        artifact.text("gcn")


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_a_dump_shows_what_is_compiled_without_one(target: str, tmp_path: Path) -> None:
    """Values keep their names through the passes of a dump; nothing else may differ, line tables least of all."""
    compiled = load("publish").compile(target)
    found = written(target, tmp_path, "llvm,llvm-opt,asm")
    assert found["llvm.ll"] == compiled.text("llvm")
    assert found["llvm-opt.ll"] == compiled.text("llvm-opt")
    assert next(text for name, text in found.items() if name.startswith("asm")) == compiled.text("asm")


def test_the_simulator_has_no_sass() -> None:
    artifact = load("publish").compile("sim:amd")
    assert "publish" in artifact.text("asm")
    with pytest.raises(KeyError, match="no 'sass' text"):
        artifact.text("sass")


TOOLS = {
    "ptxas": 'echo "Used 40 registers, used 1 barriers" >&2; echo "0 bytes stack frame, 8 bytes spill stores, 16 bytes spill loads" >&2',
    "nvdisasm": 'echo "/*0000*/ LDC R1 ;"',
    "llvm-objdump": 'echo "s_endpgm $2"',
}


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    folder = tmp_path / "home" / "bin"
    folder.mkdir(parents=True)
    for name, body in TOOLS.items():
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(folder.parent))
    monkeypatch.setenv("ROCM_PATH", str(folder.parent))
    return folder


def test_machine_code_comes_from_the_tools_at_hand(tools: Path) -> None:
    nvidia = load("publish").compile("sm_90")
    assert nvidia.text("sass") == "/*0000*/ LDC R1 ;\n"
    rows = dict(line.split("  ", 1) for line in nvidia.text("resources").splitlines())
    assert {k: v.strip() for k, v in rows.items()} == {
        "shared memory, bytes": "0",
        "registers": "40",
        "spill stores, bytes": "8",
        "spill loads, bytes": "16",
        "stack of a thread, bytes": "0",
        "barriers": "1",
        # 40 registers are 1280 a warp; 65536 // 1280 = 51 warps, 12 blocks of 4.
        "occupancy": "12 blocks, 48 of 64 warps (75%), limited by registers",
        "threads of a block, at most": "128",
    }


def test_absent_tools_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_code.shutil, "which", lambda _: None)
    monkeypatch.setattr(machine_code.os, "access", lambda *_: False)
    with pytest.raises(LookupError, match=r"the sass stage of sm_90 needs nvdisasm or cuobjdump, not found in \$CUDA_HOME"):
        load("publish").compile("sm_90").text("sass")


def test_all_stages_are_shown_without_the_tools_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_code.shutil, "which", lambda _: None)
    monkeypatch.setattr(machine_code.os, "access", lambda *_: False)
    shown = invoke("publish", "--target", "sm_90", "--stage", "all")
    assert shown.exit_code == 0 and "no sass: the sass stage of sm_90 needs nvdisasm or cuobjdump" in shown.stderr
    found = [line.removeprefix("==== ") for line in shown.stdout.splitlines() if line.startswith("==== ")]
    assert found == [stage for stage in MEANING if stage != "sass"]
    assert invoke("publish", "--target", "sm_90", "--stage", "sass").exit_code == 2


def test_a_disassembler_that_does_not_know_the_chip_is_named(tools: Path) -> None:
    (tools / "llvm-objdump").write_text("#!/bin/sh\necho 'no such target' >&2; exit 1\n")
    with pytest.raises(
        LookupError, match=r"the sass stage of gfx942 needs an llvm-objdump that knows gfx942, as ROCm has; .*: no such target"
    ):
        load("publish").compile("gfx942").text("sass")


def test_an_artifact_shows_briefly() -> None:
    artifact = load("sized").compile("sm_90", n=4)
    assert repr(artifact) == f"<Artifact sized for sm_90, n=4: {len(artifact.binary)} bytes>"


@pytest.mark.parametrize(
    ("target", "registers", "shared", "threads", "text"),
    [
        ("sm_90", 32, 0, 1024, "2 blocks, 64 of 64 warps (100%), limited by warps"),
        ("sm_90", 64, 0, 1024, "1 blocks, 32 of 64 warps (50%), limited by registers"),
        ("sm_90", 16, 200000, 128, "1 blocks, 4 of 64 warps (6%), limited by shared memory"),
        ("sm_120", 16, 0, 32, "24 blocks, 24 of 48 warps (50%), limited by blocks"),
        ("sm_80", 255, 0, 128, "2 blocks, 8 of 64 warps (12%), limited by registers"),
    ],
)
def test_occupancy(target: str, registers: int, shared: int, threads: int, text: str) -> None:
    assert machine_code.occupancy(parse_target(target), registers, shared, threads) == text


def invoke(*args: str) -> Any:
    return CliRunner().invoke(app, ["dump", f"{KERNEL}:{args[0]}", *args[1:]], env={"COLUMNS": "200"})


def test_dump_prints_a_stage() -> None:
    shown = invoke("publish", "--target", "sm_90", "--stage", "asm")
    assert shown.exit_code == 0 and "st.release.sys.global.b32" in shown.stdout
    shown = invoke("publish", "--target", "sm_90", "--stage", "ep,llvm", "--json")
    assert [each["stage"] for each in json.loads(shown.stdout)] == ["ep", "llvm"]


def test_dump_writes_files(tmp_path: Path) -> None:
    shown = json.loads(invoke("publish", "--target", "sm_90", "--stage", "ep,llvm-opt", "-o", str(tmp_path), "--json").stdout)
    assert [os.path.basename(path) for path in shown["files"]] == ["ep.mlir", "llvm-opt.ll"]
    assert all(Path(path).is_relative_to(tmp_path) for path in shown["files"])


def test_dump_compares_configurations_stages_and_targets() -> None:
    lines = json.loads(invoke("sized", "--const", "n=4", "--target", "sm_90", "--diff", "n=4", "n=8", "--json").stdout)["diff"]
    assert lines[:2] == [f"--- {KERNEL}:sized,sm_90,ep,n=4", f"+++ {KERNEL}:sized,sm_90,ep,n=8"]
    changed = [line for line in lines[2:] if line[0] in "+-"]
    assert changed[:2] == ["-      %c4_i32 = arith.constant 4 : i32", "+      %c8_i32 = arith.constant 8 : i32"]
    assert not json.loads(invoke("publish", "--diff", "sm_90", "gfx942", "--json").stdout)["diff"]
    shown = invoke("publish", "--diff", "sm_90,asm", "gfx942,asm").stdout
    assert "+\ts_barrier" in shown and "-\tbarrier.sync" in shown


def test_a_diff_is_coloured_on_a_terminal() -> None:
    assert coloured(["@@ -1 +1 @@", "-a", "+b", " c", ""]) == "\x1b[36m@@ -1 +1 @@\x1b[0m\n\x1b[31m-a\x1b[0m\n\x1b[32m+b\x1b[0m\n c\n"


@pytest.mark.parametrize(
    ("args", "status", "text"),
    [
        (["publish", "--stage", "sass"], 2, "publish for sim:nvidia has no 'sass' text; it has ep, llvm, llvm-opt, source"),
        (["publish", "--target", "sm_1"], 2, "unknown target 'sm_1'"),
        (["publish", "--diff", "sm_90", "tomorrow"], 2, "tomorrow is neither a stage (source, ep,"),
        (["sized", "--const", "n"], 2, "--const n: write NAME=VALUE"),
        (["sized"], 1, "sized: constants missing ['n']"),
        (["publish", "--stage", "tree", "-o", "x"], 2, "no stage tree; stages are all, source"),
    ],
)
def test_what_dump_refuses(args: list[str], status: int, text: str) -> None:
    result = invoke(*args)
    assert result.exit_code == status
    assert text in result.stderr


def test_stage_names_are_documented() -> None:
    shown = CliRunner().invoke(app, ["dump", "--help"], env={"COLUMNS": "300", "TERM": "dumb"}).stdout
    assert all(stage in shown for stage in MEANING)


if __name__ == "__main__":
    import shutil
    import tempfile

    os.chdir(ROOT)
    for each in TARGETS:
        folder = EXPECTED / each.replace(":", "_")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        with tempfile.TemporaryDirectory() as temporary:
            for file, content in written(each, Path(temporary)).items():
                if file not in HOST[each]:
                    (folder / file).write_text(content)
