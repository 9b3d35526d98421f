"""Our exchange beside what PyTorch programs use instead: one process group, one machine, the same routing, tokens and checks, one table.

    python benchmarks/exchange.py [--tokens 1,32,128,1024,4096,16384] [--sweep 8,16,24,48,96,132] [--json FILE] [--plot docs]
    python benchmarks/exchange.py --from FILE [FILE ...] --plot docs

Each row is checked against the same reference before it is timed, and timed as `epdsl bench` does it: ranks lined up on the device, caches
flushed, the slowest rank of each repetition, the median. Needs PyTorch (its NCCL) and a GPU a rank; a peer that is not there, or fails,
is a row that says why. The GB/s are of the bytes that must cross the busiest direction of a link when each token goes once to each rank,
and the floor is what they take at the rate that plain stores reach in the same run; so work that sends more has a smaller share of it.
What is begun is said on stderr; a job that does not end is ended, with the stacks of its ranks there, and what was measured is shown.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import exchange_deepep as deepep
import exchange_peers as peers
import exchange_plot
import exchange_progress as progress
from exchange_progress import failed

from epdsl.bench import Stopwatch
from epdsl.bench_job import Job, Settings
from epdsl.bench_modes import Case, about, time_cases
from epdsl.bench_routing import parse_routing
from epdsl.cli_bench import driver_version
from epdsl.cli_tools import show_table
from epdsl.sm_budget import FORMATS, MODES, Mode

# A decode-sized mode: its buffers have a row for each expert and each rank's token.
LATENCY_MOST = 512
# Several operations, each queued by PyTorch.
PAUSE_NS = 3_000_000
# More tokens are compared with so many of the same work.
LINEAR_FROM = 4096
PEERS: dict[str, peers.Peer] = {**peers.PEERS, **deepep.PEERS}
# A peer with a runtime of its own that may end the process comes last, alone in processes of its own.
APART = (*peers.APART, *deepep.APART)
MISSING = dict.fromkeys(deepep.PEERS, deepep.missing)


def our_cases(modes: Sequence[str], tokens: Sequence[int], sweep: Sequence[int], sweep_tokens: int) -> list[Case]:
    """Every mode at every number of tokens with the blocks it takes by itself; then the throughput modes at other numbers of blocks."""
    made: list[Case] = []
    chosen: list[Mode] = [mode for mode in MODES if mode in modes]
    throughput: list[Mode] = [mode for mode in chosen if mode != "latency"]
    for n in tokens:
        if n <= LATENCY_MOST and "latency" in chosen:
            made += [Case("latency", n, fp8) for fp8 in (True, False)]
        made += [Case(mode, n, fp8) for mode in throughput for fp8 in (False, True)]
    return made + [Case(mode, sweep_tokens, fp8, b) for mode in throughput for fp8 in (False, True) for b in sweep]


@dataclass(frozen=True)
class Asked:
    """Which peers to time with how many tokens of each rank; with other numbers of multiprocessors at sweep_tokens. port: of the group."""

    names: tuple[str, ...]
    tokens: tuple[int, ...]
    sweep: tuple[int, ...]
    sweep_tokens: int
    port: int


def run(rank: Any, settings: Settings, cases: list[Case], asked: Asked, path: Path, limits: progress.Limits) -> None:
    """One rank: ours, then the peers that are asked for. A failure of ours ends the job, one of a peer is a row."""
    out = progress.Writer(rank, path, limits)
    with out.watched():
        out.say(f"ranks {rank.size}, the machine's rates")
        watch = Stopwatch(rank, settings.repetitions, settings.flush_bytes)
        out.write(*({**row, "peer": ""} for row in about(watch)))
        # The references that a job keeps take longer than what is timed.
        jobs = functools.cache(lambda tokens: Job(rank, tokens, settings))
        for case in cases:
            if not out.begin(named(case)):
                continue
            try:
                for row in time_cases(watch, settings, [case], job=jobs(case.tokens)):
                    out.write({**row, "peer": f"epdsl {case.mode}"})
            except (ValueError, MemoryError) as error:
                # Refused, on every rank alike, before anything was launched.
                out.write(failed(f"epdsl {case.mode}", f"{case}: {error}", case.tokens))
        if asked.names:
            time_peers(watch, settings, asked, jobs, out)
        out.write(*(failed("", f"not run, the time was up: {what}") for what in out.skipped))


def named(case: Case) -> str:
    """A case in words, for whoever waits for it."""
    blocks = "" if case.blocks is None else f", {case.blocks} blocks"
    return f"epdsl {case.mode} {FORMATS[case.fp8].upper()}, {case.tokens} tokens{blocks}"


def time_peers(watch: Stopwatch, settings: Settings, asked: Asked, jobs: Callable[[int], Job], out: progress.Writer) -> None:
    """All peers that are asked for, in a process group made for them. jobs: of so many tokens."""
    rank = watch.rank
    out.say("PyTorch's process group")
    torch, problem = peers.start(rank, asked.port)
    if torch is None:
        out.write(*(failed(name, problem) for name in asked.names))
        return
    for n in asked.tokens:
        job = jobs(n)
        work = peers.Work(settings, asked.sweep if n == asked.sweep_tokens else ())
        for name in asked.names:
            if out.begin(f"{name}, {n} tokens"):
                for row in time_peer(watch, work, torch, name, job):
                    out.write(row)
    out.say("the end of the process group")
    deepep.close()
    torch.distributed.destroy_process_group()


def time_peer(watch: Stopwatch, work: peers.Work, torch: Any, name: str, job: Job) -> Iterator[dict[str, Any]]:
    """A peer's phases: each made, run once, checked, timed. What goes wrong on some rank is a row, and every rank leaves the peer there."""
    rank = watch.rank
    phases = PEERS[name](torch, job, work)
    found: list[peers.Phase] = []

    def agreed(step: Callable[[], object]) -> str:
        try:
            step()
            problem = ""
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"[:300]
        said = [text for text in rank.allgather(problem) if text]
        return said[0] if said else ""

    def make() -> None:
        found[:] = [phase] if (phase := next(phases, None)) is not None else []

    def once() -> None:
        for phase in found:
            phase.launch()
            torch.cuda.synchronize()
            phase.check()

    while not (problem := agreed(make) or agreed(once)) and found:
        timing = watch.time(found[0].launch, PAUSE_NS)
        yield row_of(name, work.settings, job, found[0], vars(timing), watch.rates().link)
    closed = agreed(phases.close)
    if problem := problem or closed:
        yield failed(name, problem, job.per_rank)
    found.clear()
    torch.cuda.empty_cache()


