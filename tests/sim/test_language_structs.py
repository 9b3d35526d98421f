"""Structs, arrays, pointers, peers, and 16-byte vectors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from device_ranks import ranks_on
from language_run import built, rank_on, run

import epdsl as ep


@ep.struct
class Point:
    x: ep.f32
    y: ep.f32

    @ep.func
    def dot(self, other: Any) -> ep.f32:
        return self.x * other.x + self.y * other.y

    @ep.func
    def moved(self, dx: ep.f32):
        self = Point(self.x + dx, self.y)
        return self

    @ep.func
    def flip(self):
        self.x = -self.x


@ep.struct
class Box:
    tag: ep.u8
    low: Point
    high: Point
    counts: ep.Array[ep.i32, 3]
    data: ep.Ptr[ep.i32]
    open: ep.i1


BOX = np.dtype({"names": ["tag", "low", "high", "counts", "data", "open"],
                "formats": ["u1", ("f4", 2), ("f4", 2), ("i4", 3), "u8", "u1"],
                "offsets": [0, 4, 12, 20, 32, 40], "itemsize": 48})  # fmt: skip


def test_layout_is_c() -> None:
    assert Box.nbytes == 48
    assert Point.nbytes == 8


@ep.kernel
def in_registers(out: ep.Ptr[ep.f32]):
    p = Point(1.0, 2.0)
    q = Point(y=5.0, x=4.0)
    p.x += 2.0
    q.y = p.x
    r = q
    r.x = 100.0
    out[0], out[1] = p.x, p.y
    out[2], out[3] = q.x, q.y
    out[4] = r.x
    out[5] = p.dot(q)
    out[6] = p.moved(0.5).x
    out[7] = p.x


def test_structs_are_values(device_name: str) -> None:
    (out,) = run(device_name, in_registers, np.zeros(8, np.float32))
    assert out.tolist() == [3.0, 2.0, 4.0, 3.0, 100.0, 3 * 4 + 2 * 3, 3.5, 3.0]


@ep.kernel
def through_control_flow(a: ep.Ptr[ep.i32], out: ep.Ptr[ep.f32]):
    p = Point(0.0, 0.0)
    pair = (ep.i32(0), ep.f32(10.0))
    for i in range(4):
        if a[i] > 0:
            p.x = p.x + ep.f32(a[i])
            pair = (pair[0] + 1, pair[1])
        elif a[i] == 0:
            continue
        else:
            p = Point(p.x, p.y - 1.0)
            pair = (pair[0], pair[1] * 2.0)
        if p.x > 100.0:
            break
    count, scaled = pair
    out[0], out[1], out[2], out[3] = p.x, p.y, ep.f32(count), scaled


def test_structs_and_tuples_through_branches_and_loops(device_name: str) -> None:
    _, out = run(device_name, through_control_flow, np.array([3, -1, 0, 4], np.int32), np.zeros(4, np.float32))
    assert out.tolist() == [7.0, -1.0, 2.0, 20.0]


@ep.kernel
def in_memory(boxes: ep.Ptr[Box], out: ep.Ptr[ep.f32], ints: ep.Ptr[ep.i32]):
    if ep.thread_idx.x != 0:
        return
    box = boxes[0]
    out[0] = box.low.x + box.high.y
    ints[0] = ep.i32(box.tag)
    ints[1] = box.counts[1]
    ints[2] = box.counts[ints[0] - 5]
    ints[3] = box.data[2]
    ints[4] = 1 if box.open else 0
    boxes[1] = box
    boxes[1].tag = 9
    boxes[1].low.x = -1.0
    boxes[1].counts[2] += 40
    boxes[1].open = not box.open
    box.counts[ints[0] - 7] = 77
    ints[5] = box.counts[0]
    p = boxes + 1
    out[1] = p[0].low.x
    p.high[0].y = 50.0
    p[0].low.flip()
    out[2] = (boxes + 1).low[0].x
    other = Box(1, Point(0.0, 1.0), Point(2.0, 3.0), (4, 5, 6), box.data + 1, True)
    boxes[2] = other


def test_structs_in_memory(device_name: str) -> None:
    rank = rank_on(device_name)
    data = rank.array(np.arange(10, 14, dtype=np.int32))
    host = np.zeros(3, BOX)
    host[0] = (7, (1.5, 2.5), (3.5, 4.5), (10, 20, 30), data.address, 1)
    boxes = rank.empty(Box, 3)
    boxes.copy_from(host.view((np.void, 48)).reshape(3))
    out, ints = rank.zeros(ep.f32, 3), rank.zeros(ep.i32, 6)
    in_memory.launch(rank, grid=1, block=rank.device.info.warp_size, args=(boxes, out, ints))
    got = boxes.numpy().view(BOX)
    assert ints.numpy().tolist() == [7, 20, 30, 12, 1, 77]
    assert out.numpy().tolist() == [6.0, -1.0, 1.0]
    assert (got[1]["tag"], got[1]["open"]) == (9, 0)
    assert got[1]["low"].tolist() == [1.0, 2.5] and got[1]["high"].tolist() == [3.5, 50.0]
    assert got[1]["counts"].tolist() == [10, 20, 70]
    assert (got[2]["tag"], got[2]["open"], int(got[2]["data"])) == (1, 1, data.address + 4)
    assert got[2]["low"].tolist() == [0.0, 1.0] and got[2]["counts"].tolist() == [4, 5, 6]
    assert got[0].tobytes() == host[0].tobytes()


@ep.struct
class Job:
    where: Point
    out: ep.Ptr[ep.f32]
    weights: ep.Array[ep.f32, 2]
    scale: ep.f32 = 2.0  # pyright: ignore[reportAssignmentType]


@ep.kernel
def takes_struct(job: Job, flag: ep.i1, small: ep.u8):
    if flag and ep.thread_idx.x == 0:
        job.out[0] = job.where.x * job.scale + job.weights[1]
        job.out[1] = ep.f32(small)


def test_structs_are_kernel_arguments(device_name: str) -> None:
    rank = rank_on(device_name)
    out = rank.zeros(ep.f32, 2)
    job: Any = Job(Point(1.5, 0.0), out, (0.25, 0.5))  # pyright: ignore[reportArgumentType]
    takes_struct.launch(rank, grid=1, block=rank.device.info.warp_size, args=(job, True, 200))
    assert out.numpy().tolist() == [3.5, 200.0]


def test_a_method_may_not_change_a_copy() -> None:
    @ep.kernel
    def flips(out: ep.Ptr[ep.f32]):
        p = Point(1.0, 2.0)
        p.flip()
        out[0] = p.x

    with pytest.raises(ep.CompileError, match=r"^EP007: self is a copy of the struct: the caller's would not change"):
        built(flips)


@ep.struct
class Grown(Point):
    z: ep.f32


def test_structs_inherit_fields(device_name: str) -> None:
    @ep.kernel
    def grown(out: ep.Ptr[ep.f32]):
        g = Grown(1.0, 2.0, 3.0)
        out[0] = g.x + g.y * 10.0 + g.z * 100.0

    assert Grown.nbytes == 12
    assert run(device_name, grown, np.zeros(1, np.float32))[0].tolist() == [321.0]


# ---- pointers


@ep.kernel
def pointers(a: ep.Ptr[ep.i32], out: ep.Ptr[ep.i64], bytes_of: ep.Ptr[ep.u8]):
    if ep.thread_idx.x != 0:
        return
    p = a + 5
    q = p - 2
    out[0] = p[0]
    out[1] = q[-1]
    out[2] = p - q
    out[3] = q - p
    out[4] = 1 if p > q else 0
    out[5] = 1 if p - 5 == a else 0
    out[6] = ep.i64(ep.u64(p) - ep.u64(a))
    out[7] = ep.i64((a + 1).cast(ep.u64)[0] & 0xFFFFFFFF)
    out[8] = ep.i64(p.cast(ep.u8)[1])
    back = ep.Ptr[ep.i32](ep.u64(a) + 8)
    out[9] = back[0]
    step = ep.u32(3)
    out[10] = (a + step)[0]
    out[11] = (a + ep.i8(-1) + 2)[0]
    b = bytes_of
    for i in range(3):
        b[0] = ep.u8(i + 1)
        b += 1
    b = bytes_of if a[0] > 1000 else b
    b[0] = 9


def test_pointer_arithmetic_counts_elements(device_name: str) -> None:
    a = np.arange(100, 110, dtype=np.int32)
    a[5] = 0x12345678
    _, out, raw = run(device_name, pointers, a, np.zeros(12, np.int64), np.zeros(4, np.uint8))
    assert out.tolist() == [0x12345678, 102, 2, -2, 1, 1, 20, 101, 0x56, 102, 103, 101]
    assert raw.tolist() == [1, 2, 3, 9]


@ep.kernel
def far(a: ep.Ptr[ep.u8], out: ep.Ptr[ep.u64], row: ep.i32, rows: ep.u32):
    out[0] = ep.u64(a + row * ep.i64(65536)) - ep.u64(a)
    out[1] = ep.u64(a + rows) - ep.u64(a)
    out[2] = ep.u64(a.cast(ep.u64) + row) - ep.u64(a)


def test_addresses_have_64_bits(device_name: str) -> None:
    _, out = run(device_name, far, np.zeros(1, np.uint8), np.zeros(3, np.uint64), 100_000, 2**32 - 1)
    assert out.tolist() == [100_000 * 65536, 2**32 - 1, 800_000]


@ep.kernel
def shared_memory(out: ep.Ptr[ep.i32]):
    words = ep.shared(ep.i32, 64)
    more = ep.shared(Point, 2)
    t = ep.thread_idx.x
    words[t] = t * t
    if t == 0:
        more[1] = Point(1.0, 2.0)
        more[0].x = 3.0
    ep.barrier()
    half = words + 8
    out[t] = half[0] + words[(t + 1) % 64] + ep.i32(more[1].y + more[0].x)


def test_shared_memory_is_the_blocks(device_name: str) -> None:
    (out,) = run(device_name, shared_memory, np.zeros(64, np.int32), block=64)
    assert out.tolist() == [64 + ((t + 1) % 64) ** 2 + 5 for t in range(64)]


# ---- vectors


@ep.kernel
def vectors(a: ep.Ptr[ep.u32], f: ep.Ptr[ep.f32], h: ep.Ptr[ep.u8], n: ep.i32):
    t = ep.thread_idx.x
    if t < n:
        v = ep.load(a + t * 4, width=4)
        w = v + ep.vec(ep.u32, 4)(1, 2, 3, 4)
        w[0] = v[3]
        w[t % 4] = w[(t + 1) % 4] + 100
        ep.store(a + t * 4, w ^ 5)
        x = ep.load(f + t * 2, width=2, cache="streaming")
        ep.store(f + t * 2, x * 2.0 + x, cache="streaming")
        ep.store(h + t * 16, ep.vec(ep.u8, 16)(ep.load(h + t * 16, width=16)[15]))


def test_vectors_of_16_bytes(device_name: str) -> None:
    a, f, h = np.arange(32, dtype=np.uint32), np.arange(16, dtype=np.float32), np.arange(128, dtype=np.uint8)
    got_a, got_f, got_h = run(device_name, vectors, a, f, h, 8)
    want = a.reshape(8, 4).copy()
    for t, v in enumerate(a.reshape(8, 4)):
        w = v + np.array([1, 2, 3, 4], np.uint32)
        w[0] = v[3]
        w[t % 4] = w[(t + 1) % 4] + 100
        want[t] = w ^ 5
    np.testing.assert_array_equal(got_a.reshape(8, 4), want)
    np.testing.assert_array_equal(got_f, f * 3)
    np.testing.assert_array_equal(got_h, np.repeat(h[15::16], 16))


@ep.kernel
def vector_memory(pairs: ep.Ptr[ep.vec(ep.f32, 4)], out: ep.Ptr[ep.f32]):  # pyright: ignore[reportInvalidTypeForm]
    if ep.thread_idx.x != 0:
        return
    v = pairs[1]
    total = ep.vec(ep.f32, 4)(0.0)
    for i in range(3):
        total = total + pairs[i]
    pairs[0] = total
    words = ep.vec(ep.u32, 4)(v)
    out[0] = v[0]
    out[1] = ep.bitcast(ep.f32, words[3])


def test_vectors_are_elements_of_memory(device_name: str) -> None:
    a = np.arange(12, dtype=np.float32)
    rank = rank_on(device_name)
    held, out = rank.array(a), rank.zeros(ep.f32, 2)
    vector_memory.launch(rank, grid=1, block=rank.device.info.warp_size, args=(held.view(ep.vec(ep.f32, 4)), out))
    got, out = held.numpy(), out.numpy()
    assert got[:4].tolist() == [12.0, 15.0, 18.0, 21.0]
    assert out.tolist() == [4.0, 7.0]


# ---- peers


@ep.kernel
def to_peers(table: ep.Peers[ep.i32], me: ep.i32, sizes: ep.Ptr[ep.i32]):
    if ep.thread_idx.x == 0:
        sizes[0] = table.size
        for r in range(table.size):
            there = table[r]
            there[me] = me * 10 + r
            ep.reduce_add(table[r] + table.size, 1, order=ep.RELEASE, scope=ep.SYSTEM)
        ep.wait(table[me] + table.size, until=lambda v: v == table.size, order=ep.ACQUIRE, scope=ep.SYSTEM, timeout_ns=10**9)


def write_to_peers(rank: ep.Rank) -> list[int]:
    buffers, sizes = rank.symmetric(ep.i32, rank.size + 1), rank.zeros(ep.i32, 1)
    rank.barrier()
    to_peers.launch(rank, grid=1, block=rank.device.info.warp_size, args=(buffers.peers, rank.index, sizes))
    rank.barrier()
    assert sizes.numpy().tolist() == [rank.size]
    return buffers.local.numpy().tolist()


def test_peers_reach_every_rank(device_name: str) -> None:
    ranks = ranks_on(device_name, 4)
    got = ep.spawn(write_to_peers, ranks=ranks, device=device_name)
    assert got == [[writer * 10 + r for writer in range(ranks)] + [ranks] for r in range(ranks)]
