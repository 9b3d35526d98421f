"""Kernels that `epdsl build` wrote, run by a process in which the compiler and its packages cannot be imported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from epdsl_runtime import Artifact, LaunchError, launcher
from typer.testing import CliRunner

import epdsl as ep
from epdsl.cli import app

ROOT = Path(__file__).parents[2]

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
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {absent!r}:
            raise ModuleNotFoundError(f"{{name}} is not installed here")

sys.meta_path.insert(0, Absent())
sys.path.insert(0, {runtime!r})
import numpy as np
from epdsl_runtime import Artifact, launcher, spawn

def main(rank):
    artifact = Artifact.load({artifact!r})
    values = np.arange(1000, dtype=np.float32) + rank.index
    out, peers = rank.zeros("f32", 1000), rank.symmetric("f32", 16)
    rank.barrier()
    launcher(rank, artifact).launch(
        grid=4, block=128, args=(out, {{"values": rank.array(values), "scale": 0.5, "n": 1000}}, peers.peers, rank.index)
    )
    rank.barrier()
    assert (out.numpy() == values / 2).all()
    return peers.local.numpy().tolist()

print(spawn.spawn(main, 2, device="sim"))
print(sorted(name for name in sys.modules if name.split(".")[0] in {absent!r}))
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built")
    (folder / "scale.py").write_text(KERNEL)
    command = ["build", f"{folder / 'scale.py'}:scale", "--target", "sim:nvidia,sm_90", "-o", str(folder)]
    assert CliRunner().invoke(app, command).exit_code == 0
    return folder


def test_without_the_compiler(built: Path, tmp_path: Path) -> None:
    # The simulator itself loads code with llvmlite; nothing of a GPU does.
    absent = ("epdsl", "mlir", "typer", "rich", "torch", "cuda", "hip")
    script = tmp_path / "job.py"
    script.write_text(JOB.format(absent=absent, runtime=str(ROOT / "runtime"), artifact=str(built / "sim_nvidia" / "scale")))
    shown = subprocess.run([sys.executable, "-I", str(script)], capture_output=True, text=True, cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    received = [[float(v) + source for v in range(16)] for source in (1, 0)]
    assert shown.stdout.splitlines() == [str(received), "[]"]


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

    def moved(meta: dict[str, Any]) -> None:
        meta["layout"][2] = ["part.scale", 4, 24]

    text = r"takes part.scale \(4 bytes\) at byte 24 of its parameters, where this package passes part.scale \(4 bytes\) at byte 16"
    with pytest.raises(ValueError, match=text):
        Artifact.load(changed(built, tmp_path, moved))


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
