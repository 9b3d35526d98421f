"""Context words written by hand, read as exceptions and as printf lines."""

import io
import pickle

import numpy as np
import pytest
from epdsl_runtime import context_layout as layout
from epdsl_runtime.artifact import Artifact, Site
from epdsl_runtime.faults import DeviceAssertionError, Diagnostics, KernelFault, PeerTimeout, format_values

SITES = (
    Site("wait", "moe.py", 41, 4, "wait_for", "v == epoch", ("i32",)),
    Site("assert", "moe.py", 52, 4, "check", "row {} of {}", ("i32", "u32")),
    Site("printf", "moe.py", 60, 4, "say", "sum %5.2f of %u, mask %llx", ("f32", "u32", "u64")),
)
KERNEL = Artifact("dispatch", "sm_90", "nvidia", 32, (), 0, SITES, b"")


def context(rank: int = 3) -> np.ndarray:
    words = np.zeros(layout.CONTEXT_WORDS, np.uint64)
    words[layout.RANK] = rank
    return words


def put_fault(
    words: np.ndarray, position: int, kind: int, site: int, block: int, thread: int, values: tuple[int, int, int], ready: int = 1
) -> None:
    at = layout.FAULT_BASE + position * layout.FAULT_WORDS
    words[at : at + 8] = [kind, KERNEL.site_tag << 32 | site, block, thread, *(v & (1 << 64) - 1 for v in values), ready]
    words[layout.FAULT_COUNT] += np.uint64(1)


def put_log(words: np.ndarray, position: int, site: int, block: int, thread: int, values: list[int], ready: int = 1) -> None:
    if position < layout.LOG_CAPACITY:
        at = layout.LOG_BASE + position * layout.LOG_WORDS
        words[at : at + 4 + len(values)] = [KERNEL.site_tag << 32 | site, block, thread, ready, *values]
    words[layout.LOG_COUNT] += np.uint64(1)


@pytest.fixture
def diagnostics() -> Diagnostics:
    made = Diagnostics()
    made.register(KERNEL)
    return made


def test_a_timeout_names_everything(diagnostics):
    words = context()
    diagnostics.name_buffer(0x7000, 256, "flags (u32 [64]) of rank 1")
    put_fault(words, 0, layout.KIND_TIMEOUT, 0, 5, 96, (0x7010, 9, -2))
    with pytest.raises(PeerTimeout) as caught:
        diagnostics.check(words)
    text = str(caught.value)
    for part in (
        "rank 3",
        "dispatch",
        "moe.py:41",
        "block 5 thread 96",
        "v == epoch",
        "compared with 9",
        "0x7010",
        "flags (u32 [64]) of rank 1 + 16 bytes",
        "last value: -2",
    ):
        assert part in text
    report = caught.value.report
    assert (report.rank, report.block, report.thread, report.address, report.expected) == (3, 5, 96, 0x7010, 9)
    assert words[layout.FAULT_COUNT] == 0 and words[layout.RANK] == 3
    diagnostics.check(words)


def test_the_first_fault_is_told_and_the_others_counted(diagnostics):
    words = context()
    for position in range(layout.FAULT_CAPACITY):
        put_fault(words, position, layout.KIND_ASSERT, 1, position, 0, (0, 8, 7))
    words[layout.FAULT_COUNT] = 1000
    with pytest.raises(DeviceAssertionError, match=r"row 7 of 8\n  and 999 more faults") as caught:
        diagnostics.check(words)
    assert (caught.value.report.block, caught.value.count) == (0, 1000)


def test_a_fault_of_an_unknown_kernel_is_still_told():
    words = context()
    put_fault(words, 0, layout.KIND_TIMEOUT, 0, 1, 2, (3, 4, 5))
    with pytest.raises(PeerTimeout, match="unknown place"):
        Diagnostics().check(words)


def test_a_record_left_incomplete_is_told_as_such(diagnostics):
    words = context()
    put_fault(words, 0, layout.KIND_TIMEOUT, 0, 1, 2, (3, 4, 5), ready=0)
    diagnostics.check(words, idle=False)
    with pytest.raises(PeerTimeout, match="left incomplete"):
        diagnostics.check(words)


