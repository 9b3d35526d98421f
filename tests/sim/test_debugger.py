"""`breakpoint()` in a kernel on the simulator: the prompt, its commands, hooks, and that nothing else changes."""

from __future__ import annotations

import bdb
import ctypes
import io
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import debugged
import llvmlite.binding as llvm
import ml_dtypes
import numpy as np
import pytest
from language_run import built, fresh_rank

import epdsl as ep

FILE = debugged.__file__


def line_of(mark: str) -> int:
    return next(i for i, line in enumerate(Path(FILE).read_text().splitlines(), 1) if line.endswith(f"# {mark}"))


def at(mark: str, function: str = "summed") -> str:
    """How pdb shows a place."""
    number = line_of(mark)
    return f"> {FILE}({number}){function}()\n-> {Path(FILE).read_text().splitlines()[number - 1].strip()}\n"


@pytest.fixture
def simulated(device_name: str) -> str:
    if not device_name.startswith("sim"):
        pytest.skip("a kernel stops on the simulator only")
    return device_name


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[str, Callable[[], Any]], str]:
    """Runs something with commands for pdb, one a line. Returns what was printed, prompts left out."""
    monkeypatch.setattr(sys, "breakpointhook", sys.__breakpointhook__)
    monkeypatch.delenv("PYTHONBREAKPOINT", raising=False)
    # Breakpoints belong to the process.
    bdb.Breakpoint.clearBreakpoints()

    def run(commands: str, body: Callable[[], Any]) -> str:
        monkeypatch.setattr(sys, "stdin", io.StringIO(commands))
        body()
        return capsys.readouterr().out.replace("(Pdb) ", "")

    return run


def head(device: str, rank: int = 0, seed: int = 0) -> str:
    return f"summed on {device}: rank {rank}, block 1, thread 5 (warp 0, lane 5); seed {seed}\n"


def test_the_prompt_has_the_threads_variables(simulated: str, script: Any) -> None:
    commands = """\
p t, total, scale, pair.tolist(), n, stop
p box.limit, box.slot[3], a[0:3].tolist(), kept[1], to.size
p rank, block, thread, warp, lane
p to[0]
p kept + 1
p kept[4]
p box
c
"""
    shown = script(commands, lambda: debugged.main(fresh_rank(simulated)))
    lines = shown.removeprefix(head(simulated) + at("stop")).splitlines()
    assert lines[:3] == [
        "(np.int32(5), np.float32(14.0), 3, [1.5, 2.5], np.int32(4), True)",
        "(np.int32(7), np.uint32(3), [0.0, 1.0, 2.0], np.float32(14.0), 1)",
        "(0, 1, 5, 0, 5)",
    ]
    assert lines[3].startswith("<Ptr[f32] 0x") and lines[3].endswith("(inbox (f32 [16]) of rank 0, byte 0 of 64)>")
    assert lines[4].startswith("*** TypeError: unsupported operand")
    assert lines[5].startswith("*** IndexError: element 4 at 0x") and lines[5].endswith(" is outside of the simulator's memory")
    assert lines[6].startswith("Box(slot=<Ptr[u32] 0x") and lines[6].endswith("limit=np.int32(7))")
    assert len(lines) == 7


def test_stepping_follows_one_thread(simulated: str, script: Any) -> None:
    shown = script("n\ns\nw\nn\np result\nu\np total\nr\nc\n", lambda: debugged.main(fresh_rank(simulated)))
    here, inner = at("call"), at("doubled", "doubled")
    assert shown == (
        head(simulated) + at("stop") + here + inner
        # w: the caller above
        + f"  {here.removeprefix('> ')}{inner}"
        + at("result", "doubled") + "np.float32(28.0)\n" + here + "np.float32(14.0)\n" + at("store")
    )  # fmt: skip


def test_next_passes_over_calls_and_step_over_their_end(simulated: str, script: Any) -> None:
    shown = script("n\nn\np total\nc\n", lambda: debugged.main(fresh_rank(simulated)))
    assert shown == head(simulated) + at("stop") + at("call") + at("store") + "np.float32(28.0)\n"


def test_breakpoints_of_the_debugger_hold_for_every_thread(simulated: str, script: Any) -> None:
    line = line_of("loop")
    rank = fresh_rank(simulated)
    a = rank.array(np.arange(64, dtype=np.float32))
    to, slots = rank.symmetric(ep.f32, 16), rank.array(np.zeros(4, np.uint32))

    def twice() -> None:
        for _ in range(2):
            debugged.summed.launch(rank, grid=2, block=64, args=(a, to.peers, debugged.Box(slots, 7), 4, True))
            rank.synchronize()

    shown = script(f"b {line}, t == 9 and i == 2\nc\np square\ncl 1\nc\nc\n", twice)
    lines = shown.splitlines()
    assert lines[3] == f"Breakpoint 1 at {FILE}:{line}"
    assert lines[4].startswith(f"summed on {simulated}: rank 0, block ") and ", thread 9 (warp 0, lane 9)" in lines[4]
    assert lines[7:9] == ["np.float32(4.0)", f"Deleted breakpoint 1 at {FILE}:{line}"]


