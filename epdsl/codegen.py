"""LLVM dialect to machine code: PTX for NVIDIA, a linked code object (HSACO) for AMD."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
from epdsl_runtime.errors import CodedError

from epdsl.ir.steps import Watch
from epdsl.targets import Target


class CodegenError(CodedError):
    """The code generator or the linker refused the module."""


@dataclass(frozen=True)
class Code:
    """What a kernel module became.

    binary  PTX text in ASCII, or the bytes of an HSACO
    texts   "llvm" and "llvm-opt" (LLVM IR before and after optimisation) and "ptx" or "gcn" (assembly)
    """

    binary: bytes = field(repr=False)
    texts: dict[str, str] = field(default_factory=dict, repr=False)


def emit(module: Any, target: Target, opt: int = 3, watch: Watch | None = None) -> Code:
    """Compiles the one `gpu.module` of a lowered `module`. Raises CodegenError."""
    watch = watch or Watch()
    watch.begin("llvm")
    return emit_llvm(translate(module), target, opt, watch)


def emit_llvm(text: str, target: Target, opt: int = 3, watch: Watch | None = None) -> Code:
    """Compiles LLVM IR. Raises CodegenError."""
    watch = watch or Watch()
    watch.begin("llvm")
    text = watch.end("llvm", lambda: text) or text
    watch.begin("llvm-opt")
    unit, machine = optimise(text, target, opt)
    optimised = str(unit)
    other = watch.end("llvm-opt", lambda: optimised)
    if other is not None:
        optimised, unit = other, parse(other, target, machine)
    watch.begin("asm")
    # Code generation rewrites the module, so a second emission needs a copy of its own.
    assembly = machine.emit_assembly(unit if target.vendor == "nvidia" else unit.clone())
    other = watch.end("asm", lambda: assembly)
    assembly = other or assembly
    texts = {"llvm": text, "llvm-opt": optimised, target.assembly: assembly}
    if target.vendor == "nvidia":
        return Code(_ascii(assembly), texts)
    watch.begin("binary")
    assembled = other is not None or " asm " in optimised
    return Code(link(assemble(assembly, target) if assembled else machine.emit_object(unit)), texts)


def _ascii(ptx: str) -> bytes:
    try:
        return ptx.encode("ascii")
    except UnicodeEncodeError as error:
        raise CodegenError("EP106", f"PTX is ASCII; character {error.start} is {ptx[error.start]!r}") from None


def translate(module: Any) -> str:
    """LLVM IR text of the one `gpu.module` of a lowered `module`, without a triple."""
    from mlir.dialects.llvm import translate_module_to_llvmir  # type: ignore[attr-defined]

    from epdsl.lowering import gpu_modules

    (gpu_module,) = gpu_modules(module)
    with module.context:
        return translate_module_to_llvmir(gpu_module)


def optimise(text: str, target: Target, opt: int = 3) -> tuple[llvm.ModuleRef, llvm.TargetMachine]:
    """LLVM IR text as an optimised module, and what emits code for it. Raises CodegenError."""
    machine = target_machine(target, opt)
    unit = parse(text, target, machine)
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=opt))
    builder.getModulePassManager().run(unit, builder)
    return unit, machine


def parse(text: str, target: Target, machine: llvm.TargetMachine) -> llvm.ModuleRef:
    """LLVM IR text as a module for a target. Raises CodegenError."""
    try:
        unit = llvm.parse_assembly(text)
        unit.triple = target.triple
        unit.data_layout = str(machine.target_data)
        unit.verify()
    except RuntimeError as error:
        raise CodegenError("EP106", f"LLVM refuses the module lowered for {target.name}: {error}") from error
    return unit


def target_machine(target: Target, opt: int = 3) -> llvm.TargetMachine:
    """LLVM's code generator for a GPU. Floating point is not contracted."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    reloc = "pic" if target.vendor == "amd" else "default"
    return llvm.Target.from_triple(target.triple).create_target_machine(cpu=target.arch, features=target.features, opt=opt, reloc=reloc)


def find_tool(name: str, zig_name: str) -> list[str]:
    """The command that runs LLVM's `name`: ROCm's own, else ziglang's, else one on PATH. Raises CodegenError."""
    roots = [os.environ.get("ROCM_PATH", ""), "/opt/rocm"]
    candidates = [Path(root, *folder, name) for root in roots if root for folder in (("llvm", "bin"), ("lib", "llvm", "bin"))]
    for candidate in candidates:
        if candidate.is_file() and os.access(candidate, os.X_OK):
            return [str(candidate)]
    if importlib.util.find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", zig_name]
    if found := shutil.which(name):
        return [found]
    raise CodegenError(
        "EP105", f"no {name} for AMD code objects in $ROCM_PATH, /opt/rocm or PATH. Install one with: pip install epdsl[amd]"
    )


def _run(command: list[str], folder: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=folder)
    if done.returncode:
        raise CodegenError("EP106", f"{' '.join(command)} failed with status {done.returncode}: {done.stderr.strip()}")


def assemble(text: str, target: Target) -> bytes:
    """AMDGPU assembly to an object file, for kernels with inline assembly: llvmlite has no AMDGPU assembler. Raises CodegenError."""
    with tempfile.TemporaryDirectory(prefix="epdsl-") as folder:
        Path(folder, "kernel.s").write_text(text)
        _run(
            [*find_tool("clang", "clang"), f"--target={target.triple}", f"-mcpu={target.arch}", "-c", "kernel.s", "-o", "kernel.o"], folder
        )
        return Path(folder, "kernel.o").read_bytes()


def link(relocatable: bytes) -> bytes:
    """Links an AMDGPU object file into a shared object. Raises CodegenError; an undefined symbol is one."""
    with tempfile.TemporaryDirectory(prefix="epdsl-") as folder:
        Path(folder, "kernel.o").write_bytes(relocatable)
        _run([*find_tool("ld.lld", "ld.lld"), "-shared", "--no-undefined", "-o", "kernel.hsaco", "kernel.o"], folder)
        return Path(folder, "kernel.hsaco").read_bytes()
