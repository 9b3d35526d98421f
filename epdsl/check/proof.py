"""The mutation proof of several scenarios together, on several processes.

A mutant is tried in the scenarios that contain it, in their order, until one shows a finding. Which process does so, and how many
there are, changes nothing in the result.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import Any

from epdsl.scenarios import Scenario

from . import code
from .engine import Options
from .mutants import Baseline, Verdict, baseline

# Mutants of one scenario that a process takes at a time: it compiles the scenario's kernels once for all of them.
_AT_ONCE = 8

Key = tuple[str, str]
Load = Callable[[], list[tuple[str, Scenario]]]


@dataclass
class _Worker:
    """What a process knows: the scenarios, and those it has run."""

    scenarios: list[tuple[str, Scenario]]
    options: Options
    seeds: Sequence[int]
    known: dict[int, Baseline] = field(default_factory=dict[int, Baseline])

    def baseline(self, index: int) -> Baseline:
        found = self.known.get(index)
        if found is None:
            name, scenario = self.scenarios[index]
            options = self.options if self.options.num_sms is not None else replace(self.options, num_sms=scenario.num_sms)
            found = self.known[index] = baseline(scenario.function, scenario.ranks, options, name)
        return found


_worker: _Worker | None = None


def _start(load: Load, options: Options, seeds: Sequence[int]) -> None:
    global _worker
    _worker = _Worker(load(), options, seeds)


def _survey(index: int) -> list[Key]:
    assert _worker is not None
    return list(_worker.baseline(index).mutants)


def _judge(index: int, keys: Sequence[Key]) -> list[Verdict]:
    assert _worker is not None
    known = _worker.baseline(index)
    return [known.judge(key, _worker.seeds) for key in keys]


class _Inline(Executor):
    """One job needs no other process."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


class Proof:
    """A context in which the mutants of scenarios are known and can be judged.

    load     returns the scenarios with their names; called in every process
    seeds    of each mutant's runs in a scenario
    mutants  every mutant's key and the scenarios that contain it, by their places in `load()`; in order of appearance
    Raises ValueError on entering when a scenario is not clean as it is.
    """

    def __init__(self, load: Load, options: Options, seeds: Sequence[int], jobs: int = 1) -> None:
        self.seeds = seeds
        self.jobs = jobs
        self.names = [name for name, _ in load()]
        self.mutants: dict[Key, list[int]] = {}
        # Made here once, and not by every process at the same time.
        code.functions()
        arguments = (load, options, seeds)
        if jobs == 1:
            self._pool: Executor = _Inline()
            _start(*arguments)
        else:
            self._pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _start, arguments)

    def __enter__(self) -> Proof:
        try:
            for index, keys in enumerate(self._pool.map(_survey, range(len(self.names)))):
                for key in keys:
                    self.mutants.setdefault(key, []).append(index)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def run(self, done: Callable[[dict[str, Any]], None] = lambda row: None) -> list[dict[str, Any]]:
        """Judges every mutant. A row each, in order of appearance: kernel, change, caught, scenario, finding, runs.

        scenario  the first that shows the finding, "" for a mutant that none does
        done      is given each row when it is known, in any order
        """
        waiting: dict[int, list[Key]] = {}
        untried = {key: list(indices) for key, indices in self.mutants.items()}
        runs = dict.fromkeys(self.mutants, 0)
        rows: dict[Key, dict[str, Any]] = {}
        running: dict[Future[list[Verdict]], tuple[int, list[Key]]] = {}

        def queue(key: Key) -> None:
            waiting.setdefault(untried[key].pop(0), []).append(key)

        def settle(key: Key, index: int, verdict: Verdict) -> None:
            runs[key] += verdict.runs
            if not verdict.caught and untried[key]:
                queue(key)
                return
            scenario = self.names[index] if verdict.caught else ""
            kernel, change = key
            rows[key] = {
                "kernel": kernel,
                "change": change,
                "caught": verdict.caught,
                "scenario": scenario,
                "finding": verdict.finding,
                "runs": runs[key],
            }
            done(rows[key])

        for key in self.mutants:
            queue(key)
        while waiting or running:
            while waiting and len(running) < self.jobs:
                # The scenario with most to do, so that its processes stay with it.
                index = max(waiting, key=lambda i: len(waiting[i]))
                count = min(_AT_ONCE, -(-sum(map(len, waiting.values())) // self.jobs))
                keys, rest = waiting[index][:count], waiting[index][count:]
                if rest:
                    waiting[index] = rest
                else:
                    del waiting[index]
                running[self._pool.submit(_judge, index, keys)] = (index, keys)
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                index, keys = running.pop(future)
                for key, verdict in zip(keys, future.result(), strict=True):
                    settle(key, index, verdict)
        return [rows[key] for key in self.mutants]
