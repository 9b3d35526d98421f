"""The mutation proof: one thing weakened at a time in the kernels of a scenario, and whether the checker notices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from epdsl_runtime.artifact import Artifact

from epdsl.ir import dialect

from . import layout as check
from .diagnose import Change
from .engine import Options, Tuning
from .explore import SCHEDULES, check_once
from .findings import name_of, order_of, shown
from .instrument import AccessSite
from .mutate import erase
from .run import Run

# Each order one step down.
_WEAKER = {
    "ep.load": {"acquire": ("relaxed",), "seq_cst": ("acquire",)},
    "ep.store": {"release": ("relaxed",), "seq_cst": ("release",)},
    "ep.fence": {"acq_rel": ("acquire", "release"), "seq_cst": ("acq_rel",)},
}
_WEAKER_UPDATE = {"acq_rel": ("release", "acquire"), "release": ("relaxed",), "acquire": ("relaxed",), "seq_cst": ("acq_rel",)}
_UPDATES = ("ep.atomic_rmw", "ep.reduce", "ep.atomic_cas")
_BARRIERS = ("ep.barrier", "ep.named_barrier", "ep.named_arrive", "ep.warp_sync")


@dataclass(frozen=True)
class Mutant:
    """One change.

    text       as a person reads it
    overrides  for changes of order and scope: what each site becomes
    erased     for operations taken out: the kernel's artifact and the operation's number
    """

    kernel: str
    text: str
    overrides: dict[int, int] = field(default_factory=dict[int, int])
    erased: tuple[Artifact, int] | None = None


def mutants(made: Run) -> Iterator[Mutant]:
    """Every mutant of the kernels that a run launched."""
    sites = made.machine.checker.sites
    artifacts = {held[4].name: held[4] for held in made.machine._held}
    fences = {(kernel, s.places): n for n, (kernel, s) in enumerate(sites) if s.operation == "ep.fence" and s.wait}
    done: set[tuple[str, int]] = set()
    for number, (kernel, site) in enumerate(sites):
        key = (kernel, site.number)
        # Fault and log records are read by the host alone.
        if not site.places or key in done or site.number < 0 or "/epdsl/lang/" in site.places[0][0].replace("\\", "/"):
            continue
        done.add(key)
        yield from _weakened(kernel, number, site, fences)
        if site.operation in _BARRIERS:
            yield Mutant(kernel, f"{_at(site)}: removed", erased=(artifacts[kernel], site.number))
        elif site.operation == "ep.store" and site.detail == "reset" and site.order in ("plain", "relaxed"):
            yield Mutant(kernel, f"{_at(site)}: reset removed", erased=(artifacts[kernel], site.number))


def _at(site: AccessSite) -> str:
    where = " < ".join(f"{shown(file)}:{line}" for file, line, _ in site.places[:2])
    order = f" {order_of(site).upper()} {site.scope.upper()}" if site.order not in ("", "plain") else ""
    return f"{name_of(site)}{order} at {where}"


def _weakened(kernel: str, number: int, site: AccessSite, fences: dict[Any, int]) -> Iterator[Mutant]:
    if site.order in ("", "plain") or (site.wait and site.operation == "ep.fence"):
        return
    fence = fences.get((kernel, site.places)) if site.wait else None
    if fence is not None:
        yield Mutant(kernel, f"{_at(site)}: acquire dropped", {fence: check.OVERRIDE_DROP})
    table = _WEAKER_UPDATE if site.operation in _UPDATES else _WEAKER.get(site.operation, {})
    for order in table.get(site.order, ()):
        yield Mutant(kernel, f"{_at(site)}: {order.upper()}", {number: Change(number, order, site.scope).word})
    if site.operation == "ep.fence":
        yield Mutant(kernel, f"{_at(site)}: removed", {number: check.OVERRIDE_DROP})
    level = dialect.SCOPES.index(site.scope)
    if level > check.SCOPE_BLOCK:
        scope = dialect.SCOPES[level - 1]
        words = {number: Change(number, site.order, scope).word}
        if fence is not None:
            words[fence] = Change(fence, "acquire", scope).word
        yield Mutant(kernel, f"{_at(site)}: {scope.upper()}", words)


def mutants_of(
    main: Callable[..., Any],
    ranks: int,
    base: Options,
    seeds: Sequence[int],
    args: Sequence[Any] = (),
    chosen: Callable[[Mutant], bool] = lambda mutant: True,
    done: Callable[[dict[str, Any]], None] | None = None,
) -> list[dict[str, Any]]:
    """Runs every mutant under up to all seeds, until a finding. A row a mutant: kernel, change, caught, finding, runs."""
    original, clean = check_once(main, ranks, base, args=args)
    if clean:
        raise ValueError(f"the scenario is not clean, so its mutants prove nothing: {clean[0].render()}")
    limit = 10 * original.steps + 1_000_000
    rows: list[dict[str, Any]] = []
    for mutant in mutants(original):
        if not chosen(mutant):
            continue
        finding, runs = "", 0
        replacements = {mutant.erased[0].name: erase(*mutant.erased)} if mutant.erased is not None else None
        for n, seed in enumerate(seeds):
            options = replace(base, seed=seed, schedule=SCHEDULES[n % len(SCHEDULES)])
            _, found = check_once(main, ranks, options, "", Tuning(overrides=mutant.overrides, most_events=limit), args, replacements)
            runs += 1
            if found:
                first = found[0]
                places = [f"{shown(a.file)}:{a.line}" for a in (first.first, first.second) if a is not None]
                finding = f"{first.kind} {' / '.join(places)}"
                break
        row = {"kernel": mutant.kernel, "change": mutant.text, "caught": bool(finding), "finding": finding, "runs": runs}
        rows.append(row)
        if done is not None:
            done(row)
    return rows


def prove(
    scenarios: Sequence[tuple[Callable[..., Any], int]],
    base: Options,
    seeds: Sequence[int],
    done: Callable[[dict[str, Any]], None] | None = None,
) -> list[dict[str, Any]]:
    """The mutants of all scenarios together: one is caught when any of them shows it. Rows as of `mutants_of`, caught ones first found."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for main, ranks in scenarios:

        def open_still(mutant: Mutant) -> bool:
            known = rows.get((mutant.kernel, mutant.text))
            return known is None or not known["caught"]

        for row in mutants_of(main, ranks, base, seeds, chosen=open_still, done=done):
            rows[row["kernel"], row["change"]] = row
    return list(rows.values())
