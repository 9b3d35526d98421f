"""What a prepared launch costs on the host, beside a bare `cuLaunchKernel` through ctypes, in one run on one GPU.

    python benchmarks/launch.py [--launches 20000] [--json]

The kernel has 25 parameters and does nothing. Prints microseconds a launch, medians of 7 rounds, and their ratio.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import time
from collections.abc import Callable

from epdsl_runtime.array import allocate_array

import epdsl as ep


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


def microseconds(run: Callable[[], object], synchronize: Callable[[], None], launches: int) -> float:
    """Median over 7 rounds. The queue is drained every 500 launches, outside the clock, so that it never fills."""
    rounds: list[float] = []
    for _ in range(7):
        total = 0.0
        for _ in range(max(1, launches // 7 // 500)):
            start = time.perf_counter()
            for _ in range(500):
                run()
            total += time.perf_counter() - start
            synchronize()
        rounds.append(total / (max(1, launches // 7 // 500) * 500) * 1e6)
    return statistics.median(rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launches", type=int, default=20000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    device = ep.open_device("cuda:0")
    arrays = [allocate_array(device, (16,), "f32") for _ in range(10)]
    args = (*arrays, *range(7), *range(5), 0.5, 1.5, 0)
    prepared = many_parameters.prepare(device, grid=1, block=32, args=args)
    prepared()
    device.synchronize()

    function = prepared._run
    library = ctypes.CDLL("libcuda.so.1")
    launch = library.cuLaunchKernel
    launch.argtypes = [ctypes.c_void_p, *[ctypes.c_uint] * 7, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    handle = ctypes.c_void_p(device.load(prepared.artifact)._function)
    parameters = ctypes.c_void_p(function._parameters.address)

    def bare() -> None:
        launch(handle, 1, 1, 1, 32, 1, 1, 0, None, parameters, None)

    bare()
    device.synchronize()
    results = {
        "bare_ctypes_us": microseconds(bare, device.synchronize, options.launches),
        "prepared_us": microseconds(prepared, device.synchronize, options.launches),
        "launch_us": microseconds(
            lambda: many_parameters.launch(device, grid=1, block=32, args=args), device.synchronize, max(3500, options.launches // 10)
        ),
    }
    results["prepared_over_bare"] = results["prepared_us"] / results["bare_ctypes_us"]
    if options.json:
        print(json.dumps(results))
    else:
        for name, value in results.items():
            print(f"{name:20} {value:8.2f}")
    device.close()


if __name__ == "__main__":
    main()
