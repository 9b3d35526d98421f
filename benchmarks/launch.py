"""What a launch with 25 arguments costs on the host: ours beside bare driver calls and Triton, in one run on one GPU.

    python benchmarks/launch.py [--launches 20000] [--device cuda:0] [--json]

The kernel does nothing. Microseconds a launch, medians of 7 rounds in which the ways take turns, and their ratio to `cuLaunchKernel` called
through ctypes with its parameters ready, the least a Python program can do. What is not installed is a row that says so.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from epdsl_runtime.array import allocate_array

import epdsl as ep

ROUNDS = 7
# The queue is drained every so many launches, outside the clock, so that it never fills.
BATCH = 250
BARE = "cuLaunchKernel, ctypes, parameters ready"
# None is 1, 0 apart from the last, or a multiple of 16: Triton makes constants of those and passes fewer.
INTEGERS = (2, 3, 4, 5, 6, 7, 9, 10, 11, 12, 13, 14)
FLOATS = (0.5, 1.5)
NEVER = 0

Way = Callable[[], object]


@ep.kernel
def many_parameters(
    p0: ep.Ptr[ep.f32], p1: ep.Ptr[ep.f32], p2: ep.Ptr[ep.f32], p3: ep.Ptr[ep.f32], p4: ep.Ptr[ep.f32],
    p5: ep.Ptr[ep.f32], p6: ep.Ptr[ep.f32], p7: ep.Ptr[ep.f32], p8: ep.Ptr[ep.f32], p9: ep.Ptr[ep.f32],
    a0: ep.i32, a1: ep.i32, a2: ep.i32, a3: ep.i32, a4: ep.i32, a5: ep.i32, a6: ep.i32,
    b0: ep.i64, b1: ep.i64, b2: ep.i64, b3: ep.i64, b4: ep.i64, c0: ep.f32, c1: ep.f32, never: ep.i32,
):  # fmt: skip
    """Writes only when `never` is not 0, so that no parameter can be dropped."""
    if never != 0:
        p0[0] = p1[0] + p2[0] + p3[0] + p4[0] + p5[0] + p6[0] + p7[0] + p8[0] + p9[0] + c0 + c1
        p1[0] = ep.f32(a0 + a1 + a2 + a3 + a4 + a5 + a6)
        p2[0] = ep.f32(b0 + b1 + b2 + b3 + b4)


@dataclass(frozen=True)
class Row:
    """A way to launch: microseconds, their ratio to the bare call; or why there are none."""

    way: str
    microseconds: float | None
    ratio: float | None
    note: str = ""


def ours(device: Any, arrays: list[Any]) -> tuple[dict[str, Way], Any]:
    """Our launches, and the prepared one."""
    args = (*arrays, *INTEGERS, *FLOATS, NEVER)
    prepared = many_parameters.prepare(device, grid=1, block=32, args=args)

    def patched() -> None:
        prepared.set(a0=3)()

    def launch() -> None:
        many_parameters.launch(device, grid=1, block=32, args=args)

    return {"epdsl, prepared": prepared, "epdsl, prepared, one argument changed": patched, "epdsl, launch()": launch}, prepared


def bare(device: Any, prepared: Any) -> dict[str, Way]:
    """The driver's call through ctypes and through NVIDIA's bindings, with the block of parameters that ours has filled."""
    driver = importlib.import_module("cuda.bindings.driver")
    function, block = device.load(prepared.artifact)._function, prepared._run._parameters
    call = ctypes.CDLL("libcuda.so.1").cuLaunchKernel
    call.argtypes = [ctypes.c_void_p, *[ctypes.c_uint] * 7, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    handle, ready = ctypes.c_void_p(function), ctypes.c_void_p(block.address)
    kinds = {"u64": ctypes.c_void_p, "i32": ctypes.c_int, "i64": ctypes.c_longlong, "f32": ctypes.c_float}
    types = tuple(kinds[slot.dtype] for slot in (*prepared.artifact.slots, *_hidden()))
    values = (*prepared._values, device.context_address)

    def checked(result: Any) -> None:
        if int(result[0]):
            raise RuntimeError(f"cuLaunchKernel returned {result[0]}")

    return {
        BARE: lambda: call(handle, 1, 1, 1, 32, 1, 1, 0, None, ready, None),
        "cuLaunchKernel, cuda.bindings, parameters ready": lambda: checked(
            driver.cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, 0, block.address, 0)
        ),
        "cuLaunchKernel, cuda.bindings, values and types": lambda: checked(
            driver.cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, 0, (values, types), 0)
        ),
    }


def _hidden() -> tuple[Any, ...]:
    from epdsl_runtime.artifact import Slot

    return (Slot("context", "u64", 8),)


def triton(index: int) -> dict[str, Way]:
    """Triton's launch of the same kernel on tensors. Raises what says why there is none."""
    torch, kernel = importlib.import_module("torch"), importlib.import_module("launch_triton").many_parameters
    torch.cuda.set_device(index)
    tensors = [torch.zeros(16, device=f"cuda:{index}") for _ in range(10)]
    args = (*tensors, *INTEGERS, *FLOATS, NEVER)
    compiled = kernel[(1,)](*args, num_warps=1)
    ways: dict[str, Way] = {"Triton, kernel[grid](...)": lambda: kernel[(1,)](*args, num_warps=1)}
    if hasattr(compiled, "__getitem__"):
        ways["Triton, compiled kernel[grid](...)"] = lambda: compiled[(1, 1, 1)](*args)
    return ways


