"""Dispatch, experts and combine captured once and replayed with other routing, in every mode; and what no graph can hold."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from epdsl_runtime import CaptureError, PeerTimeout

import epdsl as ep
from epdsl.moe import ExpertParallel
from epdsl.moe_low_latency import LowLatencyMoE
from epdsl.moe_throughput import ThroughputMoE

HIDDEN, EXPERTS, TOP_K, TOKENS = 256, 8, 2, 6


@ep.kernel
def scale_slots(rows: ep.Ptr[ep.bf16], y: ep.Ptr[ep.bf16], counts: ep.Ptr[ep.i32], capacity: ep.i32, hidden: ep.i32, first: ep.i32):
    """y = rows * (1 + expert), where expert e of this rank has counts[e] rows from e * capacity on."""
    for e in range(ep.block_idx.x, ep.grid_dim.x, ep.grid_dim.x):
        for i in range(ep.thread_idx.x, counts[e] * hidden, ep.block_dim.x):
            at = e * capacity * hidden + i
            y[at] = ep.bf16(ep.f32(rows[at]) * ep.f32(1 + first + e))


@ep.kernel
def scale_ranges(rows: ep.Ptr[ep.bf16], y: ep.Ptr[ep.bf16], starts: ep.Ptr[ep.u32], counts: ep.Ptr[ep.i32], hidden: ep.i32, first: ep.i32):
    """The same where expert e's rows begin at starts[e]."""
    e = ep.block_idx.x
    for i in range(ep.thread_idx.x, counts[e] * hidden, ep.block_dim.x):
        at = ep.i32(starts[e]) * hidden + i
        y[at] = ep.bf16(ep.f32(rows[at]) * ep.f32(1 + first + e))


@ep.kernel
def scale_summed(
    rows: ep.Ptr[ep.bf16],
    y: ep.Ptr[ep.bf16],
    ids: ep.Ptr[ep.i32],
    weights: ep.Ptr[ep.f32],
    n_rows: ep.Ptr[ep.i32],
    hidden: ep.i32,
    first: ep.i32,
    top_k: ep.Const[int],  # pyright: ignore[reportInvalidTypeForm]
):
    """y[row] = rows[row] * the sum of weight * (1 + expert) over this rank's selections."""
    for row in range(ep.block_idx.x, n_rows[0], ep.grid_dim.x):
        factor = ep.f32(0.0)
        for k in range(top_k):
            if ids[row * top_k + k] >= 0:
                factor += weights[row * top_k + k] * ep.f32(1 + first + ids[row * top_k + k])
        for i in range(ep.thread_idx.x, hidden, ep.block_dim.x):
            y[row * hidden + i] = ep.bf16(ep.f32(rows[row * hidden + i]) * factor)


def layer_of(rank: ep.Rank, mode: str, timeout_ns: int = 10**10, experts: int = EXPERTS) -> Any:
    shape = {"hidden": HIDDEN, "n_experts": experts, "top_k": TOP_K, "max_tokens_per_rank": TOKENS, "timeout_ns": timeout_ns}
    if mode == "latency":
        return LowLatencyMoE(rank, **shape, fp8=False, n_blocks=3, num_threads=64)
    if mode == "stamps":
        return LowLatencyMoE(rank, **shape, fp8=False, num_threads=64, protocol="stamps")
    if mode == "throughput":
        return ThroughputMoE(rank, **shape, n_blocks=2, num_threads=256)
    return ExpertParallel(rank, **shape, num_threads=128, n_sms=4)


