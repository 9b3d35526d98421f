"""What compiles again and what does not."""

from __future__ import annotations

import ast
import errno
import importlib.util
import json
import logging
import os
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import epdsl
from epdsl import artifact_cache, build, cache, fingerprint
from epdsl.cli import app
from epdsl.kernel_object import Kernel

HELPER = '''"""A helper."""

import epdsl as ep

WIDTH = 4


@ep.func
def put(p: ep.Ptr[ep.i32], value: ep.i32):
    # Comment of a helper.
    p[WIDTH] = value


def rows(n):
    return n * 2
'''
KERNEL = '''"""A kernel."""

import os
from dataclasses import dataclass

import epdsl as ep
import helper

LIMIT = 3  # a constant
ANNOTATED = ep.i32


@dataclass(frozen=True)
class Family:
    size: int

    @property
    def doubled(self) -> int:
        return helper.rows(self.size)

    @ep.kernel
    def fill(self, p: ep.Ptr[ep.i32]):
        p[0] = self.doubled


@ep.kernel
def k(p: ep.Ptr[ep.i32], n: ep.Const[int]):
    # Comment of the kernel.
    helper.put(p, n + LIMIT)


@ep.kernel
def annotated(p: ep.Ptr[ep.i64]):
    x: ANNOTATED = 0
    p[0] = ep.i64(x)


@ep.kernel
def environment(p: ep.Ptr[ep.i32]):
    p[0] = int(os.environ.get("WHATEVER", "1"))


family = Family(5)
'''


