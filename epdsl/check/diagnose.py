"""The smallest repair of an unordered pair: the run is repeated with one site made stronger at a time until the finding is gone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from epdsl.ir import dialect

from . import layout as check
from .engine import HostSite, Tuning
from .findings import Access, Finding, authored, name_of, order_of, shown, source_line
from .instrument import AccessSite
from .run import Run

_SYNC = ("ep.load", "ep.store", "ep.atomic_rmw", "ep.reduce", "ep.atomic_cas", "ep.fence")
RACES = ("race", "scope-race")


@dataclass(frozen=True)
class Change:
    """One site made stronger, or weaker."""

    site: int
    order: str
    scope: str

    @property
    def word(self) -> int:
        order, scope = dialect.ORDERS.index(self.order), dialect.SCOPES.index(self.scope)
        return check.OVERRIDE_ORDER | check.OVERRIDE_SCOPE | order << 8 | scope << 16


def _stronger(site: AccessSite) -> list[str]:
    """Orders above the site's own, the weakest first."""
    if site.operation == "ep.load":
        return ["acquire"] if site.order == "relaxed" and site.detail != "acquire" else []
    if site.operation == "ep.store":
        return ["release"] if site.order == "relaxed" else []
    if site.operation == "ep.fence":
        return {"acquire": ["acq_rel"], "release": ["acq_rel"]}.get(site.order, [])
    above = {"relaxed": ["release", "acquire", "acq_rel"], "acquire": ["acq_rel"], "release": ["acq_rel"]}
    return above.get(site.order, [])


def _wider(site: AccessSite) -> list[str]:
    return list(dialect.SCOPES[dialect.SCOPES.index(site.scope) + 1 :])


def changes(sites: list[tuple[str, AccessSite]]) -> Iterator[Change]:
    """Every single change, the smallest first: an order, a scope, both."""
    strong = [
        (n, s)
        for n, (_, s) in enumerate(sites)
        if s.operation in _SYNC and s.order not in ("", "plain") and not (s.wait and s.operation == "ep.fence")
    ]
    for n, s in strong:
        yield from (Change(n, order, s.scope) for order in _stronger(s))
    for n, s in strong:
        yield from (Change(n, s.order, scope) for scope in _wider(s))
    for n, s in strong:
        yield from (Change(n, order, scope) for order in _stronger(s) for scope in _wider(s))


def diagnose(finding: Finding, original: Run, rerun: Callable[[Tuning], Run]) -> Finding:
    """Adds what is missing, the repair and the path reached to a race."""
    if finding.kind not in RACES or finding.first is None or finding.second is None:
        return finding
    sites = original.machine.checker.sites
    wanted = finding.sites

    def gone(tuning: Tuning) -> bool:
        found = rerun(tuning).machine.checker.found
        pairs = {(int(r[check.F_FIRST_SITE]), int(r[check.F_SECOND_SITE])) for r in found}
        return wanted not in pairs and wanted[::-1] not in pairs

    finding = replace(finding, reached=_reached(finding, rerun))
    if finding.kind == "race" and finding.flags & check.SAME_BLOCK and not finding.flags & (check.FIRST_ATOMIC | check.SECOND_ATOMIC):
        return _barrier(finding)
    if not gone(Tuning(relax=check.RELAX_ORDER | check.RELAX_SCOPE)):
        return _barrier(finding)
    for change in changes(sites):
        if gone(Tuning(overrides={change.site: change.word})):
            return _single(finding, sites[change.site][1], change)
    for relax, text in (
        (check.RELAX_ORDER, "more than one atomic on the way is too weak"),
        (check.RELAX_SCOPE, "more than one scope on the way is too narrow"),
    ):
        if gone(Tuning(relax=relax)):
            return replace(
                finding,
                missing=text,
                repair="make the releasing store or atomic RELEASE and the wait or load ACQUIRE, at a scope that includes both threads",
            )
    return replace(
        finding, missing="orders and scopes on the way are too weak", repair="RELEASE and ACQUIRE at a scope that includes both threads"
    )


