"""Findings as people and tools read them: two places in the source, what is missing between them, what to change."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

from epdsl_runtime import sim_layout as sim

from epdsl.lang import source

from . import layout as check
from .engine import HostSite, block_of
from .instrument import AccessSite
from .machine import CheckedMachine

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
    "proxy-race": "a bulk copy uses what ordinary stores wrote, without a proxy fence after them",
    "failed": "the scenario itself raised",
}
_VERBS = {
    "ep.load": "load",
    "ep.store": "store",
    "ep.atomic_rmw": "atomic",
    "ep.reduce": "reduce",
    "ep.atomic_cas": "compare-and-swap",
    "ep.fence": "fence",
    "ep.bulk_load": "bulk copy",
    "ep.bulk_store": "bulk copy",
    "gpu.return": "end of the kernel",
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
        return f" {self.order.upper()} {self.scope.upper()}" if self.order not in ("", "plain") else ""


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    kind      a key of MEANING
    where     the buffer and byte, or the barrier
    message   what is wrong beyond the kind, may be empty
    missing   what would order the two accesses, as far as it was found
    repair    the smallest change that makes this finding go away
    reached   the path by which the first access's order spread before it stopped
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

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for findings that say the same: over lanes and over seeds."""
        sides = tuple(sorted(a.places[:1] for a in (self.first, self.second) if a is not None))
        return (self.kind, sides, self.message if self.first is None and self.second is None else "")

    @property
    def sites(self) -> tuple[int, int]:
        return (self.first.site if self.first else 0, self.second.site if self.second else 0)

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
            "seen": self.seen,
            "runs": self.runs,
            "replay": self.replay,
        }


def access_of(machine: CheckedMachine, packed: int, sequence: int, number: int, action: str) -> Access:
    """Who made an access, and where in the source."""
    kernel, site = machine.checker.site(number)
    launch = machine.checker.launches.get(sequence)
    lane, epoch = packed >> 40, packed & ((1 << 40) - 1)
    if launch is None or isinstance(site, HostSite):
        rank = next((d.info.index for d in machine.devices for a in d.agents.values() if int(a.words[check.X_TID]) == lane), 0)
        operation = site.operation if isinstance(site, HostSite) else "host"
        return Access(rank, "host", -1, -1, f"{operation}", operation, "", "", site.places, number, lane, epoch)
    block, thread = block_of(packed, launch)
    return Access(
        launch.rank,
        kernel,
        block,
        thread,
        action,
        site.operation,
        order_of(site),
        site.scope,
        authored(site.places),
        number,
        lane,
        epoch,
        site.wait,
    )


def _action(kind: int, writes: bool, atomic: bool, site: AccessSite | HostSite) -> str:
    if kind in (check.FOUND_BARRIER_COUNT, check.FOUND_DIVERGENT_BARRIER):
        return "barrier" if site.operation != "gpu.return" else "end"
    if kind == check.FOUND_OVERFLOW:
        return "arithmetic"
    verb = "write" if writes else "read"
    if isinstance(site, AccessSite) and site.operation in ("ep.atomic_rmw", "ep.reduce", "ep.atomic_cas"):
        return "atomic " + _VERBS[site.operation].replace("atomic", "update")
    if isinstance(site, AccessSite) and site.wait:
        return "wait"
    return f"atomic {verb}" if atomic else verb


def collect(machine: CheckedMachine, failures: list[Any], replay: str) -> list[Finding]:
    """Every finding of one run, without what only a replay can tell."""
    found = [_engine_finding(machine, row, replay) for row in machine.checker.found]
    for entry in machine.unrestored:
        found.append(_control_finding(machine, entry, replay))
    found += _stuck_findings(machine, replay)
    from .run import expected

    if machine.checker.exhausted:
        text = f"the run made more than {int(machine.checker.words[check.K_LIMIT]):,} accesses: some loop does not end"
        found.append(Finding("livelock", "", None, None, text, replay=replay))
    for rank, error, _ in failures:
        if not expected(error) and not machine.checker.exhausted:
            place = _raised_at(error)
            side = Access(rank, "host", -1, -1, "raised", "", "", "", (place,) if place else ())
            found.append(Finding("failed", f"rank {rank}", side, None, f"{type(error).__name__}: {error}".splitlines()[0], replay=replay))
            break
    return merge(found)


def _raised_at(error: BaseException) -> tuple[str, int, int] | None:
    trace, found = error.__traceback__, None
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename.replace("\\", "/")
        if "/epdsl_runtime/" not in name and "/epdsl/" not in name:
            found = (trace.tb_frame.f_code.co_filename, trace.tb_lineno, 0)
        trace = trace.tb_next
    return found


