"""Changes of one place of the source that make it order more, and which of them to try first."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from epdsl.ir import dialect

from . import layout as check
from .findings import authored, name_of, order_of, shown, source_line
from .instrument import UPDATES, AccessSite
from .spread import Step

_RELEASES = ("release", "acq_rel", "seq_cst")
_ACQUIRES = ("acquire", "acq_rel", "seq_cst")
Sites = Sequence[tuple[str, AccessSite]]


@dataclass(frozen=True)
class Change:
    """What a site becomes: stronger, or weaker."""

    order: str
    scope: str

    @property
    def word(self) -> int:
        order, scope = dialect.ORDERS.index(self.order), dialect.SCOPES.index(self.scope)
        return check.OVERRIDE_ORDER | check.OVERRIDE_SCOPE | order << 8 | scope << 16


@dataclass(frozen=True)
class Place:
    """An operation of the source. Kernels, calls and unrolled loops make several sites of it."""

    operation: str
    order: str
    scope: str
    detail: str
    wait: bool
    file: str
    line: int

    @property
    def name(self) -> str:
        return name_of(AccessSite(self.operation, self.order, self.scope, (), -1, self.wait, self.detail))

    @property
    def at(self) -> str:
        return f"{shown(self.file)}:{self.line}"


@dataclass(frozen=True)
class Repair:
    """A place and what it becomes. `cost` counts what is changed: each half of an order, a scope."""

    place: Place
    change: Change
    cost: int

    def missing(self) -> str:
        place, change = self.place, self.change
        reasons: list[str] = []
        if change.order in _RELEASES and place.order not in _RELEASES:
            reasons.append("publishes nothing")
        if change.order in _ACQUIRES and place.order not in _ACQUIRES:
            reasons.append("acquires nothing")
        text = f"the {place.name} at {place.at} is {place.order.upper()} at {place.scope.upper()}: "
        text += f"it {' and '.join(reasons)}" if reasons else ""
        if change.scope != place.scope:
            text += f"{', and ' if reasons else ''}scope {place.scope.upper()} does not include the other thread"
        return text

    def text(self) -> str:
        """What to do, with the line as it becomes where it says order and scope literally."""
        better = f"{self.change.order.upper()} at {self.change.scope.upper()}"
        line = self._line()
        return f"make the {self.place.name} at {self.place.at} {better}" + (f": {line}" if line else "")

    def _line(self) -> str:
        line = source_line(self.place.file, self.place.line)
        for old, new in ((self.place.order, self.change.order), (self.place.scope, self.change.scope)):
            if old != new:
                line, found = re.subn(rf"\b{old.upper()}\b", new.upper(), line)
                if found != 1:
                    return ""
        return line


def place_of(site: AccessSite) -> Place | None:
    """Where a site's order and scope are written; None for what has none, and for the fence of a wait, which goes with its load."""
    if site.operation not in ("ep.load", "ep.store", "ep.fence", *UPDATES) or site.order in ("", "plain"):
        return None
    if site.wait and site.operation == "ep.fence":
        return None
    file, line, _ = authored(site.places)[0]
    return Place(site.operation, order_of(site), site.scope, site.detail, site.wait, file, line)


def places_of(sites: Sites) -> dict[Place, list[int]]:
    """Every place and the numbers of its sites."""
    found: dict[Place, list[int]] = {}
    for number, (_, site) in enumerate(sites):
        if (place := place_of(site)) is not None:
            found.setdefault(place, []).append(number)
    return found


def overrides(repairs: Sequence[Repair], places: Mapping[Place, Sequence[int]]) -> dict[int, int]:
    """The repairs for `Tuning.overrides`."""
    return {number: repair.change.word for repair in repairs for number in places.get(repair.place, ())}


def _stronger(place: Place) -> list[tuple[str, int]]:
    """Orders above the place's own with what they add, the weakest first."""
    if place.operation == "ep.load":
        return [("acquire", 1)] if place.order == "relaxed" else []
    if place.operation == "ep.store":
        return [("release", 1)] if place.order == "relaxed" else []
    above = {"acquire": [("acq_rel", 1)], "release": [("acq_rel", 1)]}
    if place.operation != "ep.fence":
        above["relaxed"] = [("release", 1), ("acquire", 1), ("acq_rel", 2)]
    return above.get(place.order, [])


def repairs_of(place: Place) -> Iterator[Repair]:
    """Every change that makes the place stronger."""
    scopes = dialect.SCOPES[dialect.SCOPES.index(place.scope) + 1 :]
    for order, cost in [(place.order, 0), *_stronger(place)]:
        for scope in (place.scope, *scopes):
            if (order, scope) != (place.order, place.scope):
                yield Repair(place, Change(order, scope), cost + (scope != place.scope))


def _fences(sites: Sites, number: int, release: bool) -> Iterator[Place]:
    """The fences of a site's kernel that may go with it: release fences before it, acquire fences behind it, the nearest first."""
    kernel, site = sites[number]
    found = [
        (abs(fence.number - site.number), place)
        for name, fence in sites
        if name == kernel
        and fence.operation == "ep.fence"
        and fence.order in (_RELEASES if release else _ACQUIRES)
        and (fence.number < site.number) == release
        and (place := place_of(fence)) is not None
    ]
    yield from (place for _, place in sorted(found, key=lambda each: each[0]))


def on_path(path: Sequence[Step], sites: Sites) -> list[Place]:
    """The places that hand an access on along a path, those of its last step first."""
    found: list[Place] = []
    for step in reversed([step for step in path if step.writer >= 0]):
        for release, number in ((True, step.released), (False, step.took)):
            own = place_of(sites[number][1])
            # A fence is where the author put the order, so it comes before the relaxed access it goes with.
            relaxed = own is not None and own.order == "relaxed"
            fences = list(_fences(sites, number, release)) if relaxed else []
            found += [*fences, *([own] if own is not None else [])]
    return list(dict.fromkeys(found))


def ranked(places: Sequence[Place]) -> list[Repair]:
    """Every change of the places, the smallest first and then in the places' order."""
    return sorted((repair for place in places for repair in repairs_of(place)), key=lambda repair: repair.cost)


def strongest(places: Sequence[Place]) -> list[Repair]:
    """Each place at the most it can be."""
    return [max(each, key=lambda repair: repair.cost) for place in places if (each := list(repairs_of(place)))]
