"""The findings of one run, from what the engine and the machine noted down."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from epdsl_runtime import sim_layout as sim

from . import layout as check
from .engine import HostSite, block_of
from .findings import KINDS, Access, Finding, Waited, authored, order_of, shown
from .instrument import UPDATES, AccessSite
from .machine import CheckedMachine

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
        sequence,
    )


def _action(kind: int, writes: bool, atomic: bool, site: AccessSite | HostSite) -> str:
    if kind in (check.FOUND_BARRIER_COUNT, check.FOUND_DIVERGENT_BARRIER):
        return "barrier" if site.operation != "gpu.return" else "end"
    if kind == check.FOUND_OVERFLOW:
        return "arithmetic"
    verb = "write" if writes else "read"
    if isinstance(site, AccessSite) and site.operation in UPDATES:
        return "atomic " + _VERBS[site.operation].replace("atomic", "update")
    if isinstance(site, AccessSite) and site.wait:
        return "wait"
    return f"atomic {verb}" if atomic else verb


def collect(machine: CheckedMachine, failures: list[Any], replay: str) -> list[Finding]:
    """Every finding of one run, without what only a replay can tell."""
    found = [_engine_finding(machine, row, replay) for row in machine.checker.found if int(row[check.F_KIND]) in KINDS]
    for entry in machine.unrestored:
        found.append(_control_finding(machine, entry, replay))
    found += _stuck_findings(machine, replay)
    from .run import expected

    if machine.checker.exhausted:
        text = f"the run made more than {int(machine.checker.words[check.K_LIMIT]):,} accesses: some loop does not end"
        found.append(Finding("livelock", "", None, None, text, replay=replay))
    for rank, error, _ in failures:
        if not (found and expected(error)) and not machine.checker.exhausted:
            place = _raised_at(error)
            side = Access(rank, "host", -1, -1, "raised", "", "", "", (place,) if place else ())
            text = f"{type(error).__name__}: {error}".splitlines()[0].removesuffix(": ")
            found.append(Finding("failed", f"rank {rank}", side, None, text, replay=replay))
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


def _engine_finding(machine: CheckedMachine, row: Any, replay: str, name: str = "") -> Finding:
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
            message = f"an access of {int(row[check.F_SIZE])} bytes"
        case check.FOUND_STALE_LAUNCH:
            message = "the same store satisfied this wait in an earlier launch; it is never set back and does not carry the launch's number"
        case _:
            pass
    finding = Finding(
        name or KINDS[kind],
        where,
        first,
        second,
        message,
        replay=replay,
        step=int(row[check.F_STEP]),
        flags=flags,
        times=int(row[check.F_COUNT]),
    )
    return replace(finding, repair=_plain_repair(finding), waited=_waited(machine, row))


def _waited(machine: CheckedMachine, row: Any) -> Waited | None:
    thread, info = int(row[check.F_WAITED]), int(row[check.F_WAITED_INFO])
    if not thread:
        return None
    writer, store = int(row[check.F_WAITED_WRITER]), int(row[check.F_WAITED_STORE])
    stored = access_of(machine, writer, store >> 32, store & 0xFFFFFFFF, "write") if writer and store >> 32 else None
    return Waited(access_of(machine, thread, info >> 32, info & 0xFFFFFFFF, "wait"), stored)


def overwrites(machine: CheckedMachine) -> list[tuple[str, Access, Access]]:
    """Atomic stores over what another thread's update had left, which nothing orders: (word, update, store)."""
    return [
        (found.where, found.first, found.second)
        for row in machine.checker.found
        if int(row[check.F_KIND]) == check.FOUND_OVERWRITE
        and (found := _engine_finding(machine, row, "", "race")).first is not None
        and found.second is not None
    ]


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
            if first is None or second is None:
                return ""
            space = "shared" if (second.operation == "ep.bulk_load") == (second.action == "write") else "global"
            fence = f'ep.proxy_fence("{space}")'
            if first.action == "read":
                return f"{fence} in the reading threads, after {shown(first.file)}:{first.line} and before they say that they have read"
            if space == "global":
                return f"{fence} in the thread that makes the bulk copy at {where}, after what makes the stores known to it"
            return f"{fence} in the storing threads, before the barrier that precedes the bulk copy"
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
                compared = f" (compared with {s['compared']})" if s["compared"] is not None else ""
                verb = "waits" if s["count"] == 1 else "wait"
                message = f"{many} {verb} until {text}{compared}; the word holds {s['value']}, and nothing that could change it runs"
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
