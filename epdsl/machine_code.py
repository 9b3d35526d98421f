"""What can be said of a kernel's machine code with the tools at hand: its disassembly, and the resources it takes.

NVIDIA: `ptxas` makes the code and counts, `nvdisasm` or `cuobjdump` disassembles. AMD: the assembly's own metadata counts, ROCm's
`llvm-objdump` disassembles. Tools are looked for in $CUDA_HOME, $ROCM_PATH, /usr/local/cuda*, /opt/rocm, installed packages and PATH.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from epdsl.targets import Target

_TIMEOUT_SECONDS = 120


class NoTool(LookupError):
    """A tool that a stage needs is absent, or does not know the target."""


@dataclass(frozen=True)
class _Multiprocessor:
    """Limits of one multiprocessor (CUDA C++ Programming Guide, "Technical Specifications per Compute Capability")."""

    warps: int
    blocks: int
    shared_bytes: int
    registers: int = 65536
    # Shared memory the driver keeps of each block, and how registers are handed to a warp.
    reserved_bytes: int = 1024
    register_unit: int = 256


_NVIDIA = {
    "sm_80": _Multiprocessor(64, 32, 167936),
    "sm_89": _Multiprocessor(48, 24, 102400),
    "sm_90": _Multiprocessor(64, 32, 233472),
    "sm_90a": _Multiprocessor(64, 32, 233472),
    "sm_100": _Multiprocessor(64, 32, 233472),
    "sm_120": _Multiprocessor(48, 24, 102400),
}
# Rows of the AMD assembly's metadata (LLVM, AMDGPU usage, "Code Object V5 Metadata").
_AMD = {
    "vgpr_count": "vector registers",
    "agpr_count": "accumulator registers",
    "sgpr_count": "scalar registers",
    "vgpr_spill_count": "spilled vector registers",
    "sgpr_spill_count": "spilled scalar registers",
    "group_segment_fixed_size": "shared memory, bytes",
    "private_segment_fixed_size": "stack of a thread, bytes",
}


def find(why: str, *names: str) -> str:
    """Path of the first of these tools that is there. Raises NoTool, saying what for."""
    homes = [os.environ.get(v, "") for v in ("CUDA_HOME", "CUDA_PATH", "ROCM_PATH")]
    folders = [Path(home, *part) for home in homes if home for part in (("bin",), ("llvm", "bin"), ("lib", "llvm", "bin"))]
    folders += [*sorted(Path("/usr/local").glob("cuda*/bin"), reverse=True), Path("/opt/rocm/llvm/bin"), Path("/opt/rocm/lib/llvm/bin")]
    folders += [found for entry in sys.path if entry for found in sorted(Path(entry).glob("nvidia/*/bin"), reverse=True)]
    for name in names:
        candidates = [*(str(folder / name) for folder in folders), shutil.which(name) or ""]
        found = next((path for path in candidates if os.access(path, os.X_OK)), None)
        if found is not None:
            return found
    places = "$CUDA_HOME, $ROCM_PATH, /usr/local/cuda*, /opt/rocm, installed nvidia packages or PATH"
    raise NoTool(f"{why} needs {' or '.join(names)}, not found in {places}")


def _run(command: list[str]) -> tuple[str, str]:
    """Standard output and standard error of a command. Raises NoTool when it fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS)
    if done.returncode:
        raise NoTool(f"{' '.join(command)} failed with status {done.returncode}: {(done.stderr or done.stdout).strip()}")
    return done.stdout, done.stderr


def disassemble(target: Target, binary: bytes) -> str:
    """The machine code of an artifact's binary, with source lines where the disassembler gives them. Raises NoTool."""
    why = f"the sass stage of {target.name}"
    with tempfile.TemporaryDirectory(prefix="epdsl-") as folder:
        if target.vendor == "nvidia":
            tool = find(why, "nvdisasm", "cuobjdump")
            cubin = _assemble(target, binary, folder, why)[0]
            return _run([tool, *(("-g", "-c") if tool.endswith("nvdisasm") else ("-sass",)), cubin])[0]
        Path(folder, "kernel.hsaco").write_bytes(binary)
        tool = find(why, "llvm-objdump")
        try:
            return _run([tool, "-d", "-l", f"--mcpu={target.arch}", str(Path(folder, "kernel.hsaco"))])[0]
        except NoTool as error:
            raise NoTool(f"{why} needs an llvm-objdump that knows {target.arch}, as ROCm has; {error}") from None


