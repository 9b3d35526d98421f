"""Waiting for a device that may never be done: a kernel whose thread has given up can leave others at a barrier for ever.

No driver call that waits can be taken back, so the host asks again and again instead, and looks at what the kernels have reported.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Protocol

# How long a wait asks without a pause: most end sooner.
SPIN_SECONDS = 0.002
# A sleep is a share of the wait so far, so that the wait is late by no more than that.
_SLEEP_SHARE = 1 / 50
_LONGEST_SLEEP = 0.001
_SHORTEST_JOIN = 0.0002
GRACE_SECONDS = 1.0
"""How long a kernel may go on after the last record that one of its threads gave up."""
OLD_GRACE_SECONDS = 30.0
"""The same when the records were raised before, and may be another kernel's that has ended."""


def wait(done: Callable[[], bool], reported: Callable[[], tuple[int, int]]) -> bool:
    """Whether `done` came true. False when kernels have reported something, and nothing more for the grace.

    reported  how many records there are: that nobody has raised yet, and in all
    """
    if done():
        return True
    start = since = time.monotonic()
    seen = (0, 0)
    while not done():
        now = time.monotonic()
        found = reported()
        if found != seen:
            seen, since = found, now
        elif any(found) and now - since >= (GRACE_SECONDS if found[0] else OLD_GRACE_SECONDS):
            # This thread may have been away for that long.
            return done()
        # Even a sleep of nothing lets the program's other threads run.
        time.sleep(0 if now - start < SPIN_SECONDS else min((now - start) * _SLEEP_SHARE, _LONGEST_SLEEP))
    return True


def on_a_thread(call: Callable[[], None]) -> Callable[[], bool]:
    """Starts a call that may never return. What comes back says whether it has, and raises what it raised."""
    errors: list[BaseException] = []

    def body() -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    # A daemon: the interpreter must not wait for it at the end.
    thread = threading.Thread(target=body, name="epdsl-wait", daemon=True)
    thread.start()

    def done() -> bool:
        thread.join(_SHORTEST_JOIN)
        if thread.is_alive():
            return False
        if errors:
            raise errors[0]
        return True

    return done


class Unfinished(Protocol):
    """A device whose kernel did not end."""

    def ended(self) -> bool:
        """Whether it has ended by now."""
        ...


_unfinished: list[Unfinished] = []


def remember(device: Unfinished) -> None:
    """Has the end of this process not wait for the device."""
    end_without_waiting()
    if device not in _unfinished:
        _unfinished.append(device)


@cache
def end_without_waiting() -> None:
    """Has the end of this process wait for none of the devices that `remember` is told of."""
    atexit.register(_leave)


def _leave() -> None:
    if all(device.ended() for device in _unfinished):
        return
    names = ", ".join(repr(device) for device in _unfinished)
    with suppress(Exception):
        print(f"epdsl: a kernel still runs on {names}; this process ends without waiting for it", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
    # The driver's own clean-up would wait.
    os._exit(1)
