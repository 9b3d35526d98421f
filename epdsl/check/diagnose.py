"""What is missing between two unordered accesses, and the smallest change that orders them in every run that showed them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from . import layout as check
from .collect import overwrites
from .engine import HOST_SITES, Options, Tuning
from .findings import KINDS, Access, Finding, Waited, authored, name_of, shown
from .instrument import AccessSite
from .run import Run
from .spread import Step, path_of, path_to, reached, spread
from .strengthen import Place, Repair, on_path, overrides, place_of, places_of, ranked, strongest

RACES = ("race", "scope-race")
# Runs on which a repair is tried; each try is a run.
MOST_RUNS = 8


@dataclass(frozen=True)
class Seen:
    """A run that showed a finding. `sites` are of that run: other runs may number them otherwise."""

    options: Options
    finding: Finding
    sites: Sequence[tuple[str, AccessSite]]


Rerun = Callable[[Options, Tuning], Run]


def diagnose(finding: Finding, seen: Sequence[Seen], rerun: Rerun, known: list[Sequence[Repair]]) -> Finding:
    """Adds what is missing, the repair and the path reached to a race.

    seen   runs that showed it, the first that of `finding`
    known  repairs of other findings, which are tried first; one that is found is added
    """
    first, second = finding.first, finding.second
    if finding.kind not in RACES or first is None or second is None:
        return finding
    written = _written(finding, seen[0].options, rerun)
    if first.block >= 0:
        before = [step for step in written.steps if step.number <= finding.step]
        finding = replace(finding, reached=reached(first, before, written.run))
    if finding.kind == "race" and finding.flags & check.SAME_BLOCK and not finding.flags & (check.FIRST_ATOMIC | check.SECOND_ATOMIC):
        return _barrier(finding, [written])
    every = [places_of(each.sites) for each in seen]

    def gone(repairs: Sequence[Repair]) -> bool:
        return not any(
            _shows(rerun(each.options, Tuning(overrides=overrides(repairs, places))), each.finding)
            for each, places in zip(seen, every, strict=True)
        )

    for repairs in known:
        if gone(repairs):
            return _strengthened(finding, repairs)
    sides = [place_of(seen[0].sites[n][1]) for n in finding.sites if n < HOST_SITES] if finding.kind == "scope-race" else []
    paths = [place for place in sides if place is not None]
    for each in seen:
        relaxed = rerun(each.options, _watch(each.finding, check.RELAX_ORDER | check.RELAX_SCOPE))
        if _shows(relaxed, each.finding):
            others = [_written(other.finding, other.options, rerun) for other in seen[1:]]
            return _barrier(finding, [written, *others])
        assert each.finding.second is not None
        path = path_of(spread(relaxed), each.finding.second.lane)
        paths += on_path(path, each.sites)
        if each is seen[0] and path:
            # Elsewhere it may have come further, which explains nothing.
            on_way = {lane for step in path for lane in (step.lane, step.writer)}
            before = [step for step in written.steps if step.number <= finding.step and step.lane in on_way]
            finding = replace(finding, reached=reached(first, before, written.run))
    repairs = _smallest(list(dict.fromkeys(paths)), list(every[0]), gone)
    if not repairs:
        return _unrepaired(finding, written, "no change of orders and scopes orders the two in every run that showed them")
    known.append(repairs)
    return _strengthened(finding, repairs)


@dataclass(frozen=True)
class Written:
    """A replay of a run as written that watched the first access of the finding it showed, and the steps of that access."""

    finding: Finding
    run: Run
    steps: Sequence[Step]

    def site(self, number: int) -> AccessSite:
        return self.run.machine.checker.sites[number][1]


def _written(finding: Finding, options: Options, rerun: Rerun) -> Written:
    made = rerun(options, _watch(finding))
    return Written(finding, made, spread(made))


def _watch(finding: Finding, relax: int = 0) -> Tuning:
    first = finding.first
    assert first is not None
    return Tuning(relax=relax, watch=(first.lane, first.epoch))


def _shows(made: Run, finding: Finding) -> bool:
    rows = [row for row in made.machine.checker.found if int(row[check.F_KIND]) in KINDS]
    pairs = {(int(row[check.F_FIRST_SITE]), int(row[check.F_SECOND_SITE])) for row in rows}
    return finding.sites in pairs or finding.sites[::-1] in pairs


def _smallest(path: Sequence[Place], every: Sequence[Place], gone: Callable[[Sequence[Repair]], bool]) -> Sequence[Repair]:
    """The repairs to make together: one on the path if there is one that works, then several on it, then one elsewhere; else none."""
    for repair in ranked(path):
        if gone([repair]):
            return [repair]
    together = strongest(path)
    if len(together) > 1 and gone(together):
        for repair in list(together):
            without = [other for other in together if other.place != repair.place]
            if gone(without):
                together = without
            else:
                smaller = [each for each in ranked([repair.place]) if each.cost < repair.cost]
                found = next((each for each in smaller if gone([*without, each])), repair)
                together = [found if other.place == repair.place else other for other in together]
        return together
    return next(([repair] for repair in ranked([place for place in every if place not in path]) if gone([repair])), [])


def _strengthened(finding: Finding, repairs: Sequence[Repair]) -> Finding:
    waits = len(repairs) == 1 and repairs[0].place.wait and repairs[0].change.order != repairs[0].place.order
    return replace(
        finding,
        kind="wait-without-acquire" if finding.kind == "race" and waits else finding.kind,
        missing="; ".join(repair.missing() for repair in repairs),
        repair="; ".join(repair.text() for repair in repairs),
        cause="; ".join(repair.text() for repair in repairs),
    )


def _at(access: Access) -> str:
    return f"{shown(access.file)}:{access.line}"


def _verb(access: Access) -> str:
    return "writes" if access.action.endswith(("write", "update")) else "reads"


def _barrier(finding: Finding, runs: Sequence[Written]) -> Finding:
    """No order or scope helps: a thread that takes part in the chain is not the one that made the access, or there is no chain."""
    first, second = finding.first, finding.second
    assert first is not None and second is not None
    a, b = _at(first), _at(second)
    if first.block < 0 or second.block < 0:
        host, other = (a, b) if first.block < 0 else (b, a)
        return replace(
            finding,
            missing=f"nothing orders the host's operation at {host} and the kernel's access at {other}",
            repair="rank.synchronize() and rank.barrier() between them",
        )
    if finding.flags & check.SAME_BLOCK:
        between = f"after {a} and before {b}" if a != b else f"between one time that {a} is reached and the next"
        return replace(
            finding,
            missing=f"a barrier of the block between {a} and {b}"
            if a != b
            else f"two threads of the block use the same bytes at {a}, with no barrier of the block between",
            repair=f"ep.barrier() (or ep.warp_sync() within a warp) {between}"
            + ("" if a != b else ", or bytes of its own for each thread"),
        )
    for plain, polled in ((first, second), (second, first)):
        if polled.wait and plain.action == "write":
            repair = f"ep.store with RELEASE at {polled.scope.upper()} (RELAXED if it publishes nothing else) at {_at(plain)}: {plain.text}"
            missing = f"the store at {_at(plain)} is plain, and another thread polls the word"
            return replace(finding, missing=missing, repair=repair, cause=repair)
    acquired = _acquired(runs)
    if acquired is not None:
        place, text, path = acquired
        return replace(
            finding,
            reached=path,
            missing=f"{text}; another thread of the same block {_verb(second)} at {b} without a barrier of the block after it",
            repair=f"ep.barrier() after {place}, before {b}",
            cause=f"barrier after {place}",
        )
    if finding.flags & check.FIRST_BLOCK_KNOWN and finding.flags & check.SECOND_BLOCK_KNOWS:
        return replace(finding, missing="a block barrier in both blocks", repair=f"ep.barrier() after {a}, and before {b}")
    if finding.flags & check.FIRST_BLOCK_KNOWN:
        return replace(
            finding,
            missing=f"a block barrier after {a}, before the thread of block {first.block} that publishes its own accesses only",
            repair=f"ep.barrier() after {a} and before the store or atomic that signals{_signal(finding)}",
        )
    if finding.flags & check.SECOND_BLOCK_KNOWS:
        return replace(
            finding,
            missing=f"a block barrier before {b}, after the thread of block {second.block} that waits: only that thread acquires",
            repair=f"ep.barrier() after the wait and before {b}",
        )
    return _unrepaired(finding, runs[0], "no chain of release and acquire leads from the first to the second at all")


def _acquired(runs: Sequence[Written]) -> tuple[str, str, tuple[str, ...]] | None:
    """Where another thread of the second's block acquired the first access by what stands before the second: place, text, the way.

    Of the runs that which acquired last in the kernel's text: a barrier there comes after all of them.
    """
    best: tuple[int, str, str, tuple[str, ...]] | None = None
    for written in runs:
        first, second = written.finding.first, written.finding.second
        assert first is not None and second is not None
        number = written.site(second.site).number
        for position, step in enumerate(written.steps):
            site = written.site(step.took)
            beside = (step.launch, step.block) == (second.launch, second.block) and step.thread != second.thread
            if beside and step.writer >= 0 and (best[0] if best else -1) < site.number < number:
                file, line, _ = authored(site.places)[0]
                place = f"{shown(file)}:{line}"
                text = f"the {name_of(site)} at {place} by thread {step.thread} acquired it"
                best = (site.number, place, text, reached(first, path_to(written.steps, position), written.run))
    return best[1:] if best else None


def _signal(finding: Finding) -> str:
    """The store that the second's block has waited for, where it is one of the first's block."""
    first, waited = finding.first, finding.waited
    store = waited.store if waited is not None else None
    if first is None or store is None or (store.rank, store.kernel, store.block) != (first.rank, first.kernel, first.block):
        return ""
    return f" ({_at(store)})"


def _went_on(waited: Waited) -> str:
    saw = f"saw what {_at(waited.store)} stored" if waited.store is not None else "saw what the word held from the start"
    return f"block {waited.wait.block} of rank {waited.wait.rank} went on when the wait at {_at(waited.wait)} {saw}"


def _unrepaired(finding: Finding, written: Written, missing: str) -> Finding:
    """Nothing that was tried helps: says by which wait the second access was let through, and what may have misled it."""
    first, second, waited = finding.first, finding.second, finding.waited
    assert first is not None and second is not None
    if waited is not None:
        missing += f"; {_went_on(waited)}"
    lost = next(iter(overwrites(written.run.machine)), None)
    if lost is not None:
        word, update, store = lost
        return replace(
            finding,
            missing=f"{missing}; the store at {_at(store)} overwrites what the update at {_at(update)} left in {word}, "
            "and nothing orders the two",
            repair=f"make the store at {_at(store)} before the release that lets another thread come to {_at(update)}",
            cause=f"overwrite {_at(store)} {_at(update)}",
        )
    before = _at(second) if _at(first) != _at(second) else "it comes to the same line"
    return replace(
        finding, missing=missing, repair=f"a release store after {_at(first)} that the other thread waits for with ACQUIRE before {before}"
    )
