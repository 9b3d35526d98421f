"""Where compiling the kernel family goes: processor seconds of every kernel by stage, then seconds to have all of it, cold and warm.

    python benchmarks/compile_time.py [--target sm_90] [--json]

Every run is a process of its own with an empty cache; the best of three counts. "build" is the kernel interpreted and checked, "passes"
ends with LLVM IR, "optimise" and "emit" are LLVM's. The first kernel carries what is loaded once: MLIR and LLVM. In "first ever" Python
also compiles the modules it imports, which an installer does beforehand.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from typing import Any

from epdsl.ir.steps import PASSES, Watch
from epdsl.kernel_object import Kernel, compile_all

COLUMNS: tuple[str, ...] = ("build", "passes", "optimise", "emit")
_COLUMN = {"ep": "build", PASSES: "passes", "llvm": "passes", "llvm-opt": "optimise", "asm": "emit", "binary": "emit"}


def family() -> dict[str, Kernel]:
    """Every launch of an exchange for one configuration: dispatch and combine of the base layer and of the three modes."""
    from epdsl.kernels.expert_major import ExpertMajorExchange
    from epdsl.kernels.low_latency import LowLatencyExchange
    from epdsl.kernels.throughput import ThroughputExchange
    from epdsl.moe_config import MoEConfig

    base = MoEConfig(hidden=7168, n_experts=256, top_k=8, max_tokens_per_rank=128, n_ranks=2, num_threads=1024, n_sms=132)
    modes = {
        "expert-major": ExpertMajorExchange(7168, 256, 2, 8, 4096, 132),
        "low-latency": LowLatencyExchange(7168, 256, 2, 8, 128, 128, 896),
        "throughput": ThroughputExchange(7168, 256, 2, 8, 4096, 132, send_blocks=71),
    }
    found: dict[str, Kernel] = {"base dispatch": base.dispatch_kernel.dispatch, "base combine": base.combine_kernel.combine}
    for name, mode in modes.items():
        found |= {f"{name} dispatch": mode.dispatch, f"{name} combine": mode.combine}
    return found


class Stages(Watch):
    """Adds up the processor seconds of this thread between the beginnings of stages."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(COLUMNS, 0.0)
        self._column = ""
        self._since = 0.0

    def begin(self, stage: str) -> None:
        self.finish()
        super().begin(stage)
        self._column = _COLUMN[stage.partition("/")[0]]

    def finish(self) -> None:
        now = time.thread_time()
        if self._column:
            self.seconds[self._column] += now - self._since
        self._since = now


def by_stage(target: str) -> dict[str, dict[str, float]]:
    """Kernel by kernel, nothing kept."""
    from epdsl.compiler import compile_kernel

    found: dict[str, dict[str, float]] = {}
    for name, kernel in family().items():
        stages = Stages()
        compile_kernel(kernel.request(target), watch=stages)
        stages.finish()
        found[name] = stages.seconds
    return found


def whole(target: str, together: bool) -> dict[str, float]:
    """All of the family, at once as `compile_all` does it or one kernel after the other."""
    kernels = list(family().values())
    start = time.perf_counter(), time.process_time()
    if together:
        list(compile_all(kernels, [target]))
    else:
        for kernel in kernels:
            kernel.compile(target)
    return {"seconds": time.perf_counter() - start[0], "processor_seconds": time.process_time() - start[1]}


def main() -> None:
    from fresh_process import kept_bytecode, shown

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="sm_90")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--case", choices=("stages", "together", "apart"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        stages = options.case == "stages"
        print(json.dumps(by_stage(options.target) if stages else whole(options.target, options.case == "together")))
        return
    with kept_bytecode() as environment:

        def measured(case: str, runs: int = 1) -> list[dict[str, Any]]:
            return shown(environment, __file__, ["--case", case, "--target", options.target], runs)

        first = measured("together")
        runs = [measured("stages")[0] for _ in range(3)]
        apart = [measured("apart")[0] for _ in range(3)]
        pairs = [measured("together", 2) for _ in range(3)]
    table = {name: {column: min(run[name][column] for run in runs) for column in COLUMNS} for name in runs[0]}
    together, warm = zip(*pairs, strict=True)
    lists = {"first ever, together": first, "cold, one by one": apart, "cold, together": together, "warm": warm}
    found = {name: min(each, key=lambda run: run["seconds"]) for name, each in lists.items()}
    if options.json:
        print(json.dumps({"target": options.target, "stages": table, "family": found}, indent=1))
        return
    print(f"{options.target:24}" + "".join(f"{column:>10}" for column in (*COLUMNS, "all")))
    for name, row in {**table, "sum": {column: sum(row[column] for row in table.values()) for column in COLUMNS}}.items():
        print(f"{name:24}" + "".join(f"{seconds:10.3f}" for seconds in (*row.values(), sum(row.values()))))
    for name, run in found.items():
        print(f"{name:24}{run['seconds']:10.3f} s  {run['processor_seconds']:.3f} s of processor, {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
