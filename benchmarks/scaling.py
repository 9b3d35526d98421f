"""What an exchange costs at more ranks of one NVLink domain: computed from the kernels' own layouts and from what the layers allocate.

    python benchmarks/scaling.py [--ranks 2,4,8,16,32,72] [--tokens N] [--json]

For each mode and number of ranks: bytes of each direction of a rank's link, release stores to other ranks' flags, flags of others that a
rank waits for, memory that peers write, and memory of the rank's own. Uniform routing, hidden 7168, top-8 of 256 experts, or of as
many more as make them divide. A configuration that a mode refuses is a row with its reason. Nothing is launched.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from epdsl_runtime.dtypes import element
from epdsl_runtime.protocol import DeviceInfo

from epdsl.moe_expert_major import ExpertMajorMoE
from epdsl.moe_low_latency import LowLatencyMoE
from epdsl.moe_throughput import ThroughputMoE

HIDDEN, EXPERTS, TOP_K = 7168, 256, 8
LATENCY_TOKENS, THROUGHPUT_TOKENS = 128, 4096
H200 = DeviceInfo("cuda", 0, "NVIDIA H200", "sm_90", "nvidia", 32, 132, 1024, 232448, 150 << 30)


class Ledger:
    """Stands for a rank: a layer that is made with it allocates nothing, and what it asked for is counted, in bytes."""

    def __init__(self, size: int) -> None:
        self.index, self.size = 0, size
        self.device = type("Device", (), {"info": H200})()
        self.shared_bytes = self.own_bytes = 0

    def symmetric(self, dtype: Any, shape: int | Sequence[int], *name_and_writer: Any, **named: Any) -> None:
        self.shared_bytes += nbytes(dtype, shape)

    def empty(self, dtype: Any, shape: int | Sequence[int]) -> None:
        self.own_bytes += nbytes(dtype, shape)

    zeros = empty

    def agree(self, what: str, values: Mapping[str, Any]) -> None:
        """A rank alone agrees with itself."""

    @contextmanager
    def all_or_none(self) -> Iterator[None]:
        yield


def nbytes(dtype: Any, shape: int | Sequence[int]) -> int:
    return math.prod((shape,) if isinstance(shape, (int, np.integer)) else shape) * element(dtype).nbytes


@dataclass(frozen=True)
class Cost:
    """One direction of an exchange for one rank.

    link_bytes    payload and headers sent to other ranks, on average; as many arrive
    releases      flags that a launch stores at other ranks, each behind a release
    polled        flags of other ranks that a launch waits for, by `pollers`
    shared_bytes  memory of a rank that its peers write, for dispatch and combine, both banks
    own_bytes     memory for what a dispatch returns and for counters, of the rank alone
    """

    mode: str
    phase: str
    ranks: int
    tokens: int
    link_bytes: int
    releases: int
    polled: int
    pollers: str
    shared_bytes: int
    own_bytes: int


def experts_for(ranks: int) -> int:
    """The fewest experts, at least EXPERTS, that divide among the ranks."""
    return -(-EXPERTS // ranks) * ranks


def remote_ranks(ranks: int, experts: int, top_k: int = TOP_K) -> float:
    """Other ranks that a token goes to, on average: its experts are top_k different ones of `experts`, all equally likely."""
    misses = math.comb(experts - experts // ranks, top_k) / math.comb(experts, top_k)
    return (ranks - 1) * (1 - misses)


def made(kind: Callable[..., Any], ranks: int, tokens: int, **options: Any) -> tuple[Any, Ledger, float]:
    """A layer's kernels, what it allocates, and the rows that a rank sends, on average. Raises ValueError for what the mode refuses."""
    ledger = Ledger(ranks)
    layer = kind(ledger, hidden=HIDDEN, n_experts=experts_for(ranks), top_k=TOP_K, max_tokens_per_rank=tokens, **options)
    return layer.kernel, ledger, tokens * remote_ranks(ranks, layer.kernel.n_experts)