def _assemble(target: Target, ptx: bytes, folder: str, why: str) -> tuple[str, str]:
    """PTX to a file of machine code, and what the assembler says of it."""
    source, made = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
    source.write_bytes(ptx)
    return str(made), _run([find(why, "ptxas"), "-v", "-arch", target.arch, "-o", str(made), str(source)])[1]


def resources(target: Target, binary: bytes, texts: Mapping[str, str], shared_bytes: int, max_threads: int | None) -> dict[str, str]:
    """What a kernel takes of a multiprocessor, as rows of a table. What no tool at hand tells is absent."""
    block = {} if max_threads is None else {"threads of a block, at most": str(max_threads)}
    if target.simulated:
        return {"shared memory, bytes": str(shared_bytes), **block}
    if target.vendor == "nvidia":
        return {**_nvidia(target, binary, shared_bytes, max_threads), **block}
    return {**_amd(texts["gcn"], shared_bytes), **block}


def _nvidia(target: Target, ptx: bytes, shared_bytes: int, max_threads: int | None) -> dict[str, str]:
    found = {"shared memory, bytes": str(shared_bytes)}
    try:
        with tempfile.TemporaryDirectory(prefix="epdsl-") as folder:
            told = _assemble(target, ptx, folder, f"the register count of {target.name}")[1]
    except NoTool as error:
        return {**found, "registers": f"unknown: {error}"}
    for row, pattern in (
        ("registers", r"Used (\d+) registers"),
        ("spill stores, bytes", r"(\d+) bytes spill stores"),
        ("spill loads, bytes", r"(\d+) bytes spill loads"),
        ("stack of a thread, bytes", r"(\d+) bytes stack frame"),
        ("barriers", r"used (\d+) barriers"),
    ):
        if match := re.search(pattern, told):
            found[row] = match[1]
    if "registers" in found and max_threads is not None:
        found["occupancy"] = occupancy(target, int(found["registers"]), shared_bytes, max_threads)
    return found


def occupancy(target: Target, registers: int, shared_bytes: int, threads: int) -> str:
    """Blocks and warps of a multiprocessor of an NVIDIA chip that run at the same time, and what limits them."""
    chip = _NVIDIA[target.arch]
    warps = -(-threads // target.warp_size)
    of_warp = -(-registers * target.warp_size // chip.register_unit) * chip.register_unit
    limits = {
        "warps": chip.warps // warps,
        "registers": chip.registers // of_warp // warps,
        "shared memory": chip.shared_bytes // (shared_bytes + chip.reserved_bytes),
        "blocks": chip.blocks,
    }
    limit, blocks = min(limits.items(), key=lambda item: item[1])
    return f"{blocks} blocks, {blocks * warps} of {chip.warps} warps ({blocks * warps / chip.warps:.0%}), limited by {limit}"


def _amd(gcn: str, shared_bytes: int) -> dict[str, str]:
    found: dict[str, str] = {}
    for key, row in _AMD.items():
        if match := re.search(rf"\.{key}:\s+(\d+)", gcn):
            found[row] = match[1]
    # The kernel's own is dynamic: the code object tells only what the lowering adds.
    found["shared memory, bytes"] = str(int(found.get("shared memory, bytes", "0")) + shared_bytes)
    if match := re.search(r";\s*Occupancy: (\d+)", gcn):
        found["occupancy"] = f"{match[1]} waves of a SIMD"
    return found


def table(rows: Mapping[str, str]) -> str:
    """Rows as aligned text."""
    width = max(map(len, rows), default=0)
    return "".join(f"{name:{width}}  {value}\n" for name, value in rows.items())
