"""How many blocks a mode's launches take, and how many of them send: measured where this device was measured, else by a rule.

A table is a JSON document that `epdsl bench --tune` writes: the device's name, what was measured with, and rows of

    mode                        "latency", "throughput" or "expert-major"
    format                      "bf16" or "fp8"
    tokens                      max_tokens_per_rank of the layer that was measured
    blocks                      blocks of a launch that were best
    send_blocks                 of them, those that send in the dispatch and in the combine; 0: no such role, or counted by the kernel
    dispatch_us, combine_us     what that took; null where the phase was not measured

A layer takes the row of its mode and format with the fewest tokens that are not fewer than its own, or else the row with the most. Tables
are looked for by the device's name: first in EPDSL_TUNED_DIR, then among the shipped ones. Without a table, or without a row of the mode
and format, a launch takes all multiprocessors (the latency mode at most one block a token) and `RULES` says how many of them send.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from epdsl.env import TUNED_DIR

if TYPE_CHECKING:
    from epdsl_runtime.protocol import DeviceInfo

Mode = Literal["latency", "throughput", "expert-major"]
MODES: tuple[Mode, ...] = ("latency", "throughput", "expert-major")
FORMATS = ("bf16", "fp8")
SHIPPED = Path(__file__).parent / "tuned"
SIMULATED_LATENCY_BLOCKS = 8

# Of the blocks of a launch, the share that sends in the dispatch and in the combine; 0: the phase has no such role.
RULES: dict[tuple[Mode, str], tuple[float, float]] = {
    ("latency", "bf16"): (0.0, 0.0),
    ("latency", "fp8"): (0.0, 0.0),
    ("throughput", "bf16"): (0.0, 0.54),
    ("throughput", "fp8"): (0.0, 0.54),
    ("expert-major", "bf16"): (0.65, 0.42),
    ("expert-major", "fp8"): (0.79, 0.42),
}


@dataclass(frozen=True)
class Tuned:
    """A row of a table."""

    mode: Mode
    format: str
    tokens: int
    blocks: int
    send_blocks: tuple[int, int]
    dispatch_us: float | None = None
    combine_us: float | None = None


@dataclass(frozen=True)
class Budget:
    """Blocks of a launch, and those of them that send in the dispatch and in the combine (0: no such role)."""

    n_blocks: int
    send_blocks: tuple[int, int]


def budget(info: DeviceInfo, mode: Mode, fp8: bool, tokens: int, n_blocks: int | None = None) -> Budget:
    """What a layer of `mode` for at most `tokens` a rank takes of a device; n_blocks: the caller's own choice of blocks.

    Raises ValueError for a table that is not well formed.
    """
    kind = FORMATS[fp8]
    rows = [row for row in table(info.name, TUNED_DIR.get()) if (row.mode, row.format) == (mode, kind)]
    shares = RULES[mode, kind]
    blocks = info.num_sms
    if info.kind == "sim" and mode == "latency":
        blocks = SIMULATED_LATENCY_BLOCKS
    if rows:
        row = next((row for row in rows if row.tokens >= tokens), rows[-1])
        blocks = min(row.blocks, info.num_sms)
        shares = (row.send_blocks[0] / row.blocks, row.send_blocks[1] / row.blocks)
    if mode == "latency":
        # A block without a token only waits.
        blocks = min(blocks, tokens)
    chosen = n_blocks or blocks
    return Budget(chosen, (sending(shares[0], chosen), sending(shares[1], chosen)))


def sending(share: float, n_blocks: int) -> int:
    """A share of blocks as a number that leaves at least one block to each role; 0 for no share."""
    return 0 if share == 0 else max(1, min(n_blocks - 1, round(share * n_blocks)))


def file_name(device: str) -> str:
    """A device's table is this file: `NVIDIA H200` has nvidia_h200.json."""
    return "".join(c if c.isalnum() else "_" for c in device.lower()) + ".json"


@functools.cache
def table(device: str, directory: str) -> tuple[Tuned, ...]:
    """The rows for a device, in order of tokens; none where nothing was measured. Raises ValueError for a table that is not well formed."""
    for path in (Path(directory) / file_name(device), SHIPPED / file_name(device)):
        if path.is_file():
            return read_table(path, device)
    return ()


def read_table(path: Path, device: str) -> tuple[Tuned, ...]:
    """The rows of a file. Raises ValueError, naming file and row, for what is no table of this device."""
    remedy = "make it again with epdsl bench --tune, or remove it"
    try:
        document = json.loads(path.read_text())
        named, rows = document["device"], document["rows"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no table of block counts ({type(error).__name__}: {error}); {remedy}") from None
    if named != device:
        raise ValueError(f"{path} is the table of {named!r}, this device is {device!r}; {remedy}")
    return tuple(sorted((_row(path, number, row, remedy) for number, row in enumerate(rows)), key=lambda row: row.tokens))


def _row(path: Path, number: int, row: Any, remedy: str) -> Tuned:
    try:
        found = Tuned(**{**row, "send_blocks": tuple(row["send_blocks"])})
        if _fits(found):
            return found
    except (KeyError, TypeError):
        pass
    raise ValueError(f"{path}: row {number} is {row}; it needs mode, format, tokens, blocks and send_blocks that fit them; {remedy}")


def _fits(row: Tuned) -> bool:
    shares = RULES.get((row.mode, row.format))
    if shares is None or len(row.send_blocks) != 2 or not all(type(n) is int for n in (row.tokens, row.blocks, *row.send_blocks)):
        return False
    roles = all(0 < n < row.blocks if share else n == 0 for n, share in zip(row.send_blocks, shares, strict=True))
    return roles and row.tokens >= 1 and row.blocks >= 1


def document(device: str, about: dict[str, Any], rows: list[Tuned]) -> dict[str, Any]:
    """A table as `read_table` reads it. about: driver, date, and what was measured with."""
    return {"device": device, **about, "rows": [{**vars(row), "send_blocks": list(row.send_blocks)} for row in rows]}
