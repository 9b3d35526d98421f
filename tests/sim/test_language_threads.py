"""Indices, barriers and groups, warp operations, clocks, and kernels as methods of dataclasses."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from language_run import built, rank_on, rng, run, warp_size

import epdsl as ep

SEED = 20261130


@ep.kernel
def indices(out: ep.Ptr[ep.i32]):
    t = ep.thread_idx.x + ep.block_dim.x * (ep.thread_idx.y + ep.block_dim.y * ep.thread_idx.z)
    b = ep.block_idx.x + ep.grid_dim.x * (ep.block_idx.y + ep.grid_dim.y * ep.block_idx.z)
    threads = ep.block_dim.x * ep.block_dim.y * ep.block_dim.z
    o = out + (b * threads + t) * 8
    o[0], o[1], o[2] = ep.thread_idx.x, ep.thread_idx.y, ep.thread_idx.z
    o[3], o[4], o[5] = ep.block_idx.x, ep.block_idx.y, ep.block_idx.z
    o[6], o[7] = ep.lane_id(), ep.warp_id() * 1000 + ep.warp_size()


def test_indices_in_three_dimensions(device_name: str) -> None:
    grid, block = (3, 2, 2), (16, 4, 2)
    (out,) = run(device_name, indices, np.zeros((12, 128, 8), np.int32), grid=grid, block=block)
    w = warp_size(device_name)
    for b in range(12):
        for t in range(128):
            want = [t % 16, t // 16 % 4, t // 64, b % 3, b // 3 % 2, b // 6, t % w, t // w * 1000 + w]
            assert out[b, t].tolist() == want


@ep.kernel
def tree_sum(a: ep.Ptr[ep.i32], out: ep.Ptr[ep.i32]):
    words = ep.shared(ep.i32, 256)
    t = ep.thread_idx.x
    words[t] = a[ep.block_idx.x * 256 + t]
    ep.barrier()
    half = ep.i32(128)
    while half > 0:
        if t < half:
            words[t] = words[t] + words[t + half]
        ep.barrier()
        half //= 2
    if t == 0:
        out[ep.block_idx.x] = words[0]


def test_block_barriers_in_a_loop(device_name: str) -> None:
    a = rng(SEED).integers(-1000, 1000, (3, 256)).astype(np.int32)
    _, out = run(device_name, tree_sum, a, np.zeros(3, np.int32), grid=3, block=256)
    assert out.tolist() == a.sum(1).tolist()


@ep.kernel
def early_leavers(out: ep.Ptr[ep.i32], go: ep.i32):
    count = ep.shared(ep.i32, 1)
    if ep.thread_idx.x == 0:
        count[0] = 0
    ep.barrier()
    if go != 0:
        ep.reduce_add(count, 1, order=ep.RELAXED, scope=ep.BLOCK)
        ep.barrier()
        out[ep.thread_idx.x] = count[0]


def test_a_barrier_under_a_condition_all_threads_share(device_name: str) -> None:
    assert (run(device_name, early_leavers, np.zeros(128, np.int32), 1, block=128)[0] == 128).all()
    assert (run(device_name, early_leavers, np.zeros(128, np.int32), 0, block=128)[0] == 0).all()


ROUNDS = 5


@ep.kernel
def producer_consumer(out: ep.Ptr[ep.i32]):
    """Two warps make numbers, two take them; barrier 1 says full, barrier 2 says empty."""
    w = ep.warp_size()
    cells = ep.shared(ep.i32, 128)
    t = ep.thread_idx.x
    if t < 2 * w:
        for i in range(ROUNDS):
            if i > 0:
                ep.named_barrier(2, 4 * w)
            cells[t] = i * 1000 + t
            ep.named_arrive(1, 4 * w)
    else:
        total = 0
        for i in range(ROUNDS):
            ep.named_barrier(1, 4 * w)
            total += cells[(t + i) % (2 * w)]
            if i + 1 < ROUNDS:
                ep.named_arrive(2, 4 * w)
        out[t - 2 * w] = total


def test_producer_and_consumer_warps(device_name: str) -> None:
    w = warp_size(device_name)
    (out,) = run(device_name, producer_consumer, np.zeros(2 * w, np.int32), block=4 * w)
    assert out.tolist() == [sum(i * 1000 + (t + 2 * w + i) % (2 * w) for i in range(ROUNDS)) for t in range(2 * w)]


@ep.kernel
def groups(out: ep.Ptr[ep.i32]):
    w = ep.warp_size()
    words = ep.shared(ep.i32, 256)
    t = ep.thread_idx.x
    left, right = ep.Group(0, 2 * w, 1), ep.Group(2 * w, 2 * w, 2)
    words[t] = t
    if t < 2 * w:
        for _ in range(3):
            ep.group_barrier(left)
            seen = words[(t + w) % (2 * w)]
            ep.group_barrier(left)
            words[t] = seen + 1
    else:
        ep.group_barrier(right)
        seen = words[2 * w + (t + w) % (2 * w)]
        ep.group_barrier(right)
        words[t] = seen * 2
    ep.group_barrier(ep.Group(0, 4 * w))
    out[t] = words[t]


def test_groups_synchronise_apart(device_name: str) -> None:
    w = warp_size(device_name)
    (out,) = run(device_name, groups, np.zeros(4 * w, np.int32), block=4 * w)
    left = [(t + 3 * w) % (2 * w) + 3 for t in range(2 * w)]
    right = [(2 * w + (t + w) % (2 * w)) * 2 for t in range(2 * w, 4 * w)]
    assert out.tolist() == left + right


@ep.kernel
def ends_in_one_barrier(claims: ep.Ptr[ep.u32], out: ep.Ptr[ep.u32], n: ep.u32):
    """Both branches end in the same barriers, behind what only thread 0 does, and in one of them a thread may give up."""
    t, block = ep.thread_idx.x, ep.block_idx.x
    claimed = ep.shared(ep.u32, 1)
    if block == 1:
        out[64 + t] = ep.u32(t)
        ep.named_barrier(1, 64)
        if t == 0:
            ep.store(claims + 1, 1, order=ep.RELEASE, scope=ep.DEVICE)
        ep.named_barrier(1, 64)
        if t == 0:
            out[128 + block] = 7
    else:
        if t == 0:
            claimed[0] = 0
        ep.named_barrier(1, 64)
        claim = claimed[0]
        while claim < n:
            out[t] = out[t] + claim + 1
            ep.named_barrier(1, 64)
            if t == 0:
                # Pairs with the other block's release above.
                ep.wait(claims + 1, until=lambda v: v == 1, order=ep.ACQUIRE, scope=ep.DEVICE, timeout_ns=10**9)
                claimed[0] = 1 + ep.atomic_add(claims, 1, order=ep.RELAXED, scope=ep.DEVICE)
            ep.named_barrier(1, 64)
            claim = claimed[0]
        ep.named_barrier(1, 64)
        if t == 0:
            out[128 + block] = 8
    ep.named_barrier(1, 64)
    if t == 0:
        ep.atomic_add(out + 130, 1, order=ep.RELAXED, scope=ep.DEVICE)


def test_branches_that_end_in_one_barrier(device_name: str) -> None:
    claims, out = run(device_name, ends_in_one_barrier, np.zeros(2, np.uint32), np.zeros(131, np.uint32), 3, grid=2, block=64)
    assert claims.tolist() == [3, 1]
    assert out[:64].tolist() == [1 + 2 + 3] * 64
    assert out[64:].tolist() == [*range(64), 8, 7, 2]


# ---- warps


SHUFFLED = {
    "u8": (ep.u8, np.uint8), "i16": (ep.i16, np.int16), "i32": (ep.i32, np.int32), "u32": (ep.u32, np.uint32), "i64": (ep.i64, np.int64),
    "u64": (ep.u64, np.uint64), "f16": (ep.f16, np.float16), "bf16": (ep.bf16, ml_dtypes.bfloat16), "f32": (ep.f32, np.float32),
    "f64": (ep.f64, np.float64), "i1": (ep.i1, np.bool_),
}  # fmt: skip


@functools.cache
def shuffle_kernel(T: Any) -> Any:
    @ep.kernel
    def shuffles(a: ep.Ptr[T], out: ep.Ptr[T]):
        t = ep.thread_idx.x
        n = ep.block_dim.x
        v = a[t]
        out[t] = ep.shfl(v, (t * 7 + 3) % ep.warp_size())
        out[n + t] = ep.shfl_up(v, 3)
        out[2 * n + t] = ep.shfl_down(v, 5)
        out[3 * n + t] = ep.shfl_xor(v, 9)
        out[4 * n + t] = ep.shfl(v, 2)

    return shuffles


@pytest.mark.parametrize("name", SHUFFLED)
def test_shuffles_of_every_type(device_name: str, name: str) -> None:
    kind, dtype = SHUFFLED[name]
    w = warp_size(device_name)
    a = rng(SEED).integers(0, 256, 2 * w * np.dtype(dtype).itemsize).astype(np.uint8).view(dtype)
    if name == "i1":
        a = (a.view(np.uint8) & 1).view(bool)
    _, out = run(device_name, shuffle_kernel(kind), a, np.zeros((5, 2 * w), dtype), block=2 * w)
    lane, base = np.arange(2 * w) % w, np.arange(2 * w) // w * w
    sources = [
        base + (np.arange(2 * w) * 7 + 3) % w,
        base + np.where(lane >= 3, lane - 3, lane),
        base + np.where(lane + 5 < w, lane + 5, lane),
        base + (lane ^ 9),
        base + 2,
    ]
    bits = f"u{np.dtype(dtype).itemsize}"
    for got, source in zip(out, sources, strict=True):
        np.testing.assert_array_equal(np.ascontiguousarray(got).view(bits), a.view(bits)[source])


@ep.kernel
def votes(a: ep.Ptr[ep.i32], ballots: ep.Ptr[ep.u64], out: ep.Ptr[ep.i1]):
    t = ep.thread_idx.x
    x = a[t]
    ballots[t] = ep.ballot(x > 0)
    out[t * 5] = ep.any(x > 90)
    out[t * 5 + 1] = ep.all(x > -100)
    out[t * 5 + 2] = ep.all(x > 0)
    out[t * 5 + 3] = ep.elect()
    out[t * 5 + 4] = ep.any(x)


def test_votes_and_election(device_name: str) -> None:
    w = warp_size(device_name)
    a = rng(SEED).integers(-99, 99, 2 * w).astype(np.int32)
    a[w:] = np.abs(a[w:]) + 1
    _, ballots, out = run(device_name, votes, a, np.zeros(2 * w, np.uint64), np.zeros((2 * w, 5), bool), block=2 * w)
    for warp in range(2):
        x = a[warp * w : warp * w + w]
        assert set(ballots[warp * w : warp * w + w].tolist()) == {sum(1 << i for i in range(w) if x[i] > 0)}
        rows = out[warp * w : warp * w + w]
        assert (rows[:, 0] == (x > 90).any()).all() and rows[:, 1].all() and (rows[:, 2] == (x > 0).all()).all()
        assert rows[:, 3].sum() == 1 and (rows[:, 4] == x.any()).all()


@ep.kernel
def masked(a: ep.Ptr[ep.i32], ballots: ep.Ptr[ep.u64], out: ep.Ptr[ep.i32]):
    """The even and the odd lanes take part apart."""
    t = ep.thread_idx.x
    lane = ep.lane_id()
    even = ep.ballot(lane % 2 == 0)
    if lane % 2 == 0:
        ballots[t] = ep.ballot(a[t] > 0, even)
        out[t] = ep.shfl_xor(a[t], 2, even)
        ep.warp_sync(even)
    else:
        ballots[t] = ep.ballot(a[t] > 0, ~even & (0xFFFFFFFFFFFFFFFF >> (64 - ep.warp_size())))
        out[t] = 1 if ep.elect(~even) else 0


def test_masks_choose_the_lanes(device_name: str) -> None:
    w = warp_size(device_name)
    a = rng(SEED).integers(-9, 9, w).astype(np.int32)
    _, ballots, out = run(device_name, masked, a, np.zeros(w, np.uint64), np.zeros(w, np.int32))
    for parity in range(2):
        want = sum(1 << i for i in range(parity, w, 2) if a[i] > 0)
        assert set(ballots[parity::2].tolist()) == {want}
    assert out[0::2].tolist() == [a[i ^ 2] for i in range(0, w, 2)]
    assert out[1::2].sum() == 1


@ep.kernel
def reductions(a: ep.Ptr[ep.i32], f: ep.Ptr[ep.f32], out: ep.Ptr[ep.i32], sums: ep.Ptr[ep.f32]):
    t = ep.thread_idx.x
    v = a[t]
    n = ep.block_dim.x
    for i, op in enumerate(("add", "min", "max", "and", "or", "xor")):
        out[i * n + t] = ep.warp_reduce(op, v)
    sums[t] = ep.warp_reduce("add", f[t])
    sums[n + t] = ep.warp_reduce("max", f[t])


def test_warp_reductions_give_every_lane_the_same(device_name: str) -> None:
    w = warp_size(device_name)
    a = rng(SEED).integers(-(2**31), 2**31, w).astype(np.int32)
    f = rng(SEED).standard_normal(w).astype(np.float32)
    _, _, out, sums = run(device_name, reductions, a, f, np.zeros((6, w), np.int32), np.zeros((2, w), np.float32))
    with np.errstate(all="ignore"):
        want = [a.sum(dtype=np.int32), a.min(), a.max(), np.bitwise_and.reduce(a), np.bitwise_or.reduce(a), np.bitwise_xor.reduce(a)]
    assert out.tolist() == [[int(v)] * w for v in want]
    total, lanes = f.copy(), np.arange(w)
    for distance in (2**i for i in reversed(range(w.bit_length() - 1))):
        total = total + total[lanes ^ distance]
    np.testing.assert_array_equal(sums[0], total)
    assert (sums[1] == f.max()).all()


# ---- clocks


@ep.kernel
def clocks(out: ep.Ptr[ep.u64]):
    if ep.thread_idx.x == 0:
        c, g = ep.clock(), ep.globaltimer()
        ep.sleep_ns(5000)
        out[0] = ep.clock() - c
        out[1] = ep.globaltimer() - g


def test_clocks_go_forward(device_name: str) -> None:
    (out,) = run(device_name, clocks, np.zeros(2, np.uint64))
    assert 0 < out[0] < 10**9 and out[1] >= 2500


# ---- families


@dataclass(frozen=True)
class Doubling:
    times: int

    @ep.func
    def apply(self, x):
        for _ in ep.unroll(range(self.times)):
            x = x * 2
        return x


class Negating:
    """A class used as a policy: it has no state."""

    @staticmethod
    @ep.func
    def apply(x):
        return -x


@dataclass(frozen=True)
class Family:
    elem: Any
    width: int
    policy: Any
    twice: bool = False

    @property
    def span(self) -> int:
        return self.width * 2

    def index(self, i: int) -> int:
        return i * self.span

    @ep.func
    def once(self, p, value: Any):
        p[0] = self.policy.apply(value)
        return p[0] + 1 if self.twice else p[0]

    @ep.kernel
    def write(self, out: ep.Ptr[ep.i32], start: ep.i32, n: ep.Const[int]):
        if ep.thread_idx.x == 0:
            for i in ep.unroll(range(n)):
                out[self.index(i) + 1] = self.once(out + self.index(i), start + i)
            if self.elem is ep.i32:
                out[9] = self.span


def test_families_of_kernels(device_name: str) -> None:
    rank = rank_on(device_name)
    for family, want in (
        (Family(ep.i32, 1, Doubling(3)), [40, 40, 48, 48, 0, 0, 0, 0, 0, 2]),
        (Family(ep.i64, 2, Negating, True), [-5, -4, 0, 0, -6, -5, 0, 0, 0, 0]),
    ):
        out = rank.zeros(ep.i32, 10)
        family.write.launch(rank, grid=1, block=rank.device.info.warp_size, args=(out, 5, 2))
        assert out.numpy().tolist() == want
    assert Family(ep.i32, 1, Negating).write is Family(ep.i32, 1, Negating).write


def test_constants_are_part_of_the_binary() -> None:
    @ep.kernel
    def constant(out: ep.Ptr[ep.i32], n: ep.Const[int], scale: ep.Const[float]):
        out[0] = n if scale > 1.0 else -n

    assert "constant 7 : i32" in built(constant, n=7, scale=2.0)
    assert "constant -7 : i32" in built(constant, n=7, scale=0.5)
    artifact = constant.compile("sim:nvidia", n=7, scale=2.0)
    assert artifact.constants == {"n": "7", "scale": "2.0"}
    with pytest.raises(ep.CompileError, match=r"_constant: constants missing \['scale'\], unknown \['m'\]"):
        constant.compile("sim:nvidia", n=1, m=2)


def test_the_target_is_known_while_building(device_name: str) -> None:
    @ep.kernel
    def asks(out: ep.Ptr[ep.i32]):
        if ep.target.vendor == "amd":
            out[0] = 2
        elif ep.target.simulated:
            out[0] = 1
        else:
            out[0] = 3

    (out,) = run(device_name, asks, np.zeros(1, np.int32))
    assert out[0] == {"sim:nvidia": 1, "sim:amd": 2}.get(device_name, 3)
