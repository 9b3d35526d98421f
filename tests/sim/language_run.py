"""What the language tests share: one rank on the device under test, and running a kernel on NumPy arrays."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from epdsl_runtime.rank import Rank

import epdsl as ep
from epdsl.build import build
from epdsl.compiler import CompileRequest
from epdsl.targets import parse_target


@functools.cache
def rank_on(device_name: str) -> Rank:
    """The only rank of a job on its own device, opened once."""
    return Rank(0, 1, ep.open_device(device_name))


def fresh_rank(device_name: str) -> Rank:
    """The same on a device that nothing else uses, for kernels that break it."""
    return Rank(0, 1, ep.open_device(device_name))


def warp_size(device_name: str) -> int:
    return rank_on(device_name).device.info.warp_size


def run(device_name: str, kernel: Any, *args: Any, grid: int | Sequence[int] = 1, block: int | Sequence[int] | None = None) -> list[Any]:
    """Runs a kernel on a copy of the arrays among `args` and returns what it left in them.

    block  one warp unless given
    """
    rank = rank_on(device_name)
    passed = [rank.array(a) if isinstance(a, np.ndarray) else a for a in args]
    kernel.launch(rank, grid=grid, block=block or rank.device.info.warp_size, args=tuple(passed))
    rank.synchronize()
    return [p.numpy() for p, a in zip(passed, args, strict=True) if isinstance(a, np.ndarray)]


def built(kernel: Any, target: str = "sim:nvidia", **constants: Any) -> str:
    """The `ep` text of a kernel, without lowering it. Raises CompileError."""
    limit = kernel.max_threads(kernel.instance) if callable(kernel.max_threads) else kernel.max_threads
    request = CompileRequest(kernel.name, kernel.function, kernel.instance, kernel.parameters, constants, parse_target(target), limit)
    return build(request).text


def rng(seed: int) -> np.random.Generator:
    """A generator whose seed a failing test shows."""
    print(f"seed {seed}")
    return np.random.default_rng(seed)
