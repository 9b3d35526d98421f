"""Where tracebacks end: at the user's line, with EPDSL_DEBUG=1 where the error was raised."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
from epdsl_runtime.bootstrap import RankFailed
from epdsl_runtime.errors import CodedError, traceback_text

import epdsl as ep

HERE = Path(__file__).name


@ep.kernel
def wrong(out: ep.Ptr[ep.f32]):
    ep.store(out, 1.0, order=ep.ACQUIRE, scope=ep.SYSTEM)


@ep.kernel
def fine(out: ep.Ptr[ep.f32], n: ep.i32):
    ep.device_assert(n < 10, "n is {}", n)
    out[0] = 1.0


def compiles(rank: ep.Rank) -> None:
    wrong.compile("sm_90")  # the line of compiles


def compiles_at_launch(rank: ep.Rank) -> None:
    wrong.launch(rank, grid=1, block=32, args=(rank.zeros(ep.f32, 4),))  # the line of compiles_at_launch


def launches(rank: ep.Rank) -> None:
    fine.launch(rank, grid=1, block=33, args=(rank.zeros(ep.f32, 4), 1))  # the line of launches


def prepares(rank: ep.Rank) -> None:
    fine.prepare(rank, grid=1, block=32, args=(rank.zeros(ep.f32, 4), 0.5))  # the line of prepares


def asserts(rank: ep.Rank) -> None:
    fine.launch(rank, grid=1, block=32, args=(rank.zeros(ep.f32, 4), 12))
    rank.synchronize()  # the line of asserts


# What goes wrong, its code, the method the user called, and where the error is raised.
CASES: list[tuple[Callable[[ep.Rank], None], str, str, str]] = [
    (compiles, "EP042", "kernel_object.py", "memory.py"),
    (compiles_at_launch, "EP042", "kernel_object.py", "memory.py"),
    (launches, "EP203", "kernel_object.py", "launch.py"),
    (prepares, "EP208", "kernel_object.py", "binding.py"),
    (asserts, "EP302", "rank.py", "faults.py"),
]
EACH = pytest.mark.parametrize(("body", "code", "method", "origin"), CASES, ids=[case[0].__name__ for case in CASES])


def frames(body: Callable[[ep.Rank], None], code: str) -> list[str]:
    with pytest.raises(CodedError) as caught:
        body(ep.Rank(0, 1, ep.open_device("sim")))
    assert caught.value.code == code
    return [Path(frame.filename).name for frame in traceback.extract_tb(caught.value.__traceback__)]


@EACH
def test_only_the_called_method_stands_below_the_users_line(
    body: Callable[[ep.Rank], None], code: str, method: str, origin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert frames(body, code) == [HERE, HERE, method]
    monkeypatch.setenv("EPDSL_DEBUG", "1")
    assert frames(body, code)[:3] == [HERE, HERE, method] and frames(body, code)[-1] == origin


@EACH
def test_the_traceback_of_a_rank_ends_at_the_users_line(
    body: Callable[[ep.Rank], None], code: str, method: str, origin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def text() -> list[str]:
        with pytest.raises(RankFailed) as caught:
            ep.spawn(body, ranks=1, device="sim")
        return str(caught.value).splitlines()

    number, line = next(
        (n, t.strip()) for n, t in enumerate(Path(__file__).read_text().splitlines(), 1) if f"# the line of {body.__name__}" in t
    )
    lines = text()
    assert lines[:3] == [
        "EP310: rank 0 failed:",
        "Traceback (most recent call last):",
        f'  File "{__file__}", line {number}, in {body.__name__}',
    ]
    assert lines[3].strip() == line
    after = next(n for n, told in enumerate(lines[4:], 4) if not told.startswith("  "))
    assert f": {code}: " in lines[after] and not any(told.startswith("  File") for told in lines[4:after])
    monkeypatch.setenv("EPDSL_DEBUG", "1")
    full = "\n".join(text())
    assert "spawn.py" in full and origin in full


def test_an_error_of_the_users_own_keeps_its_whole_traceback() -> None:
    def main(rank: ep.Rank) -> None:
        rank.array("no numbers", ep.f32)

    with pytest.raises(RankFailed) as caught:
        ep.spawn(main, ranks=1, device="sim")
    text = str(caught.value)
    assert "spawn.py" not in text and f'{HERE}", line' in text and f"{Path('epdsl_runtime', 'rank.py')}" in text


def test_an_error_raised_by_this_project_alone_keeps_its_frames() -> None:
    try:
        ep.open_device("gpu")
    except ValueError as error:
        inner = error.with_traceback(error.__traceback__.tb_next if error.__traceback__ else None)
    text = traceback_text(inner)
    assert 'devices.py", line' in text and text.endswith("ValueError: " + str(inner) + "\n")
