"""A wait that ends when its time is up although what it waits for never comes."""

import time

import pytest
from epdsl_runtime import bounded_wait
from epdsl_runtime.bounded_wait import on_a_thread, wait


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(bounded_wait, "GRACE_SECONDS", 0.2)
    monkeypatch.setattr(bounded_wait, "OLD_GRACE_SECONDS", 0.6)


def timed(done, reported):
    start = time.monotonic()
    return wait(done, reported), time.monotonic() - start


def after(seconds):
    at = time.monotonic() + seconds
    return lambda: time.monotonic() >= at


def test_what_is_done_is_not_asked_twice():
    asked = []
    assert wait(lambda: asked.append(1) is None, lambda: pytest.fail("looked at the records")) and asked == [1]


@pytest.mark.parametrize("records", [(0, 0), (1, 1), (0, 3)])
def test_what_ends_within_the_grace_is_waited_for(records):
    found, seconds = timed(after(0.1), lambda: records)
    assert found and seconds >= 0.1


def test_without_a_record_there_is_no_end():
    found, seconds = timed(after(0.8), lambda: (0, 0))
    assert found and seconds >= 0.8


@pytest.mark.parametrize(("records", "least"), [((2, 2), 0.2), ((0, 2), 0.6)])
def test_a_kernel_that_goes_on_after_its_records_is_given_up(records, least):
    found, seconds = timed(lambda: False, lambda: records)
    assert not found and least <= seconds < least + 3


def test_every_new_record_begins_the_grace_anew():
    start = time.monotonic()
    # A record each tenth of a second, four in all.
    found, seconds = timed(lambda: False, lambda: (min(int((time.monotonic() - start) / 0.1), 4),) * 2)
    assert not found and 0.6 <= seconds < 3


def test_a_call_on_a_thread_gives_what_it_raised():
    done = on_a_thread(lambda: time.sleep(0.05))
    assert not done()
    assert wait(done, lambda: (0, 0))

    def broken():
        raise ValueError("of the call")

    with pytest.raises(ValueError, match="of the call"):
        wait(on_a_thread(broken), lambda: (0, 0))