def test_commands_that_no_simulated_thread_can_do(simulated: str, script: Any) -> None:
    shown = script("j 3\nc\n", lambda: debugged.main(fresh_rank(simulated)))
    assert shown.endswith("*** a simulated thread cannot do this; it can continue, next, step, until, return, quit\n")


def test_quit_ends_the_launch(simulated: str, script: Any) -> None:
    rank = fresh_rank(simulated)
    for commands in ("q\n", ""):
        with pytest.raises(bdb.BdbQuit):
            script(commands, lambda: debugged.main(rank))
    assert debugged.main(rank, False) == 28.0


def test_a_program_is_debugged_through_its_standard_input() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "EPDSL_SEED": "3"}
    commands = "p rank\nc\nw\nl 1, 3\nq\n"
    done = subprocess.run(
        [sys.executable, FILE, "sim"], input=commands, capture_output=True, text=True, timeout=120, env=environment, check=False
    )
    assert done.returncode == 1 and done.stderr.endswith("\nbdb.BdbQuit\n")
    place = at("stop").removeprefix("> ")
    assert done.stdout.replace("(Pdb) ", "") == (
        head("sim:nvidia", 0, 3) + f"> {place}0\n" + head("sim:nvidia", 1, 3) + f"> {place}> {place}"
        '  1  \t"""A kernel that stops in the debugger. Run as a program, it reads the debugger\'s commands from standard input."""\n'
        "  2  \t\n  3  \timport sys\n"
    )  # fmt: skip


def test_a_hook_is_called_from_the_kernels_line(simulated: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def hook() -> None:
        frame = sys._getframe(1)
        seen.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name, frame.f_locals["total"], frame.f_globals["rank"]))

    monkeypatch.setattr(sys, "breakpointhook", hook)
    assert ep.spawn(debugged.main, ranks=2, device=simulated) == [28.0, 28.0]
    assert seen == [(FILE, line_of("stop"), "summed", 14.0, rank) for rank in (0, 1)]