def _engine_finding(machine: CheckedMachine, row: Any, replay: str) -> Finding:
    kind, flags = int(row[check.F_KIND]), int(row[check.F_FLAGS])
    first_site, second_site = int(row[check.F_FIRST_SITE]), int(row[check.F_SECOND_SITE])
    packed, sequence = int(row[check.F_FIRST]), int(row[check.F_FIRST_LAUNCH])
    address = int(row[check.F_ADDRESS])
    first: Access | None = None
    if first_site:
        site = machine.checker.site(first_site)[1]
        writes = bool(flags & check.FIRST_WRITES) or kind == check.FOUND_STALE_LAUNCH
        who = packed if kind not in (check.FOUND_BARRIER_COUNT, check.FOUND_DIVERGENT_BARRIER) else int(row[check.F_SECOND])
        first = access_of(machine, who, sequence, first_site, _action(kind, writes, bool(flags & check.FIRST_ATOMIC), site))
    site = machine.checker.site(second_site)[1]
    writes = bool(flags & (check.SECOND_WRITES if first is not None else 1))
    action = _action(kind, writes, bool(flags & check.SECOND_ATOMIC) and first is not None, site)
    second = access_of(machine, int(row[check.F_SECOND]), int(row[check.F_SECOND_LAUNCH]), second_site, action)
    where, message = machine.buffer_at(address), ""
    match kind:
        case check.FOUND_BARRIER_COUNT:
            where, message = f"named barrier {address}", f"one thread arrives for {packed} threads, another for {int(row[check.F_SIZE])}"
        case check.FOUND_DIVERGENT_BARRIER:
            where = f"rank {second.rank} {second.kernel} block {second.block}"
            message = "a thread ended while others wait for it" if flags & 1 else "threads of one block meet at different barriers"
        case check.FOUND_BOUNDS | check.FOUND_FREED:
            message = f"{int(row[check.F_SIZE])} bytes"
        case check.FOUND_STALE_LAUNCH:
            message = "the same store satisfied this wait in an earlier launch; it is never set back and does not carry the launch's number"
        case _:
            pass
    finding = Finding(
        KINDS[kind], where, first, second, message, replay=replay, step=int(row[check.F_STEP]), flags=flags, times=int(row[check.F_COUNT])
    )
    return replace(finding, repair=_plain_repair(finding))


def _plain_repair(finding: Finding) -> str:
    """What to do about findings that need no search."""
    second = finding.second
    where = f"{shown(second.file)}:{second.line}" if second else ""
    match finding.kind:
        case "out-of-bounds":
            return f"check the index at {where} against the buffer's size"
        case "use-after-free":
            return "free the buffer only after every kernel that uses it has ended (rank.barrier() when peers use it)"
        case "uninitialised-read":
            return f"write the bytes before {where} reads them, or zero the buffer"
        case "stale-launch":
            first = finding.first
            what = f"the value stored at {shown(first.file)}:{first.line}" if first else "the stored value"
            return f"make {what} carry the launch's number, or set the word back before the launch ends"
        case "mixed-size-race":
            return "use one access size for every atomic access to this word"
        case "barrier-count":
            return "give every named_barrier and named_arrive of one barrier the same number of threads"
        case "divergent-barrier":
            return "move the barrier out of the condition, or use ep.group_barrier for the threads that take part"
        case "address-overflow":
            return f"compute the index at {where} in 64 bits: ep.i64(...)"
        case "proxy-race":
            first = finding.first
            if first is not None and first.operation == "ep.mbarrier_init":
                return f'ep.proxy_fence("shared") after the barrier is made at {shown(first.file)}:{first.line}, by the same thread'
            if second is not None and second.operation == "ep.bulk_load":
                return (
                    f'ep.proxy_fence("global") in the thread that makes the bulk copy at {where}, after what makes the stores known to it'
                )
            return 'ep.proxy_fence("shared") in the storing threads, before the barrier that precedes the bulk copy'
        case _:
            return ""


