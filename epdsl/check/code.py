"""The checker's engine as machine code for this host, made once and kept in the cache."""

from __future__ import annotations

import functools

from epdsl_runtime import sim_code

from epdsl import fingerprint

from .access import access
from .inspect import inspect
from .join import join
from .sync import sync

_KERNELS = {"access": access, "sync": sync, "join": join, "inspect": inspect}


@functools.cache
def functions() -> dict[str, int]:
    """The addresses of the engine's functions."""
    from epdsl.cache import cached, key_of

    def made(name: str) -> bytes:
        if not fingerprint.compiler_is_as_loaded():
            return _compile(name)
        key = key_of("check", name, fingerprint.COMPILER, fingerprint.host())
        return cached(key, f"the checker's {name}", lambda: _compile(name))

    return {name: sim_code.address_of(made(name), name) for name in _KERNELS}


def _compile(name: str) -> bytes:
    from epdsl.build import build
    from epdsl.compiler import CompileRequest
    from epdsl.lower_sim import compile_module
    from epdsl.targets import parse_target

    kernel = _KERNELS[name]
    target = parse_target("sim")
    built = build(CompileRequest(name, kernel.function, None, kernel.parameters, {}, target))
    return compile_module(built.module, target, name, host=True).binary
