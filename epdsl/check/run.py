"""One checked run of a scenario: every rank's host code and all its kernels, under one seed."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from epdsl_runtime.artifact import Artifact
from epdsl_runtime.bootstrap import RankFailed, ThreadHub
from epdsl_runtime.faults import KernelFault
from epdsl_runtime.rank import Rank
from epdsl_runtime.sim_engine import Deadlock

from . import layout as check
from .engine import Options, Tuning
from .machine import CheckedBootstrap, CheckedMachine
from .mutate import Identity

_JOIN_SECONDS = 600.0


@dataclass
class Run:
    """What one run left.

    machine   with the engine's findings
    failures  (rank, exception, traceback) of ranks that failed, the cause first
    """

    machine: CheckedMachine
    options: Options
    results: list[Any]
    failures: list[tuple[int, BaseException, str]] = field(default_factory=list[tuple[int, BaseException, str]])

    @property
    def steps(self) -> int:
        return int(self.machine.checker.words[check.K_STEPS])


# The machine a rank's thread belongs to, so that `control_words` finds it.
current: dict[int, CheckedMachine] = {}


def run(
    main: Callable[..., Any],
    ranks: int,
    options: Options,
    tuning: Tuning | None = None,
    args: Sequence[Any] = (),
    replacements: Mapping[Identity, Artifact] | None = None,
) -> Run:
    """Runs `main(rank, *args)` on every rank of a checked machine. Findings are in the machine; nothing is raised for them."""
    machine = CheckedMachine(ranks, options, tuning, replacements)
    hub = ThreadHub(ranks)
    made = Run(machine, options, [None] * ranks)

    def body(index: int) -> None:
        failure: BaseException | None = None
        current[threading.get_ident()] = machine
        try:
            rank = Rank(index, ranks, machine.device(index), CheckedBootstrap(hub, index, machine))
            made.results[index] = main(rank, *args)
            rank.close()
        except BaseException as error:
            failure = error
            text = traceback.format_exc()
            made.failures.append((index, error, text))
            hub.abort(index, text)
        finally:
            current.pop(threading.get_ident(), None)
            machine.rank_done(index, failure)

    threads = [threading.Thread(target=body, args=(index,), name=f"epdsl-check-{index}", daemon=True) for index in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_JOIN_SECONDS)
        if thread.is_alive():
            raise TimeoutError(f"{thread.name} did not end within {_JOIN_SECONDS:g} s")
    made.failures.sort(key=lambda f: isinstance(f[1], RankFailed))
    machine.checker.check_memory()
    return made


def expected(error: BaseException) -> bool:
    """Whether a rank's failure is only the consequence of a finding that says more."""
    return isinstance(error, (RankFailed, Deadlock, KernelFault))
