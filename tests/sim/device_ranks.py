"""How many ranks a test can have on the device of the run."""

from __future__ import annotations

from epdsl_runtime.devices import most_ranks, parse_spec


def ranks_on(device_name: str, wanted: int) -> int:
    """`wanted`, or as many as there are GPUs."""
    most = most_ranks(parse_spec(device_name))
    return wanted if most is None else min(wanted, most)
