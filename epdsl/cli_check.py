"""`epdsl check`: runs scenarios under many seeds and reports races, wrong orders and scopes, deadlocks and bad accesses."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import ExitStack
from enum import StrEnum
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .cli_tools import Failure, Json, imported, progress_of

if TYPE_CHECKING:
    from .check.engine import Options
    from .scenarios import Scenario


class Model(StrEnum):
    ptx = "ptx"
    amdgpu = "amdgpu"


class Schedule(StrEnum):
    all = "all"
    uniform = "uniform"
    pct = "pct"
    starve = "starve"
    round = "round"


def load_scenarios(name: str) -> list[tuple[str, Scenario]]:
    """The scenarios of FILE.py, or the one FILE.py:NAME names, each with its full name.

    Raises Failure saying what is missing.
    """
    from .scenarios import Scenario

    file, _, wanted = name.partition(".py")
    file, wanted = f"{file}.py", wanted.removeprefix(":")
    path = Path(file)
    if not path.is_file():
        raise Failure(f"{file} is no file; write FILE.py or FILE.py:SCENARIO")
    found = {n: v for n, v in vars(imported(path)).items() if isinstance(v, Scenario)}
    if wanted:
        if wanted not in found:
            raise Failure(f"{file} has no scenario {wanted}; it has {', '.join(found) or 'none'} (mark one with @ep.scenario(ranks=2))")
        found = {wanted: found[wanted]}
    if not found:
        raise Failure(f"{file} has no scenario; mark a function of one rank with @ep.scenario(ranks=2)")
    return [(f"{file}:{n}", scenario) for n, scenario in found.items()]


def check(
    scenario: Annotated[str, typer.Argument(help="FILE.py or FILE.py:SCENARIO")],
    seeds: Annotated[int, typer.Option(min=1, help="How many runs, each with its own seed.")] = 20,
    seed: Annotated[int | None, typer.Option(min=0, help="Run this one seed only: replay a finding.")] = None,
    weak: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Probability that an atomic load reads an older value the model allows.")
    ] = 0.0,
    model: Annotated[Model | None, typer.Option(help="Memory model; by default the device vendor's.")] = None,
    sched: Annotated[Schedule, typer.Option(help="Schedule; all: uniform, pct and starve in turn.")] = Schedule.all,
    device: Annotated[str, typer.Option(help="sim:nvidia or sim:amd.")] = "sim:nvidia",
    num_sms: Annotated[
        int | None, typer.Option(min=1, help="Multiprocessors of each device; few show grids that are not resident.")
    ] = None,
    mutate: Annotated[bool, typer.Option("--mutate", help="Weaken one thing at a time and report which mutants are caught.")] = False,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes that judge mutants; by default one a core.")] = None,
    as_json: Json = False,
    sarif: Annotated[Path | None, typer.Option(help="Also write the findings there as SARIF 2.1.0.")] = None,
) -> None:
    """Check scenarios for races, orders and scopes, deadlocks and bad accesses. Needs no GPU.

    Exit status 1 when there is a finding (with --mutate: when a mutant is missed), 2 for a usage error.
    """
    from .check.engine import Options

    if device not in ("sim", "sim:nvidia", "sim:amd"):
        raise Failure(f"--device {device}: the checker runs on sim:nvidia or sim:amd")
    vendor = "amd" if device == "sim:amd" else "nvidia"
    chosen = model.value if model else "ptx" if vendor == "nvidia" else "amdgpu"
    scenarios = load_scenarios(scenario)
    base = Options(vendor=vendor, model=chosen, weak=weak, num_sms=num_sms)
    numbers = [seed] if seed is not None else list(range(seeds))
    if mutate:
        _mutate(partial(load_scenarios, scenario), base, numbers, jobs or len(os.sched_getaffinity(0)), as_json)
        return
    if jobs is not None:
        raise Failure(f"--jobs {jobs} is for --mutate; runs without it use one process")
    schedules = ("uniform", "pct", "starve") if sched is Schedule.all else (sched.value,)
    if sched is Schedule.all and seed is not None:
        schedules = (schedules[seed % len(schedules)],)
    reports: list[tuple[str, Any]] = []
    with progress_of("checking", len(scenarios) * len(numbers)) as progress:
        for name, each in scenarios:
            reports.append((name, _explore(name, each, base, numbers, schedules, _stepper(progress))))
    findings = [finding for _, report in reports for finding in report.findings]
    if sarif is not None:
        from .check.sarif import sarif as log

        sarif.write_text(json.dumps(log(findings), indent=1))
    if as_json:
        rows = [
            {"scenario": n, "runs": r.runs, "events": r.steps, "ok": r.ok, "findings": [f.as_dict() for f in r.findings]}
            for n, r in reports
        ]
        typer.echo(json.dumps({"ok": not findings, "device": f"sim:{vendor}", "model": chosen, "scenarios": rows}, indent=1))
    else:
        for name, report in reports:
            if report.findings:
                typer.echo(report.render() + "\n")
            found = f"{len(report.findings)} finding{'s' if len(report.findings) != 1 else ''}" if report.findings else "no finding"
            typer.echo(f"{name}: {found} in {report.runs} runs, {report.steps:,} events (sim:{vendor}, {chosen})")
    if findings:
        raise typer.Exit(1)


def _stepper(progress: str | None) -> Callable[[], None] | None:
    if progress is None:
        return None

    def step() -> None:
        with Path(progress).open("ab") as file:
            file.write(b".")

    return step


def _explore(
    name: str, scenario: Scenario, base: Options, seeds: list[int], schedules: tuple[str, ...], step: Callable[[], None] | None
) -> Any:
    from dataclasses import replace

    from .check.explore import explore

    options = base if base.num_sms is not None else replace(base, num_sms=scenario.num_sms)
    weak = (base.weak,)
    return explore(scenario.function, scenario.ranks, seeds, options, schedules, weak, name, progress=step)


def _mutate(load: Callable[[], list[tuple[str, Scenario]]], base: Options, seeds: list[int], jobs: int, as_json: bool) -> None:
    from .check.mutants import SourcesChanged
    from .check.proof import Proof

    with ExitStack() as stack:
        try:
            proof = stack.enter_context(Proof(load, base, seeds, jobs))
        except ValueError as error:
            raise Failure(str(error)) from error
        progress = stack.enter_context(progress_of("judging mutants", len(proof.mutants)))
        step, judged = _stepper(progress), count(1)

        def done(row: dict[str, Any]) -> None:
            if step is not None:
                step()
            else:
                typer.echo(f"{next(judged)} of {len(proof.mutants)}  {_mutant_text(row)}", err=True)

        try:
            rows = proof.run(done)
        except SourcesChanged as error:
            raise Failure(str(error)) from error
    missed = [row for row in rows if not row["caught"]]
    if as_json:
        head = {"device": f"sim:{base.vendor}", "model": base.model, "seeds": len(seeds), "scenarios": proof.names}
        typer.echo(json.dumps({**head, "mutants": len(rows), "missed": len(missed), "rows": rows}, indent=1))
    else:
        for row in rows:
            typer.echo(_mutant_text(row))
        typer.echo(f"{len(rows) - len(missed)} of {len(rows)} mutants caught")
    if missed:
        raise typer.Exit(1)


def _mutant_text(row: dict[str, Any]) -> str:
    shown = f"{row['finding']} in {row['scenario'].rpartition(':')[2]}" if row["caught"] else row["finding"] or "no finding"
    return f"{'caught' if row['caught'] else 'MISSED'}  {row['kernel']}: {row['change']}  ({shown})"
