"""Kernels that `epdsl build` wrote, run in environments where the compiler and its packages are not installed."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import venv
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from epdsl_runtime import Artifact, LaunchError, launcher, sim_code
from typer.testing import CliRunner

import epdsl as ep
from epdsl.cli import app

KERNEL = """
import epdsl as ep

@ep.struct
class Part:
    values: ep.Ptr[ep.f32]
    scale: ep.f32
    n: ep.i32

@ep.kernel(max_threads=128, blocks=4)
def scale(out: ep.Ptr[ep.f32], part: Part, peers: ep.Peers[ep.f32], me: ep.i32):
    for i in range(ep.block_idx.x * ep.block_dim.x + ep.thread_idx.x, part.n, ep.grid_dim.x * ep.block_dim.x):
        out[i] = part.values[i] * part.scale
    if ep.block_idx.x == 0 and ep.thread_idx.x < 4:
        ep.store(peers[(me + 1) % peers.size] + ep.thread_idx.x * 4, ep.load(part.values + ep.thread_idx.x * 4, width=4))
"""

JOB = """
import importlib.util
import sys

import numpy as np
from epdsl_runtime import Artifact, launcher, spawn

def main(rank):
    artifact = Artifact.load(sys.argv[1])
    values = np.arange(1000, dtype=np.float32) + rank.index
    out, peers = rank.zeros("f32", 1000), rank.symmetric("f32", 16)
    rank.barrier()
    launcher(rank, artifact).launch(
        grid=4, block=128, args=(out, {"values": rank.array(values), "scale": 0.5, "n": 1000}, peers.peers, rank.index)
    )
    rank.barrier()
    assert (out.numpy() == values / 2).all()
    return peers.local.numpy().tolist()

print(spawn.spawn(main, 2, device="sim"))
print([name for name in sys.argv[2:] if importlib.util.find_spec(name)])
"""
COMPILER = ("epdsl", "mlir", "typer", "rich", "cuda", "hip")


def run_with(packages: tuple[str, ...], artifact: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs JOB in an environment of its own, in which the runtime and these packages are installed and nothing else."""
    venv.create(folder / "venv")
    site = next((folder / "venv").glob("lib*/python*/site-packages"))
    for name in packages:
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.submodule_search_locations
        where = Path(spec.submodule_search_locations[0])
        (site / name).symlink_to(where)
        if (libraries := where.with_name(f"{name}.libs")).exists():
            (site / libraries.name).symlink_to(libraries)
    for name in ("torch", "mpi4py"):
        # Installed, and not to be loaded by a program that does not use them.
        (site / f"{name}.py").write_text(f"raise AssertionError('{name} was imported')")
    (folder / "job.py").write_text(JOB)
    command = [str(folder / "venv" / "bin" / "python"), "-I", str(folder / "job.py"), str(artifact), *COMPILER]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=60)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built")
    (folder / "scale.py").write_text(KERNEL)
    command = ["build", f"{folder / 'scale.py'}:scale", "--target", "sim:nvidia,sm_90", "-o", str(folder)]
    assert CliRunner().invoke(app, command).exit_code == 0
    return folder


def test_without_the_compiler(built: Path, tmp_path: Path) -> None:
    # The simulator itself loads code with llvmlite; nothing of a GPU does.
    shown = run_with(("epdsl_runtime", "numpy", "ml_dtypes", "llvmlite"), built / "sim_nvidia" / "scale", tmp_path)
    assert shown.returncode == 0, shown.stderr
    received = [[float(v) + source for v in range(16)] for source in (1, 0)]
    assert shown.stdout.splitlines() == [str(received), "[]"]


def test_the_simulator_says_what_it_needs(built: Path, tmp_path: Path) -> None:
    """Where NumPy alone is installed, an artifact is read, and what its device lacks is named."""
    shown = run_with(("epdsl_runtime", "numpy"), built / "sim_nvidia" / "scale", tmp_path)
    assert shown.returncode == 1
    assert (
        "the simulator loads its code with llvmlite, which is not installed here" in shown.stderr and "pip install llvmlite" in shown.stderr
    )


def test_what_it_carries(built: Path) -> None:
    meta = json.loads((built / "sm_90" / "scale" / "artifact.json").read_text())
    assert (meta["max_threads"], meta["blocks"], len(meta["digest"])) == (128, 4, 32)
    assert meta["layout"] == [
        ["out", 8, 0],
        ["part.values", 8, 8],
        ["part.scale", 4, 16],
        ["part.n", 4, 20],
        ["peers.table", 8, 24],
        ["peers.size", 4, 32],
        ["me", 4, 36],
    ]
    aligned = {param["name"]: param["align"] for param in meta["params"][1]["fields"]}
    assert aligned["values"] == 16


def changed(built: Path, tmp_path: Path, change: Any) -> Path:
    """A copy of the artifact whose artifact.json says something else, with a digest that fits."""
    from epdsl_runtime.artifact import _digest

    source = built / "sim_nvidia" / "scale"
    meta = json.loads((source / "artifact.json").read_text())
    del meta["digest"]
    change(meta)
    binary = (source / "kernel.bin").read_bytes()
    (tmp_path / "kernel.bin").write_bytes(binary)
    (tmp_path / "artifact.json").write_text(json.dumps({**meta, "digest": _digest(meta, binary)}))
    return tmp_path