def measured(ways: dict[str, Way], synchronize: Callable[[], None], launches: int) -> tuple[dict[str, float], dict[str, str]]:
    """Microseconds of each way, and what was wrong with the others."""
    wrong: dict[str, str] = {}
    for name, run in ways.items():
        try:
            run()
            synchronize()
        except Exception as error:
            wrong[name] = _first_line(error)
    rounds: dict[str, list[float]] = {name: [] for name in ways if name not in wrong}
    batches = max(1, launches // ROUNDS // BATCH)
    for _ in range(ROUNDS):
        for name, times in rounds.items():
            run, total = ways[name], 0.0
            for _ in range(batches):
                start = time.perf_counter()
                for _ in range(BATCH):
                    run()
                total += time.perf_counter() - start
                synchronize()
            times.append(total / (batches * BATCH) * 1e6)
    return {name: statistics.median(times) for name, times in rounds.items()}, wrong


def table(device: Any, index: int, launches: int) -> list[Row]:
    """Every way's row."""
    arrays = [allocate_array(device, (16,), "f32") for _ in range(10)]
    ways, prepared = ours(device, arrays)
    wrong: dict[str, str] = {}
    for name, make in (("cuda.bindings", lambda: bare(device, prepared)), ("Triton", lambda: triton(index))):
        try:
            ways |= make()
        except Exception as error:
            wrong[name] = _first_line(error)
    found, more = measured(ways, device.synchronize, launches)
    least = found.get(BARE)
    rows = [Row(name, value, None if least is None else value / least) for name, value in sorted(found.items(), key=lambda item: item[1])]
    return rows + [Row(name, None, None, why) for name, why in (wrong | more).items()]


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or 'no text').splitlines()[0]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launches", type=int, default=20000)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    device = ep.open_device(options.device)
    rows = table(device, device.info.index, options.launches)
    if options.json:
        print(json.dumps({"device": device.info.name, "launches": options.launches, "rows": [asdict(row) for row in rows]}))
    else:
        print(f"{'a launch with 25 arguments':50} {'us':>8} {'ratio':>7}")
        for row in rows:
            if row.microseconds is None:
                print(f"{row.way:50} {'-':>8} {'-':>7}  {row.note}")
            else:
                print(f"{row.way:50} {row.microseconds:8.2f} {'-' if row.ratio is None else f'{row.ratio:7.2f}'}")
    device.close()


if __name__ == "__main__":
    main()
