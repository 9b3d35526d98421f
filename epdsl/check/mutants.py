"""The mutation proof: one thing weakened at a time in the kernels of a scenario, and whether the checker notices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from epdsl_runtime.artifact import Artifact

from epdsl.ir import dialect

from . import layout as check
from .engine import Options, OutOfMemory, Tuning
from .explore import SCHEDULES, check_once
from .findings import is_language, shown, titled
from .instrument import UPDATES, AccessSite
from .machine import sites_of
from .mutate import erase, identity
from .run import Run
from .strengthen import Change

# Each order one step down.
_WEAKER = {
    "ep.load": {"acquire": ("relaxed",), "seq_cst": ("acquire",)},
    "ep.store": {"release": ("relaxed",), "seq_cst": ("release",)},
    "ep.fence": {"acq_rel": ("acquire", "release"), "seq_cst": ("acq_rel",)},
}
_WEAKER_UPDATE = {"acq_rel": ("release", "acquire"), "release": ("relaxed",), "acquire": ("relaxed",), "seq_cst": ("acq_rel",)}
_BARRIERS = ("ep.barrier", "ep.named_barrier", "ep.named_arrive", "ep.warp_sync")
# Where the copy engine is another proxy.
_PROXIES = ("ep.proxy_fence", "ep.bulk_wait")

Places = tuple[tuple[str, int, int], ...]


@dataclass(frozen=True)
class Group:
    """The operations that one operation of the source became: where its loop was unrolled there are several.

    site     any of them
    numbers  of all of them in the run
    parts    (compiled kernel, numbers of operations in it)
    """

    kernel: str
    site: AccessSite
    numbers: tuple[int, ...]
    parts: tuple[tuple[Artifact, tuple[int, ...]], ...]


@dataclass(frozen=True)
class Mutant:
    """One change.

    text       as a person reads it; with the kernel's name it stands for the same change in every scenario and process
    overrides  for changes of order and scope: what each site becomes
    erased     for operations taken out: compiled kernels and the numbers of their operations
    """

    kernel: str
    text: str
    overrides: Mapping[int, int] = field(default_factory=dict[int, int])
    erased: tuple[tuple[Artifact, tuple[int, ...]], ...] = ()

    @property
    def key(self) -> tuple[str, str]:
        return (self.kernel, self.text)


@dataclass(frozen=True)
class Verdict:
    """finding: what was seen first, "" for nothing; where `caught` is False it says why there is no verdict. runs: how many were made."""

    caught: bool
    finding: str
    runs: int


def groups(made: Run) -> list[Group]:
    """What the kernels that a run launched consist of, as far as the checker is told, in the order of the first launches."""
    artifacts = {id(held[4]): held[4] for held in made.machine._held}
    found: dict[Any, list[tuple[Artifact, int, AccessSite]]] = {}
    for artifact in artifacts.values():
        base = made.machine.checker.first_site(id(artifact))
        for n, site in enumerate(sites_of(artifact)):
            # Fault and log records are read by the host alone.
            if site.places and site.number >= 0 and not is_language(site.places[0][0]):
                key = (artifact.name, site.operation, site.order, site.scope, site.detail, site.wait, _lines(site))
                found.setdefault(key, []).append((artifact, base + n, site))
    made_groups: list[Group] = []
    for (kernel, *_), members in found.items():
        parts: dict[int, tuple[Artifact, list[int]]] = {}
        for artifact, _, site in members:
            parts.setdefault(id(artifact), (artifact, []))[1].append(site.number)
        numbers = tuple(number for _, number, _ in members)
        made_groups.append(Group(kernel, members[0][2], numbers, tuple((a, tuple(dict.fromkeys(n))) for a, n in parts.values())))
    return made_groups


def _lines(site: AccessSite) -> tuple[tuple[str, int], ...]:
    return tuple((file, line) for file, line, _ in site.places)


def mutants(made: Run) -> Iterator[Mutant]:
    """Every mutant of the kernels that a run launched."""
    every = groups(made)
    fences = {(g.kernel, _lines(g.site)): g.numbers for g in every if g.site.operation == "ep.fence" and g.site.wait}
    for group in every:
        site, at = group.site, _at(group.site)
        yield from _weakened(group, at, fences)
        if site.operation in _BARRIERS or (site.operation in _PROXIES and made.options.model == "ptx"):
            yield Mutant(group.kernel, f"{at}: removed", erased=group.parts)
        elif site.operation == "ep.store" and site.detail == "reset" and site.order in ("plain", "relaxed"):
            yield Mutant(group.kernel, f"{at}: reset removed", erased=group.parts)


def _at(site: AccessSite) -> str:
    where = " < ".join(f"{shown(file)}:{line}" for file, line in _lines(site))
    return f"{titled(site)} at {where}"


def _weakened(group: Group, at: str, fences: Mapping[Any, tuple[int, ...]]) -> Iterator[Mutant]:
    site = group.site
    if site.order in ("", "plain") or (site.wait and site.operation == "ep.fence"):
        return

    def changed(what: str, word: int, fence: int | None = None) -> Mutant:
        words = dict.fromkeys(group.numbers, word)
        if fence is not None:
            words |= dict.fromkeys(own, fence)
        return Mutant(group.kernel, f"{at}: {what}", words)

    def word(order: str, scope: str) -> int:
        return Change(order, scope).word

    own = fences.get((group.kernel, _lines(site)), ()) if site.wait else ()
    if own:
        yield Mutant(group.kernel, f"{at}: acquire dropped", dict.fromkeys(own, check.OVERRIDE_DROP))
    table = _WEAKER_UPDATE if site.operation in UPDATES else _WEAKER.get(site.operation, {})
    for order in table.get(site.order, ()):
        yield changed(order.upper(), word(order, site.scope))
    if site.operation == "ep.fence":
        yield changed("removed", check.OVERRIDE_DROP)
    level = dialect.SCOPES.index(site.scope)
    if level > check.SCOPE_BLOCK:
        scope = dialect.SCOPES[level - 1]
        yield changed(scope.upper(), word(site.order, scope), word("acquire", scope))


class SourcesChanged(RuntimeError):
    """A mutant that another process found is not in the kernels that this one read."""


@dataclass(frozen=True)
class Baseline:
    """A scenario that is clean as it is, and its mutants by their keys."""

    name: str
    main: Callable[..., Any]
    ranks: int
    options: Options
    most_events: int
    mutants: Mapping[tuple[str, str], Mutant]

    def judge(self, key: tuple[str, str], seeds: Sequence[int]) -> Verdict:
        """Runs a mutant under one seed after the other until there is a finding.

        Raises SourcesChanged for one that is not of these kernels.
        """
        mutant = self.mutants.get(key)
        if mutant is None:
            raise SourcesChanged(
                f"{self.name} has no mutant of {key[0]}, {key[1]}: its files were edited while the proof ran; start it again"
            )
        replacements = {identity(artifact): erase(artifact, numbers) for artifact, numbers in mutant.erased}
        tuning = Tuning(overrides=dict(mutant.overrides), most_events=self.most_events)
        for n, seed in enumerate(seeds):
            options = replace(self.options, seed=seed, schedule=SCHEDULES[n % len(SCHEDULES)])
            try:
                _, found = check_once(self.main, self.ranks, options, "", tuning, (), replacements)
            except (OutOfMemory, TimeoutError) as error:
                return Verdict(False, f"no verdict: {error}", n + 1)
            if found:
                first = found[0]
                places = [f"{shown(a.file)}:{a.line}" for a in (first.first, first.second) if a is not None]
                return Verdict(True, f"{first.kind} {' / '.join(places)}".rstrip(), n + 1)
        return Verdict(False, "", len(seeds))


def baseline(main: Callable[..., Any], ranks: int, options: Options, name: str = "") -> Baseline:
    """Runs a scenario once to learn its mutants. Raises ValueError when it is not clean."""
    name = name or main.__name__
    original, found = check_once(main, ranks, options, name)
    if found:
        raise ValueError(f"{name} is not clean, so its mutants prove nothing:\n{found[0].render()}")
    # A mutant that makes far more accesses than the original does not end.
    limit = 10 * original.steps + 1_000_000
    return Baseline(name, main, ranks, options, limit, {m.key: m for m in mutants(original)})
