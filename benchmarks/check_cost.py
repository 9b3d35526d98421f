"""What a checked run costs, against the number of GPU threads it simulates: dispatch and combine on four ranks, two launches.

    python benchmarks/check_cost.py [--plot docs/check_cost.png]

Tokens grow with the blocks, so that each thread has the same work. The table's last column divides the time by n log2 n; a cost that
grows no faster than n log n keeps it level. matplotlib draws the plot (`pip install matplotlib`).
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import time
from typing import Any

from epdsl.check.engine import Options
from epdsl.check.explore import check_once
from epdsl.demo import RunConfig, run_rank

RANKS, THREADS = 4, 128
BLOCKS = (2, 4, 8, 16)
TOKENS_A_BLOCK = 8


def measure(blocks: int, seeds: int) -> dict[str, Any]:
    """Median CPU seconds of a seed (the simulator runs on one host thread) with `blocks` blocks a rank, after one run that compiles."""
    config = RunConfig(
        ranks=RANKS, tokens=TOKENS_A_BLOCK * blocks, hidden=256, experts=16, topk=8, launches=2, blocks=blocks, threads=THREADS
    )
    seconds: list[float] = []
    events = used = 0
    for seed in range(seeds + 1):
        started = time.process_time()
        made, found = check_once(lambda rank: run_rank(rank, config), RANKS, Options(seed=seed))
        seconds.append(time.process_time() - started)
        assert not found and not made.failures, (found, made.failures)
        events, used = made.steps, made.machine.checker.used_bytes
    n = RANKS * blocks * THREADS
    middle = sorted(seconds[1:])[seeds // 2]
    return {
        "threads": n,
        "tokens": config.tokens,
        "seconds": middle,
        "events": events,
        "shadow_mib": used / 2**20,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10,
        "ns_an_event": middle / events * 1e9,
        "relative": middle / (n * math.log2(n)),
    }


def plot(rows: list[dict[str, Any]], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    n = [r["threads"] for r in rows]
    seconds = [r["seconds"] for r in rows]
    scale = seconds[0] / (n[0] * math.log2(n[0]))
    figure, axes = pyplot.subplots(figsize=(6, 4))
    axes.loglog(n, seconds, "o-", base=2, label="checked run, two launches")
    axes.loglog(n, [scale * v * math.log2(v) for v in n], "--", base=2, label="n log n")
    axes.set_xlabel("GPU threads in a launch (4 ranks)")
    axes.set_ylabel("CPU seconds a seed")
    axes.set_title("Cost of a checked dispatch + combine")
    axes.grid(True, which="both", alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--plot", default="", help="write a PNG there")
    parser.add_argument("--json", default="", help="write the numbers there")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for blocks in BLOCKS:
        row = measure(blocks, arguments.seeds)
        rows.append(row)
        print(
            f"{row['threads']:6} threads {row['tokens']:4} tokens a rank: {row['seconds']:7.2f} s, {row['events']:>11,} events, "
            f"{row['ns_an_event']:5.0f} ns each, shadow {row['shadow_mib']:5.0f} MiB, peak {row['peak_mib']:5.0f} MiB, "
            f"{row['relative'] * 1e6:6.2f} us / (n log2 n)",
            flush=True,
        )
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(rows, file, indent=1)
    if arguments.plot:
        plot(rows, arguments.plot)


if __name__ == "__main__":
    main()