class Step:
    """One exchange with experts that multiply by 1 + their number; everything it needs is made before."""

    def __init__(self, rank: ep.Rank, layer: Any, mode: str, tokens: int, experts: int = EXPERTS) -> None:
        self.rank, self.layer, self.mode = rank, layer, mode
        self.x = rank.zeros("bf16", (tokens, HIDDEN))
        self.ids = rank.array(np.full((tokens, TOP_K), -1, np.int32))
        self.weights = rank.zeros("f32", (tokens, TOP_K))
        self.out = rank.zeros("bf16", (tokens, HIDDEN))
        local = experts // rank.size
        shape = {
            "latency": (local, rank.size * TOKENS, HIDDEN),
            "stamps": (local, rank.size * TOKENS, HIDDEN),
            "throughput": (rank.size * TOKENS, HIDDEN),
            "base": (getattr(getattr(layer, "config", None), "max_recv_tokens", 0), HIDDEN),
        }[mode]
        self.y = rank.zeros("bf16", shape)
        self.local, self.first = local, rank.index * local

    def __call__(self) -> Any:
        rank = self.rank
        h = self.layer.dispatch(self.x, self.ids, self.weights)
        if self.mode in ("latency", "stamps"):
            args = (h.rows, self.y, h.expert_counts, rank.size * TOKENS, HIDDEN, self.first)
            scale_slots.launch(rank, grid=self.local, block=64, args=args)
        elif self.mode == "throughput":
            args = (h.rows, self.y, h.topk_idx, h.weights, h.rank_rows[rank.size :], HIDDEN, self.first, TOP_K)
            scale_summed.launch(rank, grid=2, block=64, args=args)
        else:
            args = (h.output, self.y, h.row_offsets, h.expert_counts, HIDDEN, self.first)
            scale_ranges.launch(rank, grid=self.local, block=64, args=args)
        self.layer.combine(self.y, h, out=self.out)
        return h

    def fill(self, seed: int, number: int) -> np.ndarray:
        """Other tokens and routing; returns what the combine must give. All numbers are small enough to be exact in bf16."""
        rng = np.random.default_rng([seed, number, self.rank.index])
        n = self.x.shape[0]
        x = rng.integers(-2, 3, (n, HIDDEN)).astype(np.float32)
        ids = np.argsort(rng.random((n, EXPERTS)), axis=1)[:, :TOP_K].astype(np.int32)
        ids[rng.random(ids.shape) < 0.2] = -1
        # Fewer tokens than were captured: the others have no selection.
        ids[rng.integers(0, n + 1) :] = -1
        weights = rng.choice(np.array([0.5, 1.0, 2.0], np.float32), (n, TOP_K))
        for array, value in ((self.x, x.astype(ml_dtypes.bfloat16)), (self.ids, ids), (self.weights, weights)):
            array.copy_from(value)
        return x * (weights * (ids + 1)).sum(axis=1, keepdims=True)

    def check(self, expected: np.ndarray, note: str) -> None:
        np.testing.assert_array_equal(self.out.numpy().astype(np.float32), expected, err_msg=note)


def replays(rank: ep.Rank, mode: str, seed: int, count: int) -> None:
    layer = layer_of(rank, mode)
    large, small = Step(rank, layer, mode, TOKENS), Step(rank, layer, mode, TOKENS - 2)
    for step in (large, small):
        expected = step.fill(seed, 0)
        step()
        rank.barrier()
        step.check(expected, f"{mode} seed {seed}: before the capture")
    graphs = []
    for step in (large, small):
        step.out.fill_bytes(0x7F)
        with rank.capture() as graph:
            step()
        rank.synchronize()
        assert graph.kernels == 3 and (step.out.numpy().view(np.uint16) == 0x7F7F).all(), "a capture ran something"
        graphs.append((step, graph))
    for number in range(1, count + 1):
        # Two graphs and launches of their own share the layer, in an order that is no pattern of two.
        kind = (number * number) % 5
        step, graph = graphs[kind % 2]
        expected = step.fill(seed, number)
        if kind == 4:
            step()
        else:
            graph.replay()
        rank.synchronize()
        step.check(expected, f"{mode} seed {seed} replay {number} rank {rank.index}")
    step, graph = graphs[0]
    expected = step.fill(seed, 99)
    for _ in range(3):
        graph.replay()
    rank.synchronize()
    step.check(expected, f"{mode}: replays without a wait between them")
    rank.barrier()
    layer.close()
    with pytest.raises(CaptureError, match="uses memory that was freed since its capture"):
        graph.replay()
    graph.close()
    with pytest.raises(CaptureError, match="closed> cannot be replayed"):
        graph.replay()


@pytest.mark.parametrize("mode", ["latency", "stamps", "throughput", "base"])
def test_replays_with_other_routing(device_name: str, mode: str) -> None:
    ep.spawn(replays, ranks=2, device=device_name, args=(mode, 17, 6))


@ep.kernel
def count_up(p: ep.Ptr[ep.i32], by: ep.i32):
    if ep.thread_idx.x == 0:
        p[0] += by


@ep.kernel
def never_launched(p: ep.Ptr[ep.i32]):
    if ep.thread_idx.x == 0:
        p[0] = 1


