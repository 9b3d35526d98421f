"""How an access comes to be known to other threads: the steps of releases, acquires and barriers that a replay wrote down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from . import layout as check
from .engine import block_of
from .findings import Access, authored, titled
from .instrument import AccessSite
from .run import Run

_SHOWN = 8


@dataclass(frozen=True)
class Step:
    """A thread that came to know the watched access.

    lane              of the thread (column << 8 | lane), as in Access
    launch            sequence number of the thread's launch
    released, took    the sites of the release and of the acquire; the same site twice at a barrier
    writer            lane of the releasing thread; -1 at a barrier
    number            the event of the run
    """

    lane: int
    launch: int
    block: int
    thread: int
    released: int
    took: int
    writer: int
    number: int


def spread(made: Run) -> list[Step]:
    """The steps of a run with `Tuning.watch`, in their order."""
    steps: list[Step] = []
    for row in made.machine.checker.trace:
        packed, launch, writer = int(row[check.T_THREAD]), int(row[check.T_LAUNCH]), int(row[check.T_WRITER])
        record = made.machine.checker.launches.get(launch)
        if record is not None:
            block, thread = block_of(packed, record)
            released, took = int(row[check.T_FROM]), int(row[check.T_SITE])
            steps.append(Step(packed >> 40, launch, block, thread, released, took, writer >> 40 if writer else -1, int(row[check.T_STEP])))
    return steps


def path_to(steps: Sequence[Step], position: int) -> list[Step]:
    """The steps that led to the one at `position`, itself the last."""
    path = [steps[position]]
    while True:
        last = path[0]
        earlier = [n for n in range(position) if _leads(steps[n], last)]
        if not earlier:
            return path
        # Of a block the step that brought it in, of a thread the latest.
        position = earlier[0] if last.writer < 0 else earlier[-1]
        path.insert(0, steps[position])


def _leads(step: Step, to: Step) -> bool:
    if to.writer >= 0:
        return step.lane == to.writer
    return step.writer >= 0 and (step.launch, step.block) == (to.launch, to.block)


def path_of(steps: Sequence[Step], lane: int) -> list[Step]:
    """The steps that led to a thread; empty where none did."""
    known = [n for n, step in enumerate(steps) if step.lane == lane]
    return path_to(steps, known[-1]) if known else []


def reached(first: Access, steps: Sequence[Step], made: Run) -> tuple[str, ...]:
    """The steps as a finding shows them: where the access was made, and each place of the source that handed it on."""
    shown = [f"{first.action} ({_base(first.file)}:{first.line})"]
    for step in steps:
        for number in dict.fromkeys((step.released, step.took)):
            site = made.machine.checker.site(number)[1]
            if isinstance(site, AccessSite) and site.places and (text := _shown(site)) not in shown:
                shown.append(text)
    return (*shown[:_SHOWN], "stops here")


def _shown(site: AccessSite) -> str:
    file, line, _ = authored(site.places)[0]
    return f"{titled(site)} ({_base(file)}:{line})"


def _base(path: str) -> str:
    return path.rsplit("/", 1)[-1]