def latency(ranks: int, tokens: int = LATENCY_TOKENS) -> list[Cost]:
    """e4m3 out, bf16 back; a flag for each (block, peer), waited for by the block of that number."""
    k, ledger, rows = made(LowLatencyMoE, ranks, tokens, protocol="flags")
    headers = (ranks - 1) * (tokens * k.header_words + k.n_local_experts) * 4
    flags = k.n_blocks * (ranks - 1)
    rest = (flags, flags, f"{ranks} threads of each block", ledger.shared_bytes, ledger.own_bytes)
    return [
        Cost("latency", "dispatch FP8", ranks, tokens, round(rows * 4 * k.payload_words + headers), *rest),
        Cost("latency", "combine BF16", ranks, tokens, round(rows * 2 * k.hidden), *rest),
    ]


def throughput(ranks: int, tokens: int = THROUGHPUT_TOKENS) -> list[Cost]:
    """bf16, rows once a rank; the dispatch has a flag for each (block, rank), the combine one for each row."""
    k, ledger, rows = made(ThroughputMoE, ranks, tokens)
    # Beside its payload a row has its selections, their weights and its token's number.
    row = k.payload_bytes + 8 * k.top_k + 4
    flags, memory = k.n_blocks * (ranks - 1), (ledger.shared_bytes, ledger.own_bytes)
    return [
        Cost("throughput", "dispatch BF16", ranks, tokens, round(rows * row), flags, flags, "block 0", *memory),
        Cost("throughput", "combine BF16", ranks, tokens, round(rows * 2 * k.hidden), round(rows), round(rows), "a thread a row", *memory),
    ]


def expert_major(ranks: int, tokens: int = THROUGHPUT_TOKENS) -> list[Cost]:
    """e4m3 out, bf16 back. Every token's header and flag go to every rank, also where the token does not."""
    k, ledger, rows = made(ExpertMajorMoE, ranks, tokens)
    headers, flags = (ranks - 1) * tokens * 8 * k.top_k, (ranks - 1) * tokens
    memory = (ledger.shared_bytes, ledger.own_bytes)
    sent = round(rows * 4 * k.payload_words + headers)
    return [
        Cost("expert-major", "dispatch FP8", ranks, tokens, sent, flags, flags, "a warp a token", *memory),
        Cost(
            "expert-major", "combine BF16", ranks, tokens, round(rows * 2 * k.hidden), round(rows), round(rows), "a thread a row", *memory
        ),
    ]


MODES: dict[str, Callable[..., list[Cost]]] = {"latency": latency, "throughput": throughput, "expert-major": expert_major}


def table(ranks: Sequence[int], tokens: int | None = None) -> list[dict[str, Any]]:
    """A row for each mode, phase and number of ranks; of a configuration that is refused one row with the reason."""
    rows: list[dict[str, Any]] = []
    for mode, costs in MODES.items():
        for n in ranks:
            try:
                rows += [asdict(cost) for cost in (costs(n) if tokens is None else costs(n, tokens))]
            except ValueError as error:
                rows.append({"mode": mode, "ranks": n, "refused": str(error)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4,8,16,32,72")
    parser.add_argument("--tokens", type=int, help="of each rank; by default 128 for the latency mode and 4096 for the others")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = table([int(part) for part in options.ranks.split(",")], options.tokens)
    if options.json:
        print(json.dumps(rows, indent=1))
        return
    print("| mode | ranks | phase | link MB | flags sent | flags polled | by | MB peers write | MB own |")
    print("|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        if "refused" in row:
            print(f"| {row['mode']} | {row['ranks']} | refused: {row['refused']} | | | | | | |")
            continue
        print(
            f"| {row['mode']} | {row['ranks']} | {row['phase']}, {row['tokens']} tokens | {row['link_bytes'] / 1e6:.1f} "
            f"| {row['releases']:,} | {row['polled']:,} | {row['pollers']} "
            f"| {row['shared_bytes'] / 1e6:,.0f} | {row['own_bytes'] / 1e6:,.0f} |"
        )


if __name__ == "__main__":
    main()