def test_while_kernels_run_records_are_read_once_and_left_in_place(diagnostics):
    words, out = context(), io.StringIO()
    put_log(words, 0, 2, 0, 1, [0x4004_0000_0000_0000, 3, 255])
    put_log(words, 1, 2, 0, 2, [0, 0, 0], ready=0)
    put_fault(words, 0, layout.KIND_ASSERT, 1, 0, 0, (0, 2, 1))
    with pytest.raises(DeviceAssertionError):
        diagnostics.check(words, idle=False, out=out)
    assert out.getvalue() == "[rank 3 block 0 thread 1] sum  2.50 of 3, mask ff\n"
    diagnostics.check(words, idle=False, out=out)
    assert words[layout.LOG_COUNT] == 2 and words[layout.FAULT_COUNT] == 1
    put_fault(words, 1, layout.KIND_TIMEOUT, 0, 9, 0, (1, 2, 0))
    words[layout.LOG_BASE + layout.LOG_WORDS + layout.LOG_READY] = 1
    with pytest.raises(PeerTimeout) as caught:
        diagnostics.check(words, out=out)
    assert (caught.value.report.block, caught.value.count) == (9, 1)
    assert out.getvalue().splitlines()[1:] == ["[rank 3 block 0 thread 2] sum  0.00 of 0, mask 0"]
    assert words[layout.LOG_COUNT] == 0 and words[layout.FAULT_COUNT] == 0


def test_a_complete_record_of_a_running_kernel_counts_before_its_counter_arrives(diagnostics):
    words = context()
    assert diagnostics.reported(words) == (0, 0)
    put_fault(words, 0, layout.KIND_TIMEOUT, 0, 5, 96, (0x7010, 9, 0), ready=0)
    put_fault(words, 1, layout.KIND_TIMEOUT, 0, 6, 97, (0x7010, 9, 0))
    words[layout.FAULT_COUNT] = 0
    assert diagnostics.reported(words) == (1, 2) and diagnostics.reporters(words) == [(6, 97)]
    with pytest.raises(PeerTimeout, match="block 6 thread 97") as caught:
        diagnostics.check(words, idle=False)
    assert diagnostics.last is caught.value and diagnostics.reported(words) == (0, 2)
    words[layout.FAULT_COUNT] = 2
    diagnostics.check(words)
    assert diagnostics.reported(words) == (0, 0)


def test_lost_log_records_are_counted(diagnostics):
    words, out = context(), io.StringIO()
    for position in range(layout.LOG_CAPACITY + 5):
        put_log(words, position, 2, 0, position, [0, 0, 0])
    diagnostics.check(words, out=out)
    lines = out.getvalue().splitlines()
    assert len(lines) == layout.LOG_CAPACITY + 1
    assert lines[-1] == "[rank 3] 5 printf records lost: a device holds 2048 between two synchronisations"


def test_kernels_that_share_a_tag_are_both_mentioned(diagnostics):
    other = Artifact("dispatch", "sm_90", "nvidia", 32, (), 0, (Site("wait", "b.py", 1, 0, "f", "x", ()),), b"")
    diagnostics.register(other)
    words = context()
    put_fault(words, 0, layout.KIND_TIMEOUT, 0, 1, 2, (3, 4, 5))
    with pytest.raises(PeerTimeout, match="1 other kernel"):
        diagnostics.check(words)


def test_a_fault_survives_pickling(diagnostics):
    words = context()
    put_fault(words, 0, layout.KIND_TIMEOUT, 0, 1, 2, (3, 4, 5))
    with pytest.raises(KernelFault) as caught:
        diagnostics.check(words, detail="the driver said so")
    again = pickle.loads(pickle.dumps(caught.value))
    assert type(again) is PeerTimeout and str(again) == str(caught.value) and "the driver said so" in str(again)


@pytest.mark.parametrize(
    ("text", "values", "wanted"),
    [
        ("{} and {:.1f}", [1, 2.0], "1 and 2.0"),
        ("{1} {0}", [1, 2], "2 1"),
        ("%d%% of %s", [5, 6], "5% of 6"),
        ("%lu %zd %p", [1, -2, 255], "1 -2 0xff"),
        ("no values", [], "no values"),
        ("100%", [], "100%"),
        ("set {1,2}", [], "set {1,2}"),
        ("too few {} {}", [1], "too few {} {} 1"),
        ("plain", [1, 2], "plain 1 2"),
    ],
)
def test_formats(text, values, wanted):
    assert format_values(text, values) == wanted
