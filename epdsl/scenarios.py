"""`@ep.scenario`: a function of one rank that `epdsl check` and pytest can run."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Scenario:
    """A program for every rank of a job: `function(rank)` runs kernels, several launches over the same buffers.

    ranks     ranks of the job
    num_sms   multiprocessors of each simulated device, None for its model's own: few of them show grids that cannot be resident
    """

    function: Callable[..., Any]
    ranks: int
    num_sms: int | None = None

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise ValueError(f"a scenario has at least 1 rank, got ranks={self.ranks}")

    def __call__(self, rank: Any, *args: Any) -> Any:
        return self.function(rank, *args)

    @property
    def name(self) -> str:
        return self.function.__name__

    @property
    def file(self) -> str:
        return self.function.__code__.co_filename


def scenario(function: None = None, /, *, ranks: int | None = None, num_sms: int | None = None) -> Callable[[Callable[..., Any]], Scenario]:
    """Marks a function of one rank: `@ep.scenario(ranks=2)`. It can also be given to `ep.spawn`. Raises TypeError without `ranks`."""
    if function is not None or ranks is None:
        raise TypeError("a scenario says how many ranks it is for; write @ep.scenario(ranks=2)")
    return lambda function: Scenario(function, ranks, num_sms)


def control_words(array: Any, rest: int = 0, name: str = "") -> None:
    """Says that every word of `array` is to hold `rest` when a kernel of its device has ended. A checked run reports one that does not.

    array  integers that kernels of their own device alone change; a word that peers store to may not rest when a peer is ahead
    name   what findings call it; otherwise that of its buffer

    Does nothing in other runs.
    """
    runs = sys.modules.get("epdsl.check.run")
    machine = None if runs is None else runs.current.get(threading.get_ident())
    if machine is not None:
        machine.declare(array.device.info.index, array.address, array.nbytes, array.element.nbytes, rest, name)