def refusals(rank: ep.Rank) -> None:
    array = rank.zeros("i32", 1)
    buffer = rank.symmetric("i32", 1)
    stream, event = rank.device.stream(), rank.device.event()
    event.record()
    prepared = count_up.prepare(rank, grid=1, block=64, args=(array, 1))
    cases = {
        "an allocation of 4 bytes on": lambda: rank.empty("i32", 1),
        "an upload of 4 bytes on": lambda: array.copy_from(np.zeros(1, np.int32)),
        "a synchronisation on": lambda: array.numpy(),
        "a download of 4 bytes on": lambda: rank.device.download(np.zeros(1, np.int32), array.address),
        "a free on": lambda: array.free(),
        "a wait for an event on": lambda: event.synchronize(),
        "work for another stream on": lambda: count_up.launch(rank, grid=1, block=64, args=(array, 1), stream=stream),
        "the loading of never_launched on": lambda: never_launched.launch(rank, grid=1, block=64, args=(array,)),
        r"a meeting of the ranks \(allgather\) on": lambda: rank.allgather(1),
        r"a synchronisation on ": lambda: rank.release(buffer),
        "another capture on": lambda: rank.capture().__enter__(),
        "nothing was launched on": lambda: None,
    }
    for text, refused in cases.items():
        with pytest.raises(CaptureError, match=text):
            with rank.capture() as graph:
                refused()
        with pytest.raises(CaptureError, match="its capture failed> cannot be replayed"):
            graph.replay()
    with pytest.raises(ZeroDivisionError):
        with rank.capture():
            prepared()
            _ = 1 // 0
    # After every failure the device works as before, and what is captured by a prepared launch counts at each replay.
    with rank.capture() as graph:
        prepared.set(by=10)()
        array.view("i32")
        count_up.launch(rank, grid=1, block=64, args=(array, 1))
    prepared.set(by=100)()
    graph.replay()
    graph.replay()
    rank.synchronize()
    assert array.numpy().tolist() == [122]
    with pytest.raises(CaptureError, match=r"the replay of a graph on .* launch its kernels in the capture too"):
        with rank.capture():
            graph.replay()
    with pytest.raises(CaptureError, match=r"do it before the capture|hand it out before the capture"):
        with rank.capture():
            array.__dlpack__()
    with rank.capture() as outer:
        array.zero()
        prepared.set(by=5)()
    outer.replay()
    assert array.numpy().tolist() == [5]


def test_what_no_graph_can_hold(device_name: str) -> None:
    ep.spawn(refusals, ranks=1, device=device_name)


def filled_in_a_graph(rank: ep.Rank) -> None:
    """What a graph fills lives as long as the graph, as what its launches use does."""
    array, filled = rank.zeros("i32", 1), rank.zeros("u8", 1 << 20)
    count_up.launch(rank, grid=1, block=64, args=(array, 1))
    rank.synchronize()
    with rank.capture() as graph:
        filled[16:].fill_bytes(3)
        count_up.launch(rank, grid=1, block=64, args=(array, 1))
    held = weakref.ref(filled._owner)
    del filled
    gc.collect()
    rank.synchronize()
    assert held() is not None
    graph.replay()
    rank.synchronize()
    assert array.numpy().tolist() == [2]
    graph.close()
    gc.collect()
    assert held() is None
    filled = rank.zeros("u8", 64)
    with rank.capture() as graph:
        filled.zero()
        count_up.launch(rank, grid=1, block=64, args=(array, 1))
    filled.free()
    with pytest.raises(CaptureError, match=r"uses memory that was freed since its capture \(64 bytes at 0x"):
        graph.replay()


def test_what_a_graph_fills_is_kept(device_name: str) -> None:
    ep.spawn(filled_in_a_graph, ranks=1, device=device_name)


class Theirs:
    """An array of another library, in host memory."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values

    def __dlpack__(self, **options: Any) -> Any:
        return self.values.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.values.__dlpack_device__()


def dropped_before_it_runs(rank: ep.Rank) -> None:
    """The simulator runs a kernel when the host waits: it keeps another library's memory until then, and no longer."""
    watched: list[weakref.ref[Theirs]] = []

    def given(value: int) -> Theirs:
        made = Theirs(np.full(1, value, np.int32))
        watched.append(weakref.ref(made))
        return made

    count_up.launch(rank, grid=1, block=64, args=(given(1), 1))
    prepared = count_up.prepare(rank, grid=1, block=64, args=(given(2), 1))
    prepared()
    prepared.set(p=given(3))
    with rank.capture() as graph:
        count_up.launch(rank, grid=1, block=64, args=(given(4), 1))
    graph.replay()
    graph.close()
    gc.collect()
    assert [ref() is not None for ref in watched] == [True] * 4
    rank.synchronize()
    gc.collect()
    assert [ref() is not None for ref in watched] == [False, False, True, False]


def test_another_librarys_memory_is_kept_until_the_kernel_has_run() -> None:
    ep.spawn(dropped_before_it_runs, ranks=1, device="sim")


@ep.kernel
def waits(flag: ep.Ptr[ep.u32], me: ep.i32):
    if ep.thread_idx.x == 0:
        ep.wait(flag, until=lambda v: v == 1, order=ep.ACQUIRE, scope=ep.SYSTEM, timeout_ns=10**8)


def runs_out(rank: ep.Rank) -> None:
    flag = rank.array(np.ones(1, np.uint32))
    waits.launch(rank, grid=1, block=64, args=(flag, rank.index))
    rank.synchronize()
    with rank.capture() as graph:
        waits.launch(rank, grid=1, block=64, args=(flag, rank.index))
    flag.zero()
    graph.replay()
    with pytest.raises(PeerTimeout, match=r"a wait timed out: rank 0, kernel waits, .*test_graphs\.py:"):
        rank.synchronize()


def test_a_wait_that_runs_out_in_a_replay_is_reported(device_name: str) -> None:
    ep.spawn(runs_out, ranks=1, device=device_name)
