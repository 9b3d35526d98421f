"""benchmarks/exchange.py around what needs GPUs: the checks of its DeepEP peers on NumPy arrays in tensors' places, rows and tables."""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from epdsl.bench_job import Job, Settings
from epdsl.bench_routing import parse_routing

SMALL = Settings(hidden=256, experts=8, top_k=3, routing=parse_routing("uniform"))
PER_RANK = 6
ME = 1


@pytest.fixture(scope="module")
def exchange() -> Iterator[ModuleType]:
    folder = str(Path(__file__).parents[2] / "benchmarks")
    sys.path.insert(0, folder)
    try:
        yield importlib.import_module("exchange")
    finally:
        sys.path.remove(folder)


# ---- stand-ins

TYPES = {"int16": np.int16, "uint8": np.uint8, "bfloat16": ml_dtypes.bfloat16, "float8_e4m3fn": ml_dtypes.float8_e4m3fn}


class Tensor:
    """An array where a peer holds a tensor."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    @property
    def dtype(self) -> str:
        return next((name for name, kind in TYPES.items() if self.array.dtype == kind), str(self.array.dtype))

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, at: Any) -> Tensor:
        return Tensor(self.array[at])

    def view(self, name: str) -> Tensor:
        return Tensor(self.array.view(TYPES[name]))

    def copy_(self, other: Tensor) -> None:
        self.array[...] = other.array

    def cuda(self) -> Tensor:
        return self

    contiguous = cpu = cuda

    def numpy(self) -> np.ndarray:
        return self.array


TORCH = SimpleNamespace(
    **{name: name for name in TYPES},
    from_numpy=Tensor,
    full=lambda shape, value, dtype, device: Tensor(np.full(shape, value, TYPES[dtype])),
    empty_like=lambda other: Tensor(np.full_like(other.array, np.nan)),
    cuda=SimpleNamespace(
        current_device=lambda: 0,
        get_device_properties=lambda index: SimpleNamespace(multi_processor_count=132),
        synchronize=lambda: None,
        empty_cache=lambda: None,
    ),
    distributed=SimpleNamespace(group=SimpleNamespace(WORLD=None)),
)


def sums(job: Job, rank: int | None) -> np.ndarray:
    """What this rank's tokens get back from a rank's experts, or from all, a selection at a time."""
    made = np.zeros((PER_RANK, SMALL.hidden), np.float32)
    for t in range(PER_RANK):
        for expert, weight in zip(job.ids[job.mine][t], job.weights[job.mine][t], strict=True):
            if expert >= 0 and rank in (None, expert // 4):
                answer = job.tokens[job.mine][t].astype(np.float32) * (1.0, 1.5, 0.75)[expert % 4 % 3]
                made[t] += weight * answer.astype(ml_dtypes.bfloat16).astype(np.float32)
    return made.astype(ml_dtypes.bfloat16)


class Buffer:
    """DeepEP's for one of two ranks of a job: it answers with what would arrive. spoil: given the arrays of an answer to change."""

    job: Job
    spoil: Any = staticmethod(lambda *arrays: None)
    made: list[Buffer] = []  # noqa: RUF012
    sms = 0

    def __init__(self, group: Any, **options: Any) -> None:
        self.options, self.destroyed, self.calls = options, 0, []
        Buffer.made.append(self)

    @staticmethod
    def set_num_sms(count: int) -> None:
        Buffer.sms = count

    @staticmethod
    def get_dispatch_config(ranks: int) -> Any:
        sms = Buffer.sms
        return SimpleNamespace(sms=sms, get_nvl_buffer_size_hint=lambda row, ranks: sms * row * ranks)

    get_combine_config = get_dispatch_config

    @staticmethod
    def get_low_latency_rdma_size_hint(*sizes: int) -> int:
        return int(np.prod(sizes))

    def destroy(self) -> None:
        self.destroyed += 1

    def get_dispatch_layout(self, ids: Any, experts: int) -> tuple[Any, ...]:
        return (None,) * 5

    def dispatch(self, x: Any, handle: Any = None, config: Any = None, **layout: Any) -> tuple[Any, ...]:
        self.calls.append(config.sms)
        arrive = [n for n, ids in enumerate(self.job.ids) if any(i // 4 == ME for i in ids)]
        rows = [part[arrive].copy() for part in (self.job.quantised if isinstance(x, tuple) else (self.job.tokens,))]
        if handle:
            self.spoil(*rows)
        made = [Tensor(part) for part in rows]
        return tuple(made) if isinstance(x, tuple) else made[0], None, None, None, (config.sms,), None

    def combine(self, y: Any, handle: Any, config: Any) -> tuple[Any, ...]:
        assert handle == (config.sms,)
        parts = [sums(self.job, rank).astype(np.float32) for rank in range(2)]
        out = (parts[0] + parts[1]).astype(ml_dtypes.bfloat16)
        self.spoil(out)
        return Tensor(out), None, None

    def clean_low_latency_buffer(self, slots: int, hidden: int, experts: int) -> None:
        self.calls.append(slots)

    def low_latency_dispatch(self, x: Any, ids: Any, slots: int, experts: int, use_fp8: bool) -> tuple[Any, ...]:
        whole = self.job.quantised if use_fp8 else (self.job.tokens,)
        rows = [np.zeros((4, 2 * slots, part.shape[1]), part.dtype) for part in whole]
        sources, ranges, counts = np.full((4, 2 * slots), -1, np.int32), np.zeros((4, 2), np.int64), np.zeros(4, np.int32)
        for e in range(4):
            # Rank 1's rows first, each rank's in descending order: any order is right.
            for source in (1, 0):
                ranges[e, source] = int(counts[e]) << 32
                for t in reversed(range(PER_RANK)):
                    if ME * 4 + e in self.job.ids[source * PER_RANK + t]:
                        sources[e, counts[e]] = t
                        for part, taken in zip(rows, whole, strict=True):
                            part[e, counts[e]] = taken[source * PER_RANK + t]
                        counts[e] += 1
                        ranges[e, source] += 1
        self.spoil(*rows, sources, ranges, counts)
        made = [Tensor(part) for part in rows]
        return tuple(made) if use_fp8 else made[0], Tensor(counts), (Tensor(sources), Tensor(ranges), slots), None, None

    def low_latency_combine(self, y: Tensor, ids: Any, weights: Any, handle: tuple[Any, ...], out: Tensor) -> None:
        _, ranges, _ = handle
        used = np.isfinite(y.array.astype(np.float32)).all(axis=2).sum(axis=1)
        assert used.tolist() == [int((part & 0xFFFFFFFF).sum()) for part in ranges.array], "rows in use are numbers, the others are not"
        out.array[...] = sums(self.job, None)
        self.spoil(out.array)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> type[Buffer]:
    rank: Any = SimpleNamespace(index=ME, size=2)
    monkeypatch.setattr(Buffer, "job", Job(rank, PER_RANK, SMALL), raising=False)
    monkeypatch.setattr(Buffer, "made", [])
    monkeypatch.setitem(sys.modules, "deep_ep", SimpleNamespace(Buffer=Buffer))  # pyright: ignore[reportArgumentType]
    return Buffer


def phases(exchange: ModuleType, name: str, sweep: tuple[int, ...] = ()) -> Any:
    return exchange.PEERS[name](TORCH, Buffer.job, exchange.peers.Work(SMALL, sweep))


# ---- DeepEP


def test_normal_mode_is_checked_with_every_usable_number_of_multiprocessors(exchange: ModuleType, library: type[Buffer]) -> None:
    seen: list[tuple[str, str, int]] = []
    for phase in phases(exchange, "DeepEP", (8, 24, 33, 132, 134)):
        phase.launch()
        phase.check()
        seen.append((phase.phase, phase.format, phase.sms))
    each = [("dispatch", "bf16"), ("combine", "bf16"), ("dispatch", "fp8")]
    # Pairs of multiprocessors, of which the device has 132; the number of its authors first.
    assert seen == [(*which, sms) for sms in (24, 8, 132) for which in each]
    (made,) = library.made
    assert made.destroyed == 1 and made.options["num_nvl_bytes"] == 132 * 512 * 2
    # With each number once for the handle, then as timed.
    assert made.calls == [24] * 3 + [8] * 3 + [132] * 3


def test_low_latency_mode_is_checked_and_keeps_its_buffer(exchange: ModuleType, library: type[Buffer]) -> None:
    for _ in range(2):
        seen = []
        for phase in phases(exchange, "DeepEP low-latency"):
            phase.launch()
            phase.check()
            seen.append((phase.phase, phase.format, phase.sms))
        assert seen == [("dispatch", "fp8", None), ("dispatch", "bf16", None), ("combine", "bf16", None)]
    (made,) = library.made
    # Six tokens of each rank have eight slots.
    assert made.calls == [8, 8] and made.destroyed == 0 and made.options["num_qps_per_rank"] == 4
    exchange.deepep.close()
    assert made.destroyed == 1


def test_low_latency_mode_is_not_asked_for_more_tokens_than_its_buffers_hold(exchange: ModuleType, library: type[Buffer]) -> None:
    library.job.per_rank = exchange.deepep.LOW_LATENCY_MOST + 1
    assert list(phases(exchange, "DeepEP low-latency")) == [] and library.made == []


def flip(*arrays: np.ndarray) -> None:
    """The last bit of the last array's last row in use."""
    last = arrays[-1].reshape(-1, arrays[-1].shape[-1])
    used = np.flatnonzero(last.view(np.uint8).any(axis=1))[-1]
    last.view(np.uint8)[used, 0] ^= 0x40


def flip_rows(*arrays: np.ndarray) -> None:
    flip(*(arrays[:-3] if len(arrays) > 3 else arrays))


def lose_a_token(*arrays: np.ndarray) -> None:
    """One of an expert's rows is said to be of another token."""
    sources = arrays[-3]
    sources[0, 0] = (sources[0, 0] + 1) % PER_RANK


def miscount(*arrays: np.ndarray) -> None:
    arrays[-1][0] += 1


@pytest.mark.parametrize(
    ("name", "number", "spoil", "text"),
    [
        ("DeepEP", 0, flip_rows, "rank 1: rows of rows"),
        ("DeepEP", 1, flip_rows, "rank 1: combine differs"),
        ("DeepEP", 2, flip_rows, "rank 1: scales of rows"),
        ("DeepEP low-latency", 0, flip_rows, "rank 1: scales for local expert 3"),
        ("DeepEP low-latency", 1, flip_rows, "rank 1: elements for local expert 3"),
        ("DeepEP low-latency", 1, lose_a_token, "rank 1: wrong tokens for local expert 0"),
        ("DeepEP low-latency", 0, miscount, "rank 1: wrong tokens for local expert 0"),
        ("DeepEP low-latency", 2, flip_rows, "rank 1: combine differs"),
    ],
)
def test_the_checks_see_what_is_wrong(
    exchange: ModuleType, library: type[Buffer], name: str, number: int, spoil: Any, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = phases(exchange, name)
    for at, phase in enumerate(running):
        if at == number:
            monkeypatch.setattr(library, "spoil", staticmethod(spoil))
            phase.launch()
            with pytest.raises(AssertionError, match=text):
                phase.check()
            break
        phase.launch()
        phase.check()
    running.close()
    exchange.deepep.close()
    assert library.made[0].destroyed == 1


def test_where_each_row_came_from(exchange: ModuleType) -> None:
    sources = np.array([[4, 2, 9, -1], [-1, -1, -1, -1]], np.int32)
    # Rank 1's row comes first, then rank 0's two; nothing for the other expert.
    ranges = np.array([[(1 << 32) | 2, 1], [0, 0]], np.int64)
    assert [part.tolist() for part in exchange.deepep.arrivals(sources, ranges, 10)] == [[14, 2, 9], []]
    assert [exchange.deepep.padded(n) for n in (1, 4, 5, 128)] == [4, 4, 8, 128]


def test_deepep_that_is_missing_is_a_row_that_says_how_to_build_it(exchange: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert set(exchange.MISSING) == {"DeepEP", "DeepEP low-latency"}
    assert all("deepseek-ai/DeepEP" in missing() and "pip install" in missing() for missing in exchange.MISSING.values())


# ---- the program


def test_peers_with_a_runtime_of_their_own_get_a_job_each(exchange: ModuleType) -> None:
    assert exchange.groups(["DeepEP low-latency", "DeepEP", "PyTorch all_to_all_vdev"]) == [
        ("DeepEP",),
        ("DeepEP low-latency",),
        ("PyTorch all_to_all_vdev",),
    ]
    assert exchange.groups([]) == [()]


def test_what_is_timed_of_ours(exchange: ModuleType) -> None:
    def made(*modes: str) -> list[tuple[Any, ...]]:
        return [(c.mode, c.tokens, c.fp8, c.blocks) for c in exchange.our_cases(modes, (128, 4096), (24,), 4096)]

    assert made("latency") == [("latency", 128, True, None), ("latency", 128, False, None)] and made("") == []
    both = [(128, False, None), (128, True, None), (4096, False, None), (4096, True, None), (4096, False, 24), (4096, True, 24)]
    assert made("throughput") == [("throughput", *each) for each in both]
    assert len(made("latency", "throughput", "expert-major")) == 14
    case = exchange.Case("expert-major", 4096, True, 24)
    assert exchange.named(case) == "epdsl expert-major FP8, 4096 tokens, 24 blocks"


# ---- the time it takes


@pytest.mark.parametrize(
    ("later", "now", "ends", "killed"),
    [
        # Alone it has all of the time, and 15 seconds at the end for what is under way.
        (0, 100.0, 185.0, 200.0),
        # Two later jobs keep 60 s each, or as much as this one where there is less.
        (2, 0.0, 65.0, 80.0),
        (1, 100.0, 137.5, 150.0),
        (1, 172.0, 182.5, 186.0),
    ],
)
def test_share_of_a_job(exchange: ModuleType, later: int, now: float, ends: float, killed: float) -> None:
    assert exchange.progress.share(0.0, 200.0, later, now) == exchange.progress.Limits(0.0, ends, killed - 2, killed)


def test_a_job_without_time_is_not_started(exchange: ModuleType) -> None:
    assert exchange.progress.share(0.0, 200.0, 0, 191.0) is None and exchange.progress.share(0.0, 200.0, 1, 181.0) is None


def test_rows_and_what_is_begun_are_seen_at_once(exchange: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path, now, late = tmp_path / "rows.jsonl", time.monotonic(), [False, False]
    rank = SimpleNamespace(index=0, size=2, allgather=lambda mine: [mine, *late])
    out = exchange.progress.Writer(rank, path, exchange.progress.Limits(now, now + 600, now, now + 1))
    with out.watched():
        assert out.begin("theirs")
        out.write({"peer": "DeepEP", "name": "DeepEP combine", "less_empty": 12.34}, exchange.failed("NCCL", "no network", 128))
        late[1] = True
        # The other rank's time is up.
        assert not out.begin("others") and out.skipped == ["others"]
        time.sleep(0.8)
    seen = capfd.readouterr().err
    assert "0.0 s: theirs" in seen and "DeepEP combine: 12.3 us" in seen and "NCCL: no network" in seen and "others" not in seen
    assert "Timeout" in seen and "test_rows_and_what_is_begun_are_seen_at_once" in seen
    assert exchange.progress.read_rows(path)[1] == {"peer": "NCCL", "tokens": 128, "failed": "no network"}
    # Another rank writes nothing.
    rank.index = 1
    out.write({"peer": "x"})
    assert len(exchange.progress.read_rows(path)) == 2 and not capfd.readouterr().err


def measured(exchange: ModuleType, monkeypatch: pytest.MonkeyPatch, folder: Path, peers: str, *ends: BaseException | None) -> list[Any]:
    """The rows of a program whose jobs write a row each and end so. Its first job is ours alone where there is no peer to go with it."""
    ending = iter(ends)

    def spawn(main: Any, ranks: int, device: str, args: tuple[Any, ...], timeout: float) -> None:
        _, cases, asked, path, limits = args
        assert main is exchange.run and 0 < timeout <= 90 and limits.killed <= limits.started + 91
        rates = [{"peer": "", "name": "link", "link_gb_s": 3.0 + bool(asked.names)}]
        exchange.progress.add_rows(path, [*rates, {"peer": ", ".join(asked.names) or f"ours {len(cases)}", "tokens": 1}])
        if error := next(ending):
            raise error

    monkeypatch.setattr("epdsl_runtime.spawn.spawn", spawn)
    monkeypatch.setattr(exchange, "MISSING", {"gone": lambda: "not here"})
    monkeypatch.setattr(exchange, "described", lambda options: {"ranks": options.ranks})
    monkeypatch.setattr(exchange, "APART", ("apart",))
    options = {"tokens": "1,4096", "sweep": "", "sweep_tokens": 4096, "modes": "latency", "peers": peers, "routing": "uniform"}
    document = exchange.measure(SimpleNamespace(**options, ranks=2, repetitions=5, seconds=90, json=folder / "found.json"))
    assert document["about"] == {"ranks": 2}
    assert document["rows"] == exchange.progress.read_document([folder / "found.jsonl"])["rows"]
    return document["rows"]


def test_a_job_that_ends_early_leaves_its_rows(exchange: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert measured(exchange, monkeypatch, tmp_path, "gone,apart", TimeoutError("more than 30 s"), None) == [
        {"peer": "gone", "tokens": 0, "failed": "not here"},
        {"peer": "", "name": "link", "link_gb_s": 3.0},
        {"peer": "ours 2", "tokens": 1},
        {"peer": "epdsl", "tokens": 0, "failed": "TimeoutError: more than 30 s"},
        {"peer": "apart", "tokens": 1},
    ]


def test_a_program_that_is_ended_shows_what_it_has(exchange: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert measured(exchange, monkeypatch, tmp_path, "apart", KeyboardInterrupt()) == [
        {"peer": "", "name": "link", "link_gb_s": 3.0},
        {"peer": "ours 2", "tokens": 1},
        {"peer": "", "tokens": 0, "failed": "ended after 0 s, before all was measured"},
    ]


def test_rows_of_several_runs_are_shown_together(exchange: ModuleType, tmp_path: Path) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.jsonl"
    first.write_text(json.dumps({"about": {"date": "today"}, "rows": [{"peer": "ours"}]}))
    second.write_text('{"peer": "theirs"}\n')
    assert exchange.progress.read_document([second, first]) == {"about": {"date": "today"}, "rows": [{"peer": "theirs"}, {"peer": "ours"}]}


def test_a_peer_that_fails_is_a_row_and_is_closed(exchange: ModuleType, library: type[Buffer], monkeypatch: pytest.MonkeyPatch) -> None:
    """The second check fails on the other rank alone: this rank leaves the peer with it."""
    said: list[str] = []

    def allgather(text: str) -> list[str]:
        said.append(text)
        return ["AssertionError: theirs" if len(said) == 4 else "", text]

    timing = SimpleNamespace(median_us=15.0, least_us=14.0, most_us=16.0, less_empty=10.0)
    watch = SimpleNamespace(
        rank=SimpleNamespace(allgather=allgather), time=lambda launch, pause: timing, rates=lambda: SimpleNamespace(link=100.0)
    )
    rows = list(exchange.time_peer(watch, exchange.peers.Work(SMALL), TORCH, "DeepEP", library.job))
    assert rows[1:] == [{"peer": "DeepEP", "tokens": PER_RANK, "failed": "AssertionError: theirs"}]
    assert library.made[0].destroyed == 1 and said == [""] * 5
    assert rows[0]["name"] == "DeepEP dispatch BF16, 6 tokens" and rows[0]["blocks"] == 24


def test_bytes_of_a_row_and_of_a_link(exchange: ModuleType, library: type[Buffer], monkeypatch: pytest.MonkeyPatch) -> None:
    assert (exchange.peers.row_bytes("bf16", 7168), exchange.peers.row_bytes("fp8", 7168)) == (14336, 7392)
    monkeypatch.setattr(library.job, "traffic", SimpleNamespace(busiest_link_rows=1000))
    phase = exchange.peers.Phase("dispatch", print, print, 2_000_000, 24, "fp8", 528_000)
    row = exchange.row_of("DeepEP", SMALL, library.job, phase, {"less_empty": 4.0}, 132.0)
    # A row is 256 bytes and 2 scales: 264,000 bytes in 4 us, at 132 GB/s 2 us.
    assert (row["remote_gb_s"], row["own_gb_s"], row["sent_mb"]) == pytest.approx((66.0, 132.0, 2.0))
    assert (row["link_floor_us"], row["share_of_floor"], row["format"]) == (pytest.approx(2.0), pytest.approx(0.5), "fp8")


def test_time_of_more_tokens(exchange: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    def row(peer: str, tokens: int, took: float) -> dict[str, Any]:
        name = f"{peer} dispatch BF16, {tokens} tokens"
        made = {"peer": peer, "phase": "dispatch", "format": "bf16", "tokens": tokens, "less_empty": took, "name": name, "blocks": 24}
        return {**made, "remote_gb_s": 3.0, "link_floor_us": took / 4, "own_gb_s": 0.0}

    rows = [row("ours", *at) for at in ((128, 9.0), (4096, 200.0), (4096, 160.0), (8192, 312.0), (16384, 632.0))]
    rows += [row("theirs", 4096, 300.0), row("others", 8192, 1.0), {"peer": "", "name": "empty kernel", "less_empty": 0.0}]
    # Against the better of the two measurements of 4096 tokens.
    assert exchange.growth(rows) == [("ours dispatch BF16", {8192: pytest.approx(1.95), 16384: pytest.approx(3.95)})]
    exchange.show({"about": {}, "rows": [*rows, {"peer": "DeepEP", "tokens": 0, "failed": "not here"}]})
    printed = capsys.readouterr().out
    assert "8192 tokens, linear 2.0" in printed and "1.95" in printed and "3.95" in printed and "DeepEP : not here" in printed