def _single(finding: Finding, site: AccessSite, change: Change) -> Finding:
    path, line, _ = authored(site.places)[0]
    file, name = shown(path), name_of(site)
    now = f"{order_of(site).upper()} at {site.scope.upper()}"
    order = order_of(site) if change.order == site.order else change.order
    better = f"{order.upper()} at {change.scope.upper()}"
    reasons: list[str] = []
    if change.order != site.order:
        acquires = site.order in ("acquire", "acq_rel", "seq_cst")
        releases = site.order in ("release", "acq_rel", "seq_cst")
        gains_acquire = change.order in ("acquire", "acq_rel") and not acquires
        gains_release = change.order in ("release", "acq_rel") and not releases
        reasons += ["publishes nothing"] if gains_release else []
        reasons += ["acquires nothing"] if gains_acquire else []
    if change.scope != site.scope:
        reasons.append(f"scope {site.scope.upper()} does not include the other thread")
    kind = "wait-without-acquire" if finding.kind == "race" and site.wait and change.order != site.order else finding.kind
    return replace(
        finding,
        kind=kind,
        missing=f"the {name} at {file}:{line} is {now}: it {' and '.join(reasons)}"
        if reasons[0].startswith(("pub", "acq"))
        else f"the {name} at {file}:{line} is {now}: {reasons[0]}",
        repair=f"make the {name} at {file}:{line} {better}: {source_line(path, line)}",
    )


def _barrier(finding: Finding) -> Finding:
    """No order or scope helps: a thread that takes part in the chain is not the one that made the access."""
    first, second = finding.first, finding.second
    assert first is not None and second is not None
    a, b = f"{shown(first.file)}:{first.line}", f"{shown(second.file)}:{second.line}"
    if first.block < 0 or second.block < 0:
        host, other = (a, b) if first.block < 0 else (b, a)
        return replace(
            finding,
            missing=f"nothing orders the host's operation at {host} and the kernel's access at {other}",
            repair="rank.synchronize() and rank.barrier() between them",
        )
    if finding.flags & check.SAME_BLOCK:
        return replace(
            finding,
            missing=f"a barrier of the block between {a} and {b}",
            repair=f"ep.barrier() (or ep.warp_sync() within a warp) after {a} and before {b}",
        )
    if finding.flags & check.FIRST_BLOCK_KNOWN and finding.flags & check.SECOND_BLOCK_KNOWS:
        where = "in both blocks"
    elif finding.flags & check.FIRST_BLOCK_KNOWN:
        return replace(
            finding,
            missing=f"a block barrier after {a}, before the thread of block {first.block} that publishes its own accesses only",
            repair=f"ep.barrier() after {a} and before the store or atomic that signals",
        )
    elif finding.flags & check.SECOND_BLOCK_KNOWS:
        return replace(
            finding,
            missing=f"a block barrier before {b}, after the thread of block {second.block} that waits: only that thread acquires",
            repair=f"ep.barrier() after the wait and before {b}",
        )
    else:
        where = ""
    if where:
        return replace(finding, missing=f"a block barrier {where}", repair=f"ep.barrier() after {a}, and before {b}")
    for plain, polled in ((first, second), (second, first)):
        if polled.wait and plain.action == "write":
            return replace(
                finding,
                missing=f"the store at {shown(plain.file)}:{plain.line} is plain, and another thread polls the word",
                repair=f"ep.store with RELEASE at {polled.scope.upper()} (RELAXED if it publishes nothing else) at "
                f"{shown(plain.file)}:{plain.line}: {plain.text}",
            )
    return replace(
        finding,
        missing="no chain of release and acquire leads from the first to the second at all",
        repair=f"a release store after {a} that the second thread waits for with ACQUIRE before {b}",
    )


def _reached(finding: Finding, rerun: Callable[[Tuning], Run]) -> tuple[str, ...]:
    """The path by which the first access came to be known to other threads."""
    first = finding.first
    assert first is not None
    if first.block < 0:
        return ()
    made = rerun(Tuning(watch=(first.lane, first.epoch)))
    checker = made.machine.checker
    steps = [f"{first.action} {_short(first)}"]
    for row in checker.trace[:64]:
        for number in (int(row[1]), int(row[2])):
            site = checker.site(number)[1]
            if not site.places or isinstance(site, HostSite):
                continue
            name = name_of(site)
            order = f" {order_of(site).upper()} {site.scope.upper()}" if site.order not in ("", "plain") else ""
            file, line, _ = authored(site.places)[0]
            text = f"{name}{order} ({_base(file)}:{line})"
            if text not in steps:
                steps.append(text)
    return tuple([*steps[:8], "stops here"])


def _base(path: str) -> str:
    return path.rsplit("/", 1)[-1]


def _short(access: Access) -> str:
    return f"({_base(access.file)}:{access.line})"