def row_of(name: str, settings: Settings, job: Job, phase: peers.Phase, timing: dict[str, float], rate: float) -> dict[str, Any]:
    """A row of the table. timing: of a `Timing`; rate: of the link, in GB/s."""
    link, took = job.traffic.busiest_link_rows * peers.row_bytes(phase.format, settings.hidden), timing["less_empty"]
    return {
        "peer": name,
        "name": f"{name} {phase.phase} {phase.format.upper()}, {job.per_rank} tokens",
        "phase": phase.phase,
        "format": phase.format,
        "tokens": job.per_rank,
        "routing": str(settings.routing),
        "blocks": phase.sms,
        **timing,
        "sent_mb": phase.sent_bytes / 1e6,
        "own_gb_s": phase.own_bytes / took / 1e3,
        "remote_gb_s": link / took / 1e3,
        "link_floor_us": link / rate / 1e3,
        "share_of_floor": link / rate / 1e3 / took,
    }


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def groups(names: Sequence[str]) -> list[tuple[str, ...]]:
    """Peers of one job, and those that get a job each; the first goes with ours and may be empty."""
    return [tuple(name for name in names if name not in APART), *((name,) for name in names if name in APART)]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Everything there is to show: what was measured with, and the rows. What ends a job early, or the program, is a row of it."""
    from epdsl_runtime.spawn import spawn

    tokens, sweep = (tuple(int(part) for part in text.split(",") if part) for text in (options.tokens, options.sweep))
    names = [name for name in options.peers.split(",") if name]
    settings = Settings(routing=parse_routing(options.routing), repetitions=options.repetitions)
    cases = our_cases(options.modes.split(","), tokens, sweep, options.sweep_tokens)
    missing = {name: text for name in names if name in MISSING and (text := MISSING[name]())}
    together, *apart = groups([name for name in names if name not in missing])
    jobs = [job for job in [(cases, together), *(([], each) for each in apart)] if any(job)]
    started = time.monotonic()
    progress.say(started, "what is there")
    found = described(options)
    with tempfile.TemporaryDirectory() as folder:
        path = options.json.with_suffix(".jsonl") if options.json else Path(folder, "rows.jsonl")
        path.write_text("")
        progress.add_rows(path, (failed(name, text) for name, text in missing.items()))
        try:
            for number, (ours, theirs) in enumerate(jobs):
                limits = progress.share(started, started + options.seconds, len(jobs) - 1 - number, time.monotonic())
                asked = Asked(theirs, tokens, sweep, options.sweep_tokens, free_port())
                try:
                    if limits is None:
                        raise TimeoutError("not run, the time was up")
                    left = limits.killed - time.monotonic()
                    spawn(run, options.ranks, device="cuda", args=(settings, ours, asked, path, limits), timeout=left)
                except Exception as error:
                    problem = f"{type(error).__name__}: {error}"[-600:]
                    progress.say(started, problem)
                    progress.add_rows(path, [failed(", ".join(theirs) or "epdsl", problem)])
        except KeyboardInterrupt:
            progress.add_rows(path, [failed("", f"ended after {time.monotonic() - started:.0f} s, before all was measured")])
        return {"about": found, "rows": progress.read_rows(path)}


def end(number: int, frame: Any) -> None:
    """Ends what runs and shows what was measured; a second signal must not end that too."""
    del frame
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def described(options: argparse.Namespace) -> dict[str, Any]:
    from epdsl_runtime.devices import list_devices

    names = {device.info.name for device in list_devices() if device.info and device.info.kind == "cuda"}
    return {
        "date": datetime.date.today().isoformat(),
        "device": ", ".join(sorted(names)),
        "driver": driver_version("cuda"),
        "ranks": options.ranks,
        "routing": options.routing,
        "repetitions": options.repetitions,
        **peers.versions(),
    }


def show(document: dict[str, Any]) -> None:
    rows = document["rows"]
    show_table(
        ", ".join(f"{key} {value}" for key, value in document["about"].items()),
        ("work", "SMs", "us", "remote GB/s", "as it counts", "of link floor"),
        [
            (
                row["name"],
                str(row["blocks"] or ""),
                f"{row['less_empty']:.1f}",
                f"{row['remote_gb_s']:.0f}",
                f"{row['own_gb_s']:.0f}" if row.get("own_gb_s") else "",
                f"{row['link_floor_us'] / row['less_empty']:.0%}",
            )
            for row in rows
            if "phase" in row
        ],
    )
    if grown := growth(rows):
        largest = sorted({n for _, times in grown for n in times})
        show_table(
            f"time over that of {LINEAR_FROM} tokens",
            ("work", *(f"{n} tokens, linear {n / LINEAR_FROM:.1f}" for n in largest)),
            [(name, *(f"{times[n]:.2f}" if n in times else "" for n in largest)) for name, times in grown],
        )
    for row in rows:
        if "link_gb_s" in row:
            print(f"link {row['link_gb_s']:.0f} GB/s a direction, memory {row['memory_gb_s']:.0f} GB/s")
        if "failed" in row:
            print(f"{row['peer']} {row['tokens'] or ''}: {row['failed']}")


def growth(rows: Sequence[dict[str, Any]]) -> list[tuple[str, dict[int, float]]]:
    """How many times as long as LINEAR_FROM tokens more of them take, by work: its least time at each number of tokens."""
    took: dict[str, dict[int, float]] = {}
    for row in rows:
        if "phase" in row and row["tokens"] >= LINEAR_FROM:
            times = took.setdefault(f"{row['peer']} {row['phase']} {row['format'].upper()}", {})
            times[row["tokens"]] = min(row["less_empty"], times.get(row["tokens"], row["less_empty"]))
    return [
        (name, {n: times[n] / times[LINEAR_FROM] for n in sorted(times) if n > LINEAR_FROM})
        for name, times in took.items()
        if LINEAR_FROM in times and len(times) > 1
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", default="1,8,32,128,512,1024,4096,8192,16384", help="tokens of each rank, a comma list")
    parser.add_argument("--sweep", default="8,16,24,32,48,64,96,132", help="blocks to time our throughput modes with; empty for none")
    parser.add_argument("--sweep-tokens", type=int, default=4096)
    parser.add_argument("--routing", default="uniform", help="uniform, zipf:EXPONENT or one-rank")
    parser.add_argument("--modes", default=",".join(MODES), help="ours, a comma list; empty for none")
    parser.add_argument("--peers", default=",".join(PEERS), help="a comma list; empty for none")
    parser.add_argument("--repetitions", type=int, default=50)
    parser.add_argument(
        "--seconds", type=float, default=540, help="of the whole program: each job begins nothing new near its end and is ended at it"
    )
    parser.add_argument("--json", type=Path, help="write everything there, and rows as they are made to the same name ending in .jsonl")
    parser.add_argument("--plot", type=Path, help="write PNG files into this directory (needs matplotlib)")
    parser.add_argument(
        "--from", dest="sources", type=Path, nargs="+", help="measure nothing: show and plot what --json wrote, of all FILEs"
    )
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, end)
    document = progress.read_document(options.sources) if options.sources else measure(options)
    if options.json:
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    show(document)
    if options.plot:
        for path in exchange_plot.plot(document, options.plot):
            print(path)


if __name__ == "__main__":
    main()