def _control_finding(machine: CheckedMachine, entry: dict[str, Any], replay: str) -> Finding:
    control = entry["control"]
    writer = entry["writer"]
    first = None
    if writer is not None and writer[1] & 0xFFFFFFFF:
        first = access_of(machine, writer[0], writer[1] >> 32, writer[1] & 0xFFFFFFFF, "write")
    launch = machine.checker.launches[entry["sequence"]]
    name = control.name or machine.buffer_at(control.address)
    return Finding(
        "control-not-restored",
        f"{name}, word {entry['index']}",
        first,
        None,
        f"after {launch.kernel} on rank {launch.rank} it holds {entry['value']}, its rest value is {control.rest}",
        repair=f"set the word back to {control.rest} before the last block of {launch.kernel} ends",
        replay=replay,
    )


def _stuck_findings(machine: CheckedMachine, replay: str) -> list[Finding]:
    found: list[Finding] = []
    for s in machine.stuck:
        places: tuple[tuple[str, int, int], ...] = ()
        text = ""
        if 0 <= s["site"] < len(s["artifact"].sites):
            site = s["artifact"].sites[s["site"]]
            places, text = ((site.file, site.line, site.column),), site.text
        side = Access(s["rank"], s["kernel"], s["block"], s["thread"], "waits", "", "", "", places)
        many = f"{s['count']} thread{'s' if s['count'] > 1 else ''}"
        match s["op"]:
            case sim.OP_POLL:
                writer = s["writer"]
                first = None
                if writer is not None and writer[1] & 0xFFFFFFFF:
                    first = access_of(machine, writer[0], writer[1] >> 32, writer[1] & 0xFFFFFFFF, "last write")
                message = f"{many} wait until {text}; the word holds {s['value']}, and nothing that could change it runs"
                repair = f"store the value that {shown(places[0][0])}:{places[0][1]} waits for on every path" if places else ""
                found.append(Finding("lost-signal", machine.buffer_at(s["address"]), first, side, message, repair=repair, replay=replay))
            case sim.OP_BARRIER:
                message = f"{s['arrived']} of {s['alive']} threads of the block have arrived"
                found.append(Finding("barrier-deadlock", f"rank {s['rank']} block {s['block']}", side, None, message, replay=replay))
            case sim.OP_NAMED:
                message = f"barrier {s['address']}: {s['arrived']} of {s['wanted']} threads have arrived"
                repair = "give the barrier the number of threads that come to it"
                found.append(
                    Finding("barrier-deadlock", f"rank {s['rank']} block {s['block']}", side, None, message, repair=repair, replay=replay)
                )
            case sim.OP_SYNC | sim.OP_SHUFFLE | sim.OP_VOTE | sim.OP_ELECT:
                message = f"{many} {sim.OP_NAMES[s['op']]} with lanes {s['mask']:#x}, which not all of them reach"
                found.append(Finding("barrier-deadlock", f"rank {s['rank']} block {s['block']}", side, None, message, replay=replay))
            case sim.OP_YIELD if s["livelock"]:
                found.append(Finding("livelock", f"rank {s['rank']} block {s['block']}", side, None, many, replay=replay))
            case _:
                continue
        if s["unstarted"]:
            text = f"{s['unstarted']} blocks of {s['kernel']} cannot start: the device holds {s['resident']} at once, and those wait"
            repair = "launch no more blocks than are resident at once (cooperative=True refuses it)"
            found.append(Finding("not-resident", f"rank {s['rank']}", side, None, text, repair=repair, replay=replay))
    return found


# What a finding says comes before what only follows from it.
_FIRST = ("not-resident", "stale-launch", "scope-race", "mixed-size-race", "wait-without-acquire", "race", "lost-signal")


def rank_of(finding: Finding) -> tuple[int, int]:
    """Sorts findings: causes first, then the most often seen."""
    return (_FIRST.index(finding.kind) if finding.kind in _FIRST else len(_FIRST), -finding.seen)


def merge(findings: list[Finding]) -> list[Finding]:
    """One of each key, without what only follows from another."""
    kept: dict[tuple[Any, ...], Finding] = {}
    for finding in findings:
        other = kept.get(finding.key)
        kept[finding.key] = finding if other is None else replace(other, times=other.times + finding.times)
    raced = {a.places[:1] for f in kept.values() if f.kind == "race" for a in (f.first, f.second) if a is not None}
    waiting = {(f.second.rank, f.second.kernel, f.second.block) for f in kept.values() if f.kind == "lost-signal" and f.second is not None}

    def follows(finding: Finding) -> bool:
        side = finding.first if finding.kind == "barrier-deadlock" else finding.second
        if side is None:
            return False
        if finding.kind == "uninitialised-read":
            return side.places[:1] in raced
        return finding.kind == "barrier-deadlock" and (side.rank, side.kernel, side.block) in waiting

    return [finding for finding in kept.values() if not follows(finding)]
