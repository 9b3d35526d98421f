"""Many runs of a scenario under different seeds and schedules, their findings merged."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from epdsl_runtime.artifact import Artifact

from .collect import collect
from .diagnose import MOST_RUNS, RACES, Seen, diagnose
from .engine import Options, Tuning
from .findings import Finding, grouped, rank_of
from .layout import K_HASH
from .mutate import Identity
from .run import Run, run
from .strengthen import Repair

SCHEDULES = ("uniform", "pct", "starve")


@dataclass(frozen=True)
class Report:
    """What an exploration found.

    findings  merged over lanes and seeds, those seen most often first
    runs      how many runs were made
    steps     events of all of them
    launches  kernels launched in the last run
    """

    findings: tuple[Finding, ...]
    runs: int
    steps: int
    launches: int = 0
    hashes: tuple[int, ...] = field(default=(), repr=False)

    @property
    def ok(self) -> bool:
        return not self.findings

    def render(self) -> str:
        return "\n\n".join(f.render() for f in self.findings)


def check_once(
    main: Callable[..., Any],
    ranks: int,
    options: Options,
    name: str = "",
    tuning: Tuning | None = None,
    args: Sequence[Any] = (),
    replacements: Mapping[Identity, Artifact] | None = None,
) -> tuple[Run, list[Finding]]:
    """One run and its findings, not diagnosed."""
    made = run(main, ranks, options, tuning, args, replacements)
    found = collect(made.machine, made.failures, options.command(name) if name else "")
    made.machine.checker.release()
    return made, found


def explore(
    main: Callable[..., Any],
    ranks: int,
    seeds: Sequence[int] = range(20),
    options: Options | None = None,
    schedules: Sequence[str] = SCHEDULES,
    weak: Sequence[float] = (0.0,),
    name: str = "",
    args: Sequence[Any] = (),
    replacements: Mapping[Identity, Artifact] | None = None,
    explain: bool = True,
    stop_at_first: bool = False,
    progress: Callable[[], None] | None = None,
) -> Report:
    """Runs `main` once a seed; the seed also picks the schedule and the weak probability in turn.

    explain  also search the smallest repair of each finding, by replays
    """
    base = options or Options()
    kept: dict[Any, Finding] = {}
    shown_by: dict[Any, list[Seen]] = {}
    steps = launches = runs = 0
    hashes: list[int] = []
    for number, seed in enumerate(seeds):
        chosen = replace(base, seed=seed, schedule=schedules[number % len(schedules)], weak=weak[number // len(schedules) % len(weak)])
        made, found = check_once(main, ranks, chosen, name, None, args, replacements)
        runs += 1
        steps += made.steps
        launches = len(made.machine.checker.launches)
        hashes.append(int(made.machine.checker.words[K_HASH]))
        for finding in found:
            other = kept.get(finding.key)
            kept[finding.key] = finding if other is None else replace(other, seen=other.seen + 1, times=other.times + finding.times)
            runs_of = shown_by.setdefault(finding.key, [])
            if len(runs_of) < MOST_RUNS:
                runs_of.append(Seen(chosen, finding, made.machine.checker.sites))
        if progress is not None:
            progress()
        if found and stop_at_first:
            break

    def rerun(options: Options, tuning: Tuning) -> Run:
        again = run(main, ranks, options, tuning, args, replacements)
        again.machine.checker.release()
        return again

    findings: list[Finding] = []
    known: list[Sequence[Repair]] = []
    for key, finding in kept.items():
        if explain and finding.kind in RACES:
            finding = diagnose(finding, shown_by[key], rerun, known)
        findings.append(replace(finding, runs=runs))
    findings.sort(key=rank_of)
    return Report(tuple(grouped(findings)), runs, steps, launches, tuple(hashes))
