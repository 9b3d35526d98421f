"""Findings as people and tools read them: two places in the source, what is missing between them, what to change."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from typing import Any

from epdsl.lang import source

from . import layout as check
from .instrument import AccessSite

_LANGUAGE = os.path.join(os.path.dirname(source.__file__), "")
KINDS = {
    check.FOUND_RACE: "race",
    check.FOUND_SCOPE_RACE: "scope-race",
    check.FOUND_MIXED_SIZE: "mixed-size-race",
    check.FOUND_BOUNDS: "out-of-bounds",
    check.FOUND_FREED: "use-after-free",
    check.FOUND_UNINITIALISED: "uninitialised-read",
    check.FOUND_STALE_LAUNCH: "stale-launch",
    check.FOUND_BARRIER_COUNT: "barrier-count",
    check.FOUND_DIVERGENT_BARRIER: "divergent-barrier",
    check.FOUND_OVERFLOW: "address-overflow",
    check.FOUND_PROXY: "proxy-race",
}
MEANING = {
    "race": "two accesses to the same bytes, at least one a write, that nothing orders",
    "scope-race": "two atomic accesses whose scopes do not include each other's thread",
    "mixed-size-race": "two unordered atomic accesses of different sizes to the same bytes",
    "wait-without-acquire": "a wait that does not acquire what it waited for",
    "out-of-bounds": "an access outside every allocation",
    "use-after-free": "an access to memory that was freed",
    "uninitialised-read": "a read of bytes that nothing has written",
    "stale-launch": "a wait satisfied by a value that an earlier launch left",
    "control-not-restored": "a control word that does not hold its rest value when the kernel has ended",
    "lost-signal": "a wait for a value that nobody will store any more",
    "barrier-deadlock": "a barrier that never opens",
    "barrier-count": "threads that disagree on how many meet at a barrier",
    "divergent-barrier": "threads of a block at different barriers, or gone, where all must meet",
    "not-resident": "blocks that cannot start while the resident ones wait for them",
    "livelock": "loops that look at memory without end",
    "address-overflow": "32-bit signed arithmetic that overflowed in an address",
    "proxy-race": "a bulk copy uses memory that ordinary accesses used, without a proxy fence after them",
    "failed": "the scenario itself raised",
}


def shown(file: str) -> str:
    """A path as a report shows it: relative where it lies below the current directory."""
    relative = os.path.relpath(file) if os.path.isabs(file) else file
    return file if relative.startswith("..") else relative


def name_of(site: AccessSite) -> str:
    """What the author wrote: "wait", "atomic_add", "store", ..."""
    if site.wait:
        return "wait"
    name = site.operation.removeprefix("ep.")
    if name in ("atomic_rmw", "reduce"):
        return f"{'atomic' if name == 'atomic_rmw' else name}_{site.detail.removeprefix('u').removeprefix('f') or 'update'}"
    return name


def order_of(site: AccessSite) -> str:
    """The order as the author wrote it; a wait polls relaxed and then acquires."""
    return "acquire" if site.wait and site.detail == "acquire" else site.order


def ordered(order: str, scope: str) -> str:
    """An order and its scope behind a name, as written; nothing for a plain access."""
    return f" {order.upper()} {scope.upper()}" if order not in ("", "plain") else ""


def titled(site: AccessSite) -> str:
    """An operation's name with its order and scope."""
    return name_of(site) + ordered(order_of(site), site.scope)


def is_language(file: str) -> bool:
    """Whether a file is the language's own."""
    return file.startswith(_LANGUAGE)


def authored(places: tuple[tuple[str, int, int], ...]) -> tuple[tuple[str, int, int], ...]:
    """The places without the language's own device functions in front, such as `ep.warp_copy`."""
    return places[next((n for n, (file, _, _) in enumerate(places) if not is_language(file)), 0) :]


def source_line(file: str, line: int) -> str:
    return source.line_of(file, line).split("#")[0].strip()


@dataclass(frozen=True)
class Access:
    """One side of a finding.

    rank, block, thread  who; block and thread are -1 for the host
    action               "read", "write", "atomic read", ...
    places               (file, line, column) from the operation outwards through the calls it was inlined by
    site                 its number in the run, by which a replay finds it
    lane, epoch          the clock's name of the thread, and its epoch
    launch               the launch's number in the run; 0 for the host
    """

    rank: int
    kernel: str
    block: int
    thread: int
    action: str
    operation: str
    order: str
    scope: str
    places: tuple[tuple[str, int, int], ...]
    site: int = 0
    lane: int = 0
    epoch: int = 0
    wait: bool = False
    launch: int = 0

    @property
    def file(self) -> str:
        return self.places[0][0] if self.places else "unknown"

    @property
    def line(self) -> int:
        return self.places[0][1] if self.places else 0

    @property
    def text(self) -> str:
        return source_line(self.file, self.line)

    @property
    def who(self) -> str:
        return f"rank {self.rank} host" if self.block < 0 else f"rank {self.rank} {self.kernel} block {self.block} thread {self.thread}"

    @property
    def ordering(self) -> str:
        return ordered(self.order, self.scope)