def test_a_hook_that_fails_ends_the_launch(simulated: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def hook() -> None:
        raise ZeroDivisionError("of the hook")

    monkeypatch.setattr(sys, "breakpointhook", hook)
    with pytest.raises(ZeroDivisionError, match="of the hook"):
        debugged.main(fresh_rank(simulated))


def test_the_environment_can_turn_them_off(simulated: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "breakpointhook", sys.__breakpointhook__)
    monkeypatch.setenv("PYTHONBREAKPOINT", "0")
    assert debugged.main(fresh_rank(simulated)) == 28.0


@dataclass(frozen=True)
class Scale:
    by: int = 3


@dataclass(frozen=True)
class Family:
    n: int
    scale: Scale = Scale()

    @ep.func
    def reduced(self, x: ep.i32):
        y = x + self.n
        while y > 8:
            last = y  # noqa: F841
            y = y - self.scale.by
        breakpoint()
        return y

    @ep.kernel(max_threads=64)
    def work(self, out: ep.Ptr[ep.i32], pair: ep.Array[ep.i32, 2]):
        low = ep.bf16(1.5)
        flag = pair[0] > pair[1]

        def plus(v):
            more = v + 1
            breakpoint()
            return more

        both = (pair[0], "text")
        if ep.thread_idx.x == 0:
            out[0] = self.reduced(both[0]) + plus(pair[1]) + ep.i32(low) + ep.i32(flag)


def test_variables_of_families_functions_and_loops(simulated: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def hook() -> None:
        frame: Any = sys._getframe(1)
        seen.append((frame.f_code.co_qualname, dict(frame.f_locals), frame.f_back.f_code.co_name, dict(frame.f_back.f_locals)))

    monkeypatch.setattr(sys, "breakpointhook", hook)
    rank = fresh_rank(simulated)
    out = rank.zeros(ep.i32, 1)
    Family(5).work.launch(rank, grid=1, block=64, args=(out, (20, 30)))
    rank.synchronize()
    assert out.numpy().tolist() == [7 + 31 + 1 + 0]
    (first, inside, caller, outside), (second, more, _, _) = seen
    assert (first, caller, second) == ("Family.reduced", "work", "Family.work.plus")
    # Before the loop is left, `last` may not have been set: it is no variable after it.
    assert {name: inside[name] for name in ("x", "y")} == {"x": 20, "y": 7} and "last" not in inside
    assert (inside["self"].n, inside["self"].scale.by) == (5, 3)
    assert (more["v"], more["more"]) == (30, 31)
    assert outside["both"] == [20, "text"] and outside["pair"] == [20, 30]
    assert (float(outside["low"]), str(outside["low"].dtype), bool(outside["flag"])) == (1.5, "bfloat16", False)


@ep.kernel
def doubles(a: ep.Ptr[ep.bf16]):
    i = ep.thread_idx.x * 8
    eight = ep.load(a + i, width=8)
    first = ep.f32(eight[0])
    if first == 8.0:
        breakpoint()
    for j in ep.unroll(range(8)):
        a[i + j] = ep.bf16(ep.f32(eight[j]) * 2)


def test_bf16_vectors_live_through_a_stop(simulated: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(sys, "breakpointhook", lambda: seen.append(sys._getframe(1).f_locals["eight"]))
    rank = fresh_rank(simulated)
    a = rank.array(np.arange(512).astype(ml_dtypes.bfloat16))
    doubles.launch(rank, grid=1, block=64, args=(a,))
    rank.synchronize()
    assert [each.tolist() for each in seen] == [list(range(8, 16))]
    assert (a.numpy().astype(np.float32) == 2 * np.arange(512).astype(ml_dtypes.bfloat16).astype(np.float32)).all()
    # What processors without bf16 round with.
    round_off = ctypes.CFUNCTYPE(ctypes.c_float, ctypes.c_float)(llvm.address_of_symbol("__truncsfbf2"))
    print("seed 1")
    bits = np.random.default_rng(1).integers(0, 2**32, 2000, dtype=np.uint64).astype(np.uint32)
    x = np.concatenate([bits.view(np.float32), np.array([1.00390625, 1.01171875, np.inf, -np.inf, 0, -0.0, 3.4e38], np.float32)])
    x = x[~np.isnan(x)]
    found = np.array([round_off(float(v)) for v in x], np.float32).view(np.uint32) & 0xFFFF
    assert (found == x.astype(ml_dtypes.bfloat16).view(np.uint16)).all()
    assert np.array(round_off(np.nan), np.float32).view(np.uint32) & 0x7FFF == 0x7FC0


@ep.kernel
def races(out: ep.Ptr[ep.u32], count: ep.Ptr[ep.u32], stop: ep.Const[bool]):
    """Each thread takes a place; who comes first is the schedule's choice."""
    for _ in range(3):
        place = ep.atomic_add(count, 1, order=ep.RELAXED, scope=ep.DEVICE)
        out[place] = ep.u32(ep.thread_idx.x + ep.block_idx.x * 64)
        if stop and place % 50 == 0:
            breakpoint()


def test_stopping_changes_no_schedule_and_the_seed_decides_it(simulated: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stops: list[int] = []
    monkeypatch.setattr(sys, "breakpointhook", lambda: stops.append(int(sys._getframe(1).f_locals["place"])))

    def order(seed: int, stop: bool) -> list[int]:
        monkeypatch.setenv("EPDSL_SEED", str(seed))
        rank = fresh_rank(simulated)
        out, count = rank.zeros(ep.u32, 4 * 64 * 3), rank.zeros(ep.u32, 1)
        races.launch(rank, grid=4, block=64, args=(out, count, stop))
        rank.synchronize()
        return out.numpy().tolist()

    assert order(4, True) == order(4, True) == order(4, False) != order(5, False)
    assert stops == 2 * list(range(0, 4 * 64 * 3, 50))


def test_code_without_a_breakpoint_is_what_it_was(simulated: str, tmp_path: Path) -> None:
    """The same kernel at the same lines, once with breakpoint() where it is left out while building."""
    found = {}
    for text in ("breakpoint()", "pass"):
        namespace: dict[str, Any] = {"__name__": "made"}
        file = tmp_path / "made.py"
        file.write_text(
            f"import epdsl as ep\n@ep.kernel\ndef made(p: ep.Ptr[ep.i32], on: ep.Const[bool]):\n    p[0] = 1\n    if on:\n        {text}\n"
        )
        exec(compile(file.read_text(), str(file), "exec"), namespace)
        found[text] = namespace["made"]
    binaries = [kernel.compile(simulated, on=False).binary for kernel in found.values()]
    assert binaries[0] == binaries[1]
    assert "ep.breakpoint" in built(found["breakpoint()"], simulated, on=True)
    assert built(found["breakpoint()"], simulated, on=False) == built(found["pass"], simulated, on=True)
