"""The checker's engine as machine code for this host, made once and kept in the cache."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

from epdsl_runtime import sim_code

import epdsl

from .access import access
from .inspect import inspect
from .join import join
from .sync import sync

_KERNELS = {"access": access, "sync": sync, "join": join, "inspect": inspect}
# What the engine's code depends on, beside the version: its own source and that of its lowering.
_SOURCES = ("check", "sim")


def _fingerprint() -> str:
    root = Path(epdsl.__file__).parent
    digest = hashlib.sha256(epdsl.__version__.encode() + (root / "lower_sim.py").read_bytes())
    for directory in _SOURCES:
        for path in sorted((root / directory).glob("*.py")):
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


# As imported: a file edited since then is not what is compiled.
_IMPORTED = _fingerprint()


@functools.cache
def functions() -> dict[str, int]:
    """The addresses of the engine's functions."""
    import llvmlite.binding as llvm

    from epdsl.cache import cached, key_of

    machine = (str(llvm.llvm_version_info), llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten())
    if _fingerprint() != _IMPORTED:
        return {name: sim_code.address_of(_compile(name), name) for name in _KERNELS}

    def kept(name: str) -> bytes:
        return cached(key_of("check", name, _IMPORTED, *machine), f"the checker's {name}", lambda: _compile(name))

    return {name: sim_code.address_of(kept(name), name) for name in _KERNELS}


def _compile(name: str) -> bytes:
    from epdsl.build import build
    from epdsl.compiler import CompileRequest
    from epdsl.lower_sim import compile_module
    from epdsl.targets import parse_target

    kernel = _KERNELS[name]
    target = parse_target("sim")
    built = build(CompileRequest(name, kernel.function, None, kernel.parameters, {}, target))
    return compile_module(built.module, target, name, host=True).binary