@dataclass
class Work:
    """Counts of what was done since they were last read."""

    builds: int = 0
    emits: int = 0

    def take(self) -> tuple[int, int]:
        found = (self.builds, self.emits)
        self.builds = self.emits = 0
        return found


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Work:
    monkeypatch.setenv("EPDSL_CACHE_DIR", str(tmp_path / "cache"))
    done = Work()
    real_build, real_emit = build.build, artifact_cache.emit

    def counted_build(*args: Any) -> Any:
        done.builds += 1
        return real_build(*args)

    def counted_emit(*args: Any) -> Any:
        done.emits += 1
        return real_emit(*args)

    monkeypatch.setattr(build, "build", counted_build)
    monkeypatch.setattr(artifact_cache, "emit", counted_emit)
    return done


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Writes the two modules, with texts replaced, and imports them as a new process would."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def load(**replaced: str) -> Any:
        del_names = ("helper", "kernels")
        for name in del_names:
            sys.modules.pop(name, None)
        for name, text in (("helper", HELPER), ("kernels", KERNEL)):
            for old, new in (pair.split(" => ") for pair in replaced.get(name, "").split(" && ") if pair):
                assert text.count(old) == 1, (name, old)
                text = text.replace(old, new)
            path = tmp_path / f"{name}.py"
            if not path.exists() or path.read_text() != text:
                path.write_text(text)
        importlib.invalidate_caches()
        # Without bytecode files: an edit of the same size within a second would not be seen.
        monkeypatch.setattr(sys, "dont_write_bytecode", True)
        spec = importlib.util.spec_from_file_location("kernels", tmp_path / "kernels.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["kernels"] = module
        spec.loader.exec_module(module)
        return module

    yield load
    for name in ("helper", "kernels"):
        sys.modules.pop(name, None)


def test_an_unchanged_kernel_is_not_even_built(files: Any, work: Work) -> None:
    first = files().k.compile("sm_90", n=1)
    assert work.take() == (1, 1)
    second = files().k.compile("sm_90", n=1)
    assert work.take() == (0, 0)
    assert second.meta() == first.meta() and second.binary == first.binary
    assert {s: second.text(s) for s in second.texts} == {s: first.text(s) for s in first.texts}
    assert files().k.compile("sm_90", n=2).text("ep") != first.text("ep")
    assert files().k.compile("gfx942", n=1).vendor == "amd"
    assert work.take() == (2, 2)


@pytest.mark.parametrize(
    ("what", "edit", "expected"),
    [
        ("a comment in the kernel", {"kernels": "# Comment of the kernel. => # Another text, longer."}, (1, 0)),
        ("a comment at a line's end", {"kernels": "# a constant => # of the kernel"}, (1, 0)),
        ("a comment in a helper", {"helper": "# Comment of a helper. => # Comment."}, (1, 0)),
        ("a helper", {"helper": "p[WIDTH] = value => p[WIDTH] = value + 1"}, (1, 1)),
        ("a helper's global", {"helper": "WIDTH = 4 => WIDTH = 5"}, (1, 1)),
        ("a kernel's global", {"kernels": "LIMIT = 3 => LIMIT = 4"}, (1, 1)),
        ("the kernel", {"kernels": "n + LIMIT => n - LIMIT"}, (1, 1)),
        # Line tables differ.
        ("a line above the kernel", {"kernels": "LIMIT = 3 => \nLIMIT = 3"}, (1, 1)),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_edits(what: str, edit: dict[str, str], expected: tuple[int, int], files: Any, work: Work) -> None:
    files().k.compile("sm_90", n=1)
    work.take()
    files(**edit).k.compile("sm_90", n=1)
    assert work.take() == expected
    files().k.compile("sm_90", n=1)
    assert work.take() == (0, 0)


def test_python_code_that_runs_while_building_is_read(files: Any, work: Work) -> None:
    text = files().family.fill.compile("sm_90").text("ep")
    assert "constant 10 : i32" in text and work.take() == (1, 1)
    files().family.fill.compile("sm_90")
    assert work.take() == (0, 0)
    assert "constant 15 : i32" in files(helper="return n * 2 => return n * 3").family.fill.compile("sm_90").text("ep")
    assert "constant 12 : i32" in files(kernels="Family(5) => Family(6)").family.fill.compile("sm_90").text("ep")


def test_values_that_are_set_at_run_time_are_read(files: Any, work: Work) -> None:
    files().k.compile("sm_90", n=1)
    module = files()
    module.helper.WIDTH = 100
    assert "constant 400 : i64" in module.k.compile("sm_90", n=1).text("ep")
    assert work.take() == (2, 2)


def test_an_annotation_inside_a_function_is_read(files: Any, work: Work) -> None:
    files().annotated.compile("sm_90")
    module = files()
    module.ANNOTATED = epdsl.u32
    assert "extui" in module.annotated.compile("sm_90").text("ep")
    assert work.take() == (2, 2)


def test_what_cannot_be_told_is_built(files: Any, work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    files().environment.compile("sm_90")
    monkeypatch.setenv("WHATEVER", "77")
    assert "constant 77" in files().environment.compile("sm_90").text("ep")
    assert work.take() == (2, 2)
    files().environment.compile("sm_90")
    assert work.take() == (1, 0)


def test_a_compiler_that_is_being_edited_keeps_nothing(files: Any, work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "COMPILER", "as it was")
    files().k.compile("sm_90", n=1)
    assert not cache.entries()


def test_a_hit_is_quick(files: Any, work: Work) -> None:
    """Under 5 ms; of the processor's time, because the machine may be shared."""
    files().k.compile("sm_90", n=1)
    times: list[float] = []
    for _ in range(5):
        kernel = files().k
        start = time.process_time()
        kernel.compile("sm_90", n=1)
        times.append(time.process_time() - start)
    assert work.take() == (1, 1)
    assert min(times) < 0.005


@pytest.mark.parametrize("damage", ["truncated", "a bit", "empty"])
@pytest.mark.parametrize("which", range(4))
def test_a_damaged_entry_is_made_again_and_reported(
    which: int, damage: str, files: Any, work: Work, caplog: pytest.LogCaptureFixture
) -> None:
    good = files().k.compile("sm_90", n=1)
    texts = {stage: good.text(stage) for stage in good.texts}
    entry = sorted(cache.entries(), key=lambda e: e.what)[which]
    data = entry.path.read_bytes()
    changed = {"truncated": data[:-7], "a bit": data[:-9] + bytes([data[-9] ^ 1]) + data[-8:], "empty": b""}[damage]
    entry.path.write_bytes(changed)
    again = files().k.compile("sm_90", n=1)
    assert (again.binary, {stage: again.text(stage) for stage in again.texts}) == (good.binary, texts)
    assert f"cache entry {entry.path} is damaged ({len(changed)} bytes); it is made again" in caplog.text
    caplog.clear()
    files().k.compile("sm_90", n=1)
    assert "damaged" not in caplog.text


def test_a_directory_that_cannot_be_written_is_no_error_and_told_of_once(
    files: Any, work: Work, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    where = tmp_path / "file" / "cache"
    monkeypatch.setenv("EPDSL_CACHE_DIR", str(where))
    assert files().k.compile("sm_90", n=1).binary
    assert work.take() == (1, 1)
    text = f"compiled code is not kept between runs: {where}/entries cannot be written (Not a directory); EPDSL_CACHE_DIR names another"
    assert caplog.text.count(text) == 1


def test_a_full_disk_leaves_no_half_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def full(source: str, target: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setenv("EPDSL_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cache.os, "replace", full)
    cache.write("ab" * 32, "something", b"body")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert "cannot be written (No space left on device)" in caplog.text


def test_a_lock_is_waited_for_and_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("EPDSL_CACHE_DIR", str(tmp_path))
    order: list[str] = []

    def second() -> None:
        with cache.locked("ab" * 32):
            order.append("second")

    thread = threading.Thread(target=second)
    with cache.locked("ab" * 32):
        thread.start()
        time.sleep(0.1)
        order.append("first")
    thread.join(10)
    assert order == ["first", "second"]
    monkeypatch.setattr(cache, "LOCK_SECONDS", 0.05)
    monkeypatch.setattr(cache, "_TELL_SECONDS", 0.01)
    with cache.locked("ab" * 32), cache.locked("ab" * 32):
        pass
    assert "has been locked for 0.05 s; going on without it" in caplog.text
    path = tmp_path / "entries" / "ab" / ("ab" * 32 + ".lock")
    assert caplog.text.count(f"another process compiles the same and holds {path}; waiting for it, 0.05 s at most") == 1


def test_the_command(files: Any, work: Work, tmp_path: Path) -> None:
    run = CliRunner()
    files().k.compile("sm_90", n=1)
    assert run.invoke(app, ["cache", "path"]).stdout.strip() == str(tmp_path / "cache" / "entries")
    rows = json.loads(run.invoke(app, ["cache", "list", "--json"]).stdout)
    assert sorted(row["what"] for row in rows) == ["k for sm_90", "k for sm_90: code", "k for sm_90: dialect", "k for sm_90: texts"]
    assert json.loads(run.invoke(app, ["cache", "clear", "--json"]).stdout)["entries"] == 4
    assert json.loads(run.invoke(app, ["cache", "list", "--json"]).stdout) == []
    files().k.compile("sm_90", n=1)
    assert work.take() == (2, 2)


CHILD = """
import json, sys
from epdsl import artifact_cache, build
counts = {"builds": 0, "emits": 0}
def counted(name, function):
    def call(*args):
        counts[name] += 1
        return function(*args)
    return call
build.build = counted("builds", build.build)
artifact_cache.emit = counted("emits", artifact_cache.emit)
import kernels
print("ready", flush=True)
sys.stdin.readline()
artifact = kernels.k.compile("sm_90", n=1)
print(json.dumps([counts, artifact.text("ptx")]), flush=True)
"""


def test_eight_processes_at_once_compile_a_kernel_once(files: Any, tmp_path: Path) -> None:
    files()
    environment = {**os.environ, "EPDSL_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    started = [
        subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(8)
    ]
    for process in started:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for process in started:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    results = [json.loads(process.communicate(timeout=120)[0]) for process in started]
    assert sum(counts["emits"] for counts, _ in results) == 1
    assert sum(counts["builds"] for counts, _ in results) == 1
    assert len({text for _, text in results}) == 1


def test_kernels_of_the_family_are_found_without_building() -> None:
    """What would make a kernel of ours slow to find: a value whose content cannot be told."""
    from epdsl.kernels import BF16TokenFormat, EPDispatchKernel

    token = BF16TokenFormat(hid_dim=128, top_k=2)
    shared = {"num_threads": 128, "n_sms": 4, "n_experts": 8, "n_ranks": 2, "max_tokens_per_rank": 4, "p2p_world_size": 2}
    dispatch = EPDispatchKernel(**shared, token_fmt_type=token, has_rank_flag=True, ep_ord_r=True)
    kernels: list[Kernel] = [dispatch.dispatch, dispatch.dispatch_async, dispatch.dispatch_wait]
    for kernel in kernels:
        assert artifact_cache.quick_key(kernel.request("sm_90")) is not None


def test_damage_is_told_to_the_user() -> None:
    assert logging.getLogger("epdsl").isEnabledFor(logging.WARNING)


@epdsl.kernel
def of_a_constant(out: epdsl.Ptr[epdsl.i32], n: epdsl.Const[object]):
    out[0] = 10 if n is True else 20


def test_equal_constants_of_two_types_are_two_kernels() -> None:
    assert of_a_constant.compile("sim", n=1) is not of_a_constant.compile("sim", n=True)
    assert [of_a_constant.compile("sim", n=n).constants for n in (1, True, 1.0)] == [{"n": "1"}, {"n": "True"}, {"n": "1.0"}]


def test_a_program_that_an_installed_tool_runs_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a profiler's: the program's functions are of `__main__`, and that module's file is the tool's."""
    tool = types.ModuleType("__main__")
    tool.__file__ = "/usr/lib/python3/site-packages/tool/__main__.py"
    monkeypatch.setitem(sys.modules, "__main__", tool)
    fingerprint._is_fixed.cache_clear()
    found: list[str] = []
    for number in (1, 2):
        program = tmp_path / f"program{number}.py"
        program.write_text(f"import epdsl as ep\n\n\n@ep.kernel\ndef kernel(p: ep.Ptr[ep.i32]):\n    p[0] = {number}\n")
        names: dict[str, Any] = {"__name__": "__main__"}
        exec(compile(program.read_text(), str(program), "exec"), names)
        found.append(fingerprint.reads(names["kernel"].function).digest)
    assert found[0] != found[1]


def test_the_runtimes_layouts_are_part_of_the_compiler() -> None:
    """Every module of the runtime from which one that makes code takes a number, a layout or a format."""
    root = Path(epdsl.__file__).parent
    makers = [*root.glob("lower*.py"), *(root / "ir").rglob("*.py"), *(root / "sim").rglob("*.py"), root / "compiler.py", root / "build.py"]
    found: set[str] = set()
    for path in makers:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "epdsl_runtime":
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("epdsl_runtime."):
                found.add(str(node.module).removeprefix("epdsl_runtime."))
    counted = {path.stem for path in fingerprint._compiler_files() if path.parent.name == "epdsl_runtime"}
    assert found - {"errors"} and found - {"errors"} <= counted