def test_what_is_refused(built: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no artifact that can be read"):
        Artifact.load(tmp_path / "nothing")
    made = changed(built, tmp_path, lambda meta: None)
    Artifact.load(made)
    (made / "kernel.bin").write_bytes((made / "kernel.bin").read_bytes()[:-1] + b"?")
    with pytest.raises(ValueError, match=r"its files have digest [0-9a-f]{32}, artifact.json says [0-9a-f]{32}: one was changed"):
        Artifact.load(made)
    with pytest.raises(ValueError, match="holds an artifact of format 1, this package reads format 3; build it again"):
        Artifact.load(changed(built, tmp_path, lambda meta: meta.update(format=1)))

    for text in ("[]", "null", '"artifact"', "\ufeff{", "{"):
        (made / "artifact.json").write_text(text, encoding="utf-16" if "{" in text else "utf-8")
        with pytest.raises(ValueError, match="holds no artifact that can be read"):
            Artifact.load(made)
    for name in ("params", "layout", "texts", "max_threads"):
        with pytest.raises(ValueError, match=f"its artifact.json lacks '{name}', though it is of format 3; build it with the same version"):
            Artifact.load(changed(built, tmp_path, lambda meta, name=name: meta.pop(name)))
    with pytest.raises(ValueError, match=r"says what this package does not know .*'unheard'"):
        Artifact.load(changed(built, tmp_path, lambda meta: meta["params"][0].update(unheard=1)))

    def moved(meta: dict[str, Any]) -> None:
        meta["layout"][2] = ["part.scale", 4, 24]

    text = r"takes part.scale \(4 bytes\) at byte 24 of its parameters, where this package passes part.scale \(4 bytes\) at byte 16"
    with pytest.raises(ValueError, match=text):
        Artifact.load(changed(built, tmp_path, moved))


def test_texts_are_read_whatever_became_of_them(built: Path, tmp_path: Path) -> None:
    """They are for people; what runs is in kernel.bin."""
    made = tmp_path / "made"
    shutil.copytree(built / "sm_90" / "scale", made)
    (made / "kernel.ptx").write_bytes(b"\xff\xfe")
    (made / "kernel.llvm").unlink()
    loaded = Artifact.load(made)
    assert loaded.text("ptx") == "\ufffd\ufffd" and "llvm" not in loaded.texts


def test_code_for_another_processor_is_refused(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it is loaded: an instruction that the processor lacks would end the process."""
    artifact = Artifact.load(built / "sim_nvidia" / "scale")
    here = sim_code._host()
    missing = sorted(here)[:2]
    monkeypatch.setattr(sim_code, "_host", lambda: here - set(missing))
    device = ep.open_device("sim")
    text = (
        rf"scale cannot run on .*: it is code for a processor with {len(here)} features, .* lacks 2 \({', '.join(missing)}\); build it on"
    )
    with pytest.raises(LaunchError, match=text):
        launcher(device, artifact)
    with pytest.raises(LaunchError, match="its binary is no simulator code of this version; build it again"):
        launcher(device, replace(artifact, binary=b"epsm" + artifact.binary[4:]))
    monkeypatch.setattr(sim_code, "_host", lambda: here | {"a feature more"})
    launcher(device, artifact)
    device.close()


def test_where_nothing_can_be_written_nothing_is_compiled(built: Path) -> None:
    taken = built / "taken"
    taken.write_text("")
    shown = CliRunner().invoke(app, ["build", f"{built / 'scale.py'}:scale", "--target", "sim:nvidia", "-o", str(taken)])
    assert shown.exit_code == 2 and f"{taken} cannot be the output directory: File exists; name another with -o" in shown.output
    twice = [
        "build",
        f"{built / 'scale.py'}:scale",
        "--target",
        "sim:nvidia,sim:nvidia",
        "--target",
        "sim:nvidia",
        "-o",
        str(built),
        "--json",
    ]
    assert [written["target"] for written in json.loads(CliRunner().invoke(app, twice).stdout)] == ["sim:nvidia"]


def test_what_a_launch_refuses(built: Path) -> None:
    device = ep.open_device("sim")
    loaded = launcher(device, Artifact.load(built / "sim_nvidia" / "scale"))
    with pytest.raises(LaunchError, match="scale: a grid of 8 blocks, but it is compiled for grids of 4"):
        loaded.launch(grid=8, block=128, args=(0, 0, 0, 0))
    with pytest.raises(LaunchError, match="scale: a block of 256 threads, but it is compiled for at most 128"):
        loaded.launch(grid=4, block=256, args=(0, 0, 0, 0))
    with pytest.raises(LaunchError, match="scale is compiled for sm_90, sim:0 is sim:nvidia"):
        launcher(device, Artifact.load(built / "sm_90" / "scale"))
    rank = ep.Rank(0, 1, device)
    out, peers = rank.zeros("f32", 8), rank.symmetric("f32", 16)
    part = {"values": rank.zeros("f32", 9)[1:], "scale": 1.0, "n": 8}
    with pytest.raises(ValueError, match=r"parameter 'part.values' must be aligned to 16 bytes; address 0x[0-9a-f]+ is 4 bytes past"):
        loaded.launch(grid=4, block=128, args=(out, part, peers.peers, 0))
    device.close()
