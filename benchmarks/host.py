"""What a user waits for on the host: importing, compiling, simulating. Each in a process of its own.

    python benchmarks/host.py [--json]

Prints seconds (the best of three runs, after one in which Python compiles the modules) and, for the simulator, the peak memory, beside
what is promised.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Callable
from typing import Any

from fresh_process import kept_bytecode, shown


def import_package() -> dict[str, float]:
    start = time.perf_counter()
    import epdsl  # noqa: F401

    return {"seconds": time.perf_counter() - start}


def compile_dispatch() -> dict[str, float]:
    """The fused dispatch kernel for sm_90 in a new process.

    Loading MLIR and LLVM counts; importing the kernel family is shown beside it.
    """
    begin = time.perf_counter()
    from epdsl.kernels.dispatch import EPDispatchKernel
    from epdsl.kernels.token_format import BF16TokenFormat

    kernel = EPDispatchKernel(
        num_threads=1024,
        n_sms=132,
        n_experts=256,
        n_ranks=8,
        max_tokens_per_rank=128,
        p2p_world_size=8,
        token_fmt_type=BF16TokenFormat(hid_dim=7168, top_k=8),
        has_rank_flag=True,
        ep_ord_r=True,
    )
    start = time.perf_counter()
    kernel.dispatch.compile("sm_90")
    return {"seconds": time.perf_counter() - start, "import_seconds": start - begin}


def compile_family() -> dict[str, float]:
    """Every launch of an exchange for sm_90 in a new process: dispatch and combine of the base layer and of the three modes."""
    begin = time.perf_counter()
    from compile_time import family

    from epdsl.kernel_object import compile_all

    kernels = list(family().values())
    start = time.perf_counter()
    list(compile_all(kernels, ["sm_90"]))
    return {"seconds": time.perf_counter() - start, "import_seconds": start - begin}


def simulate() -> dict[str, float]:
    """Dispatch and combine of 8 ranks, 8 blocks x 256 threads a rank, once; compiling, references and checks are not counted."""
    from epdsl_runtime.spawn import spawn

    from epdsl import demo

    config = demo.RunConfig(ranks=8, tokens=128, hidden=1024, experts=64, topk=8, launches=2)
    results = spawn(demo.run_rank, 8, device="sim", args=(config,))
    assert not any(result.problems for result in results)
    # The second launch: the first one's time has the compiling in it.
    seconds = max(result.dispatch_us[1] for result in results) + max(result.combine_us[1] for result in results)
    return {"seconds": seconds / 1e6, "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


CASES: dict[str, tuple[Callable[[], dict[str, float]], float]] = {
    "import epdsl": (import_package, 0.1),
    "compile dispatch, cold": (compile_dispatch, 1.0),
    "compile the family, cold": (compile_family, 3.0),
    "simulate dispatch and combine": (simulate, 5.0),
}


def measure(name: str, environment: dict[str, str]) -> dict[str, Any]:
    runs = [shown(environment, __file__, ["--case", name])[0] for _ in range(4)][1:]
    return {"case": name, "promised_seconds": CASES[name][1], **min(runs, key=lambda run: run["seconds"])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.case:
        print(json.dumps(CASES[options.case][0]()))
        return
    with kept_bytecode() as environment:
        rows = [measure(name, environment) for name in CASES]
    if options.json:
        print(json.dumps(rows, indent=1))
        return
    for row in rows:
        imports = f"  and {row['import_seconds']:.3f} s to import the kernel family" if "import_seconds" in row else ""
        memory = f"  {row['peak_mb']:.0f} MB" if "peak_mb" in row else ""
        print(f"{row['case']:32} {row['seconds']:7.3f} s  promised {row['promised_seconds']:.1f} s{imports}{memory}")


if __name__ == "__main__":
    main()
