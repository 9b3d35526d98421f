"""Choosing block counts: what to try on a device, and which of it to keep."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from .bench_modes import Case
from .sm_budget import FORMATS, MODES, RULES, Mode, Tuned, sending

# Fewer blocks are kept when they take at most this much longer than the best.
TOLERANCE = 1.02
LATENCY_TOKENS = (1, 32, 128, 256)
THROUGHPUT_TOKENS = (4096,)
# Shares of the multiprocessors that a launch takes, and of its blocks that send: (in the dispatch, in the combine).
_LAUNCH_SHARES = {"throughput": (1.0, 0.75, 0.5), "expert-major": (1.0, 0.75)}
_SEND_SHARES = {
    ("throughput", "bf16"): ((0.0, 0.46), (0.0, 0.54), (0.0, 0.62)),
    ("throughput", "fp8"): ((0.0, 0.54),),
    ("expert-major", "bf16"): ((0.58, 0.34), (0.65, 0.42), (0.72, 0.5)),
    ("expert-major", "fp8"): ((0.71, 0.42), (0.79, 0.42), (0.86, 0.42)),
}


def candidates(num_sms: int, modes: Sequence[Mode] = MODES, tokens: Sequence[int] = ()) -> Iterator[Case]:
    """What to measure on a device of so many multiprocessors; tokens: instead of each mode's own."""
    for mode in modes:
        for count in tokens or (LATENCY_TOKENS if mode == "latency" else THROUGHPUT_TOKENS):
            for kind in FORMATS:
                fp8 = kind == "fp8"
                if mode == "latency":
                    for blocks in sorted({min(num_sms, count), max(1, min(num_sms, count) // 2), min(count, max(1, num_sms - 4))}):
                        yield Case(mode, count, fp8, blocks)
                    continue
                for share in _LAUNCH_SHARES[mode]:
                    blocks = max(2, round(share * num_sms))
                    for dispatch, combine in _SEND_SHARES[mode, kind]:
                        yield Case(mode, count, fp8, blocks, (sending(dispatch, blocks), sending(combine, blocks)))


def choose(rows: Sequence[dict[str, Any]]) -> list[Tuned]:
    """The best of what `bench_modes.time_cases` measured, a row for each mode, format and number of tokens.

    Dispatch and combine of a layer share their blocks, so what counts is the sum of the two, each with the senders that are best for it. A
    combine is bf16 whatever the dispatch carries: where one format measured none, the other's stands for it.
    """
    best: dict[tuple[str, str, int], dict[int, dict[str, dict[str, Any]]]] = {}
    for row in rows:
        if "mode" not in row:
            continue
        phases = best.setdefault((row["mode"], row["case_format"], row["tokens"]), {}).setdefault(row["blocks"], {})
        if row["phase"] not in phases or row["less_empty"] < phases[row["phase"]]["less_empty"]:
            phases[row["phase"]] = row
    return [_chosen(mode, kind, tokens, found, best) for (mode, kind, tokens), found in sorted(best.items(), key=lambda item: str(item[0]))]


def _chosen(mode: Any, kind: str, tokens: int, found: dict[int, Any], best: dict[tuple[str, str, int], Any]) -> Tuned:
    took = {blocks: sum(row["less_empty"] for row in phases.values()) for blocks, phases in found.items()}
    least = min(took.values())
    blocks = min(number for number, time in took.items() if time <= TOLERANCE * least)
    phases = found[blocks]
    other = best.get((mode, FORMATS[kind == "bf16"], tokens), {}).get(blocks, {})
    combine = phases.get("combine") or other.get("combine")
    sends = combine["send_blocks"] if combine else sending(RULES[mode, kind][1], blocks)
    return Tuned(
        mode,
        kind,
        tokens,
        blocks,
        (phases["dispatch"]["send_blocks"], sends),
        round(phases["dispatch"]["less_empty"], 2),
        round(phases["combine"]["less_empty"], 2) if "combine" in phases else None,
    )
