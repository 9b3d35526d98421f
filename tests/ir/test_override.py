"""Edited stages in place of the compiler's, and what is left behind when a stage fails."""

from __future__ import annotations

import json
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import epdsl as ep
from epdsl import codegen, dump
from epdsl.kernel_object import Kernel
from epdsl.lang.errors import CompileError

TEXT = """import epdsl as ep

@ep.kernel
def k(p: ep.Ptr[ep.i32], flag: ep.Ptr[ep.u32]):
    p[ep.thread_idx.x] = 41
    ep.store(flag, 1, order=ep.RELEASE, scope=ep.SYSTEM)
"""


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Kernel]:
    """Writes the kernel's file, with something put in the place of something, and imports it."""
    monkeypatch.setenv("EPDSL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("EPDSL_DUMP_DIR", str(tmp_path / "dump"))

    def made(old: str = "", new: str = "") -> Kernel:
        path = tmp_path / "kernel.py"
        path.write_text(TEXT.replace(old, new) if old else TEXT)
        namespace: dict[str, Any] = {"__name__": "kernel"}
        exec(compile(path.read_text(), str(path), "exec"), namespace)
        return namespace["k"]

    return made


def edited(kernel: Kernel, target: str, stage: str, old: str, new: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Dumps a stage into a directory of overrides, replaces a text in it, and turns overrides on."""
    made = dump.write_stages(kernel, target, {}, stage.partition("/")[0], folder.parent / "dumped")
    name = dump.file_name(stage, kernel.request(target).target.assembly)
    folder.mkdir(exist_ok=True)
    path = folder / name
    text = (made / name).read_text()
    assert text.count(old) >= 1
    path.write_text(text.replace(old, new))
    monkeypatch.setenv("EPDSL_OVERRIDE_DIR", str(folder))
    return path


def ran(kernel: Kernel) -> int:
    def main(rank: ep.Rank) -> int:
        out, flag = rank.array(np.zeros(32, np.int32)), rank.array(np.zeros(1, np.uint32))
        kernel.launch(rank, grid=1, block=32, args=(out, flag))
        rank.synchronize()
        return int(out.numpy()[0])

    return ep.spawn(main, ranks=1, device="sim")[0]


@pytest.mark.parametrize(
    ("stage", "old", "new"),
    [
        ("ep", "arith.constant 41 : i32", "arith.constant 42 : i32"),
        ("passes/02_arith-expand", "arith.constant 41 : i32", "arith.constant 42 : i32"),
        ("passes/05_convert-arith-to-llvm", "llvm.mlir.constant(41 : i32)", "llvm.mlir.constant(42 : i32)"),
        ("llvm", "i32 41", "i32 42"),
        ("llvm-opt", "i32 41", "i32 42"),
    ],
)
def test_an_edited_stage_is_what_runs(
    stage: str, old: str, new: str, load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = edited(load(), "sim", stage, old, new, tmp_path / "over", monkeypatch)
    for _ in range(2):
        caplog.clear()
        assert ran(load()) == 42
        assert f"override: {path} is used as the {stage} stage of k for sim:nvidia" in caplog.text
    monkeypatch.delenv("EPDSL_OVERRIDE_DIR")
    assert ran(load()) == 41


@pytest.mark.parametrize(("target", "old", "new"), [("sm_90", "41", "42"), ("gfx942", "v_mov_b32_e32 v2, 41", "v_mov_b32_e32 v2, 42")])
def test_edited_assembly_is_the_binary(target: str, old: str, new: str, load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if target == "gfx942":
        try:
            codegen.find_tool("clang", "clang")
        except codegen.CodegenError as error:
            pytest.skip(str(error))
    before = load().compile(target)
    edited(load(), target, "asm", old, new, tmp_path / "over", monkeypatch)
    after = load().compile(target)
    assert after.text("asm") == before.text("asm").replace(old, new)
    assert after.binary != before.binary


def test_a_stale_override_is_refused_with_both_hashes(load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = edited(load(), "sm_90", "llvm", "i32 41", "i32 42", tmp_path / "over", monkeypatch)
    was = json.loads(path.read_text().splitlines()[0].removeprefix("; epdsl: "))["hash"]
    with pytest.raises(CompileError) as caught:
        load("41", "43").compile("sm_90")
    now = dump.write_stages(load("41", "43"), "sm_90", {}, "ep", tmp_path / "now").parent.name.removeprefix("k-")
    assert str(caught.value).startswith(f"EP112: override {path} was made from k for sm_90 as of {was}, which is now {now}")
    assert "write: EPDSL_DUMP again, and the edit again in the new file" in str(caught.value)


def test_files_that_were_not_edited_say_nothing(load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = dump.write_stages(load(), "sm_90", {}, "all", tmp_path / "dumped")
    shutil.copytree(made, tmp_path / "over")
    monkeypatch.setenv("EPDSL_OVERRIDE_DIR", str(tmp_path / "over"))
    assert "43" in load("41", "43").compile("sm_90").text("asm")
    edited(load("41", "43"), "gfx942", "llvm", "i32 43", "i32 44", tmp_path / "over", monkeypatch)
    assert "41" in load().compile("sm_90").text("asm")


@pytest.mark.parametrize(
    ("stage", "target", "text"),
    [
        ("resources", "gfx942", "nothing is made of the resources stage of gfx942"),
        ("source", "sm_90", "nothing is made of the source stage of sm_90"),
        ("asm", "sim", "nothing is made of the asm stage of sim:nvidia"),
    ],
)
def test_stages_of_which_nothing_is_made(
    stage: str, target: str, text: str, load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edited(load(), target, stage, "\n", "\n ", tmp_path / "over", monkeypatch)
    with pytest.raises(CompileError, match=text):
        load().compile(target)


def test_a_file_that_does_not_say_what_it_is_is_refused(load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = edited(load(), "sm_90", "llvm", "i32 41", "i32 42", tmp_path / "over", monkeypatch)
    path.write_text(path.read_text().partition("\n")[2])
    with pytest.raises(CompileError, match="the first line does not say which stage of which kernel it is"):
        load().compile("sm_90")
    monkeypatch.setenv("EPDSL_OVERRIDE_DIR", str(tmp_path / "nowhere"))
    with pytest.raises(CompileError, match="is no directory"):
        load().compile("sm_90")


# ---- failures


def reproducer(error: CompileError) -> Path:
    assert error.fix.startswith("to see it fail again: python -m epdsl.reproducer ")
    return Path(error.fix.rpartition(" ")[2])


def again(directory: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "epdsl.reproducer", str(directory)], capture_output=True, text=True, timeout=120)


def test_a_pass_that_fails_leaves_a_reproducer(load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edited(load(), "sm_90", "ep", 'order = "release"', 'order = "acquire"', tmp_path / "over", monkeypatch)
    with pytest.raises(CompileError) as caught:
        load().compile("sm_90")
    text = str(caught.value)
    assert text.startswith("EP101: k for sm_90: pass 03_ep-to-nvvm failed: ep.store order acquire scope system")
    assert "there is no such instruction on sm_90. Orders of store are plain, relaxed, release, seq_cst." in text
    directory = reproducer(caught.value)
    assert directory.name == "reproducer" and directory.parents[1].name.startswith("k-") and directory.is_relative_to(tmp_path / "dump")
    described = json.loads((directory / "reproducer.json").read_text())
    assert described["pipeline"][0] == described["stage"] == "passes/03_ep-to-nvvm"
    assert described["pipeline"][1:3] == ["passes/04_func-to-llvm", "passes/05_convert-vector-to-llvm"]
    assert set(described["versions"]) == {"epdsl", "source", "mlir", "llvm"}
    assert '{cache = "default", order = "acquire", scope = "system"} : (i32, !llvm.ptr<1>) -> ()' in (directory / "before.mlir").read_text()
    monkeypatch.delenv("EPDSL_OVERRIDE_DIR")
    done = again(directory)
    assert done.returncode == 1 and "LoweringError" in done.stderr and "order acquire" in done.stderr
    assert done.stdout.splitlines() == ["passes/03_ep-to-nvvm"]


def test_the_place_in_the_kernel_is_shown(load: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kernel = load("ep.store(flag, 1, order=ep.RELEASE, scope=ep.SYSTEM)", "ep.bulk_commit()")
    with pytest.raises(CompileError) as caught:
        kernel.compile("sm_80")
    text = str(caught.value)
    assert text.startswith("EP103: k for sm_80: pass 03_ep-to-nvvm failed: ep.bulk_commit on (): there is no bulk copy engine on sm_80.")
    assert f'  File "{tmp_path}/kernel.py", line 6, in k\n    ep.bulk_commit()' in text
    assert 'loc("' in (reproducer(caught.value) / "before.mlir").read_text()


def test_a_code_generator_that_fails_leaves_its_input(load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edited(load(), "gfx942", "llvm", "store i32 41", "store nothing 41", tmp_path / "over", monkeypatch)
    with pytest.raises(CompileError, match="k for gfx942: the llvm-opt stage failed") as caught:
        load().compile("gfx942")
    directory = reproducer(caught.value)
    assert (directory / "before.ll").read_text().count("store nothing 41") == 1
    done = again(directory)
    assert done.returncode == 1 and "LLVM refuses the module lowered for gfx942" in done.stderr


def test_a_reproducer_that_no_longer_fails_says_so(load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codegen, "optimise", lambda *_: (_ for _ in ()).throw(codegen.CodegenError("EP106", "out of luck")))
    with pytest.raises(CompileError, match="k for sm_90: the llvm-opt stage failed: out of luck") as caught:
        load().compile("sm_90")
    done = again(reproducer(caught.value))
    assert done.returncode == 0 and done.stdout.splitlines() == ["llvm", "llvm-opt", "asm", "nothing fails"]
    assert again(tmp_path).returncode == 2


def test_nothing_is_kept_of_a_failure(load: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(codegen, "optimise", lambda *_: (_ for _ in ()).throw(codegen.CodegenError("EP106", "out of luck")))
        with pytest.raises(CompileError):
            load().compile("sm_90")
    assert load().compile("sm_90").binary


def test_without_a_place_for_it_the_error_is_still_the_error(load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dump").write_text("a file is in the way")
    monkeypatch.setattr(codegen, "optimise", lambda *_: (_ for _ in ()).throw(codegen.CodegenError("EP106", "out of luck")))
    with pytest.raises(CompileError, match="out of luck") as caught:
        load().compile("sm_90")
    assert "a directory that can be written in EPDSL_DUMP_DIR" in caught.value.fix
    assert stat.S_ISREG((tmp_path / "dump").stat().st_mode)