@dataclass(frozen=True)
class Waited:
    """The latest wait in the second access's block when it was made, and the store it saw; None where it saw what the host had left."""

    wait: Access
    store: Access | None


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    kind      a key of MEANING
    where     the buffer and byte, or the barrier
    message   what is wrong beyond the kind, may be empty
    missing   what would order the two accesses, as far as it was found
    repair    the smallest change that makes this finding go away
    reached   the path by which the first access's order spread before it stopped
    cause     equal for findings that one repair makes go away, "" where it is not known
    also      other findings of the same cause
    seen      runs that showed it, of `runs`
    """

    kind: str
    where: str
    first: Access | None
    second: Access | None
    message: str = ""
    missing: str = ""
    repair: str = ""
    reached: tuple[str, ...] = ()
    replay: str = ""
    step: int = 0
    flags: int = 0
    times: int = 1
    seen: int = 1
    runs: int = 1
    waited: Waited | None = field(default=None, repr=False)
    cause: str = ""
    also: tuple[Finding, ...] = ()

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for findings that say the same: over lanes and over seeds."""
        sides = tuple(sorted(a.places[:1] for a in (self.first, self.second) if a is not None))
        return (self.kind, sides, self.message if self.first is None and self.second is None else "")

    @property
    def sites(self) -> tuple[int, int]:
        return (self.first.site if self.first else 0, self.second.site if self.second else 0)

    @property
    def brief(self) -> str:
        """The finding in a line."""
        sides = " and ".join(f"{a.action} at {shown(a.file)}:{a.line}" for a in (self.first, self.second) if a is not None)
        return f"{self.kind.upper()}  {self.where}: {sides}"

    def render(self) -> str:
        """The finding as text."""
        lines = [f"{self.kind.upper()}  {self.where}".rstrip(), f"  {MEANING[self.kind]}"]
        if self.message:
            lines.append(f"  {self.message}")
        for access in (self.first, self.second):
            if access is not None:
                lines.append(f"  {access.action:<13} {access.who}  {shown(access.file)}:{access.line}{access.ordering}")
                if access.text:
                    lines.append(f"                  {access.text}")
                lines += [
                    f"                  called at {shown(file)}:{line}: {source_line(file, line)}" for file, line, _ in access.places[1:]
                ]
        if self.reached:
            lines.append("  reached: " + " -> ".join(self.reached))
        if self.missing:
            lines.append(f"  missing: {self.missing}")
        if self.repair:
            lines.append(f"  repair:  {self.repair}")
        lines += [f"  the same cause: {other.brief}" for other in self.also]
        lines.append(f"  seen in {self.seen} of {self.runs} runs" + (f"; replay: {self.replay}" if self.replay else ""))
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """For --json."""

        def side(access: Access | None) -> dict[str, Any] | None:
            if access is None:
                return None
            return {
                "rank": access.rank,
                "kernel": access.kernel,
                "block": access.block,
                "thread": access.thread,
                "action": access.action,
                "order": access.order,
                "scope": access.scope,
                "file": access.file,
                "line": access.line,
                "text": access.text,
                "called_at": [{"file": f, "line": n} for f, n, _ in access.places[1:]],
            }

        return {
            "kind": self.kind,
            "meaning": MEANING[self.kind],
            "where": self.where,
            "message": self.message,
            "first": side(self.first),
            "second": side(self.second),
            "missing": self.missing,
            "repair": self.repair,
            "reached": list(self.reached),
            "also": [other.as_dict() for other in self.also],
            "seen": self.seen,
            "runs": self.runs,
            "replay": self.replay,
        }


# What a finding says comes before what only follows from it.
_FIRST = (
    "not-resident",
    "stale-launch",
    "control-not-restored",
    "scope-race",
    "mixed-size-race",
    "wait-without-acquire",
    "race",
    "lost-signal",
)


def rank_of(finding: Finding) -> tuple[int, int]:
    """Sorts findings: causes first, then the most often seen."""
    return (_FIRST.index(finding.kind) if finding.kind in _FIRST else len(_FIRST), -finding.seen)


def grouped(findings: list[Finding]) -> list[Finding]:
    """One finding a cause: the first stays, the others become lines of it."""
    kept: dict[Any, Finding] = {}
    for finding in findings:
        key = (finding.cause,) if finding.cause else finding.key
        other = kept.get(key)
        kept[key] = finding if other is None else replace(other, also=(*other.also, finding))
    return list(kept.values())
