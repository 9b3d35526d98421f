"""Ordered and scoped memory operations, waits, and the cooperative and bulk copies."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from language_run import rank_on, rng, run, warp_size

import epdsl as ep

SEED = 20261130
WORDS = {"u32": (ep.u32, np.uint32), "i32": (ep.i32, np.int32), "u64": (ep.u64, np.uint64), "i64": (ep.i64, np.int64)}
ATOMICS = ("add", "sub", "min", "max", "and", "or", "xor", "xchg")


@functools.cache
def atomic_kernel(T: Any) -> Any:
    """Each thread of 4 applies each operation to its own word, which starts as in `a`, with the operand in `b`."""

    @ep.kernel
    def atomics(a: ep.Ptr[T], b: ep.Ptr[T], old: ep.Ptr[T], reduced: ep.Ptr[T], n: ep.i32):
        for i in range(ep.thread_idx.x, n, ep.block_dim.x):
            p, o, r, v = a + i * 8, old + i * 8, reduced + i * 8, b[i]
            o[0] = ep.atomic_add(p, v, order=ep.RELAXED, scope=ep.DEVICE)
            o[1] = ep.atomic_sub(p + 1, v, order=ep.ACQUIRE, scope=ep.SYSTEM)
            o[2] = ep.atomic_min(p + 2, v, order=ep.RELEASE, scope=ep.BLOCK)
            o[3] = ep.atomic_max(p + 3, v, order=ep.ACQ_REL, scope=ep.DEVICE)
            o[4] = ep.atomic_and(p + 4, v, order=ep.SEQ_CST, scope=ep.SYSTEM)
            o[5] = ep.atomic_or(p + 5, v, order=ep.RELAXED, scope=ep.DEVICE)
            o[6] = ep.atomic_xor(p + 6, v, order=ep.RELAXED, scope=ep.DEVICE)
            o[7] = ep.atomic_xchg(p + 7, v, order=ep.RELAXED, scope=ep.DEVICE)
            ep.reduce_add(r, v, order=ep.RELAXED, scope=ep.DEVICE)
            ep.reduce_sub(r + 1, v, order=ep.RELEASE, scope=ep.SYSTEM)
            ep.reduce_min(r + 2, v, order=ep.RELAXED, scope=ep.DEVICE)
            ep.reduce_max(r + 3, v, order=ep.RELAXED, scope=ep.DEVICE)
            ep.reduce_and(r + 4, v, order=ep.RELAXED, scope=ep.DEVICE)
            ep.reduce_or(r + 5, v, order=ep.RELAXED, scope=ep.DEVICE)
            ep.reduce_xor(r + 6, v, order=ep.RELAXED, scope=ep.DEVICE)

    return atomics


def atomic_results(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        v = b[:, None]
        columns = [
            a[:, :1] + v,
            a[:, 1:2] - v,
            np.minimum(a[:, 2:3], v),
            np.maximum(a[:, 3:4], v),
            a[:, 4:5] & v,
            a[:, 5:6] | v,
            a[:, 6:7] ^ v,
            v,
        ]
        return np.concatenate(columns, 1)


@pytest.mark.parametrize("name", WORDS)
def test_read_modify_writes_of_one_thread(device_name: str, name: str) -> None:
    kind, dtype = WORDS[name]
    info = np.iinfo(dtype)
    edge = np.array([info.min, info.max, 0, 1, info.max // 2], dtype)
    a = np.concatenate([np.tile(edge[:, None], (5, 8)), rng(SEED).integers(info.min, info.max, (64, 8), dtype, endpoint=True)])
    b = np.concatenate([np.repeat(edge, 5), rng(SEED + 1).integers(info.min, info.max, 64, dtype, endpoint=True)])
    after, _, old, reduced = run(device_name, atomic_kernel(kind), a, b, np.zeros_like(a), a, len(a))
    want = atomic_results(a, b)
    for column, op in enumerate(ATOMICS):
        np.testing.assert_array_equal(after[:, column], want[:, column], err_msg=f"{name} {op}")
        np.testing.assert_array_equal(old[:, column], a[:, column], err_msg=f"{name} {op} returns what was there")
        if op != "xchg":
            np.testing.assert_array_equal(reduced[:, column], want[:, column], err_msg=f"{name} reduce {op}")


@ep.kernel
def contended(total: ep.Ptr[ep.u32], wide: ep.Ptr[ep.u64], sums: ep.Ptr[ep.f32], high: ep.Ptr[ep.i32], seen: ep.Ptr[ep.i32]):
    t = ep.block_idx.x * ep.block_dim.x + ep.thread_idx.x
    mine = ep.atomic_add(total, 1, order=ep.RELAXED, scope=ep.DEVICE)
    ep.reduce_add(seen + mine, 1, order=ep.RELAXED, scope=ep.DEVICE)
    ep.reduce_add(wide, ep.u64(t) << 20, order=ep.RELAXED, scope=ep.DEVICE)
    ep.atomic_add(sums, ep.f32(t % 8), order=ep.RELAXED, scope=ep.DEVICE)
    ep.reduce_max(high, t, order=ep.RELAXED, scope=ep.DEVICE)


def test_many_threads_on_one_word(device_name: str) -> None:
    n = 4 * 128
    zeros = np.zeros(1, np.uint32), np.zeros(1, np.uint64), np.zeros(1, np.float32), np.zeros(1, np.int32), np.zeros(n, np.int32)
    total, wide, sums, high, seen = run(device_name, contended, *zeros, grid=4, block=128)
    assert (total[0], wide[0], sums[0], high[0]) == (n, sum(range(n)) << 20, n / 8 * 28, n - 1)
    assert (seen == 1).all()


@ep.kernel
def in_shared(out: ep.Ptr[ep.u32], wide: ep.Ptr[ep.u64]):
    count = ep.shared(ep.u32, 1)
    big = ep.shared(ep.u64, 1)
    if ep.thread_idx.x == 0:
        count[0] = 0
        big[0] = ep.u64(2**40)
    ep.barrier()
    ep.atomic_add(count, 2, order=ep.RELAXED, scope=ep.BLOCK)
    ep.reduce_max(big, ep.u64(2**41) + ep.u64(ep.thread_idx.x), order=ep.RELAXED, scope=ep.BLOCK)
    ep.barrier()
    if ep.thread_idx.x == 5:
        out[ep.block_idx.x] = ep.load(count, order=ep.RELAXED, scope=ep.BLOCK)
        wide[ep.block_idx.x] = ep.load(big, order=ep.ACQUIRE, scope=ep.BLOCK)


def test_atomics_in_shared_memory(device_name: str) -> None:
    out, wide = run(device_name, in_shared, np.zeros(3, np.uint32), np.zeros(3, np.uint64), grid=3, block=128)
    assert out.tolist() == [256] * 3 and wide.tolist() == [2**41 + 127] * 3


@ep.kernel
def cas_loop(value: ep.Ptr[ep.u64], word: ep.Ptr[ep.i32], lost: ep.Ptr[ep.u32]):
    """Adds the square of each thread's number by compare-and-swap."""
    t = ep.u64(ep.thread_idx.x)
    seen = ep.load(value, order=ep.RELAXED, scope=ep.DEVICE)
    while True:
        was = ep.atomic_cas(value, seen, seen + t * t, order=ep.ACQ_REL, scope=ep.DEVICE)
        if was == seen:
            break
        seen = was
        ep.reduce_add(lost, 1, order=ep.RELAXED, scope=ep.DEVICE)
    ep.atomic_cas(word, ep.i32(-1), ep.thread_idx.x, order=ep.RELAXED, scope=ep.SYSTEM)


def test_compare_and_swap_loops(device_name: str) -> None:
    value, word, _ = run(device_name, cas_loop, np.array([5], np.uint64), np.array([-1], np.int32), np.zeros(1, np.uint32), block=128)
    assert value[0] == 5 + sum(t * t for t in range(128))
    assert 0 <= word[0] < 128


@ep.kernel
def orders(p: ep.Ptr[ep.u32], q: ep.Ptr[ep.u64], out: ep.Ptr[ep.u64]):
    if ep.thread_idx.x == 0:
        ep.store(p, 1, order=ep.RELAXED, scope=ep.BLOCK)
        ep.store(p + 1, ep.load(p, order=ep.ACQUIRE, scope=ep.BLOCK) + 1, order=ep.RELEASE, scope=ep.DEVICE)
        ep.store(p + 2, ep.load(p + 1, order=ep.SEQ_CST, scope=ep.SYSTEM) + 1, order=ep.SEQ_CST, scope=ep.SYSTEM)
        ep.store(q, ep.u64(2**63), order=ep.RELEASE, scope=ep.SYSTEM)
        ep.fence(order=ep.ACQUIRE, scope=ep.BLOCK)
        ep.fence(order=ep.RELEASE, scope=ep.DEVICE)
        ep.fence(order=ep.ACQ_REL, scope=ep.SYSTEM)
        ep.fence(order=ep.SEQ_CST, scope=ep.SYSTEM)
        out[0] = ep.load(q, order=ep.RELAXED, scope=ep.SYSTEM) + ep.load(p + 2, order=ep.RELAXED, scope=ep.DEVICE)


def test_every_order_and_scope_moves_the_value(device_name: str) -> None:
    p, _, out = run(device_name, orders, np.zeros(3, np.uint32), np.zeros(1, np.uint64), np.zeros(1, np.uint64))
    assert p.tolist() == [1, 2, 3] and out[0] == 2**63 + 3


# ---- waits


@ep.kernel
def relay(flags: ep.Ptr[ep.u32], data: ep.Ptr[ep.i32], out: ep.Ptr[ep.i32]):
    """Block b waits for block b - 1, adds to what it left, and tells block b + 1. Block 0 starts."""
    b = ep.block_idx.x
    if ep.thread_idx.x == 0:
        if b > 0:
            got = ep.wait(flags + b, until=lambda v: v >= ep.u32(b), order=ep.ACQUIRE, scope=ep.DEVICE, timeout_ns=10**9)
            data[b] = data[b - 1] + ep.i32(got)
        else:
            data[0] = 100
        out[b] = data[b]
        ep.store(flags + b + 1, ep.u32(b + 1), order=ep.RELEASE, scope=ep.DEVICE)


def test_a_wait_returns_what_satisfied_it_and_acquires(device_name: str) -> None:
    *_, out = run(device_name, relay, np.zeros(9, np.uint32), np.zeros(8, np.int32), np.zeros(8, np.int32), grid=8)
    assert out.tolist() == [100 + sum(range(1, b + 1)) for b in range(8)]


@ep.kernel
def waits_for_64_bits(flag: ep.Ptr[ep.u64], out: ep.Ptr[ep.u64]):
    if ep.block_idx.x == 0:
        if ep.thread_idx.x == 0:
            ep.sleep_ns(1000)
            ep.store(flag, ep.u64(7) << 32, order=ep.RELEASE, scope=ep.DEVICE)
    elif ep.thread_idx.x == 0:
        out[0] = ep.wait(flag, until=lambda v: (v >> 32) == 7, order=ep.ACQUIRE, scope=ep.DEVICE, timeout_ns=10**9)


def test_a_wait_looks_at_all_64_bits(device_name: str) -> None:
    _, out = run(device_name, waits_for_64_bits, np.zeros(1, np.uint64), np.zeros(1, np.uint64), grid=2)
    assert out[0] == 7 << 32


@ep.kernel
def waits_with_a_default(flag: ep.Ptr[ep.u32], out: ep.Ptr[ep.u32], wanted: ep.u32):
    if ep.thread_idx.x == 0:
        ep.store(flag, wanted, order=ep.RELEASE, scope=ep.DEVICE)
        out[0] = ep.wait(flag, until=lambda v, w=wanted: v == w, order=ep.ACQUIRE, scope=ep.DEVICE, timeout_ns=10**9)


def test_the_condition_of_a_wait_may_have_a_default(device_name: str) -> None:
    _, out = run(device_name, waits_with_a_default, np.zeros(1, np.uint32), np.zeros(1, np.uint32), 6)
    assert out[0] == 6


# ---- copies


@ep.kernel
def copies(src: ep.Ptr[ep.u8], dst: ep.Ptr[ep.u8], per_warp: ep.Ptr[ep.u8], grouped: ep.Ptr[ep.u8], nbytes: ep.i32):
    ep.copy(dst, src, nbytes)
    if ep.warp_id() == 1:
        ep.warp_copy(per_warp, src, nbytes)
    group = ep.Group(ep.warp_size(), 2 * ep.warp_size(), 1)
    if ep.thread_idx.x >= group.thread_base and ep.thread_idx.x < group.thread_base + group.num_threads:
        ep.copy(grouped, src + 16, nbytes - 16, group=group)
        ep.group_barrier(group)


@pytest.mark.parametrize("nbytes", [16, 64, 4096, 16 * 1000])
def test_cooperative_copies(device_name: str, nbytes: int) -> None:
    source = rng(SEED).integers(0, 256, nbytes + 16).astype(np.uint8)
    blank = np.zeros(nbytes + 16, np.uint8)
    _, whole, warp, group = run(device_name, copies, source, blank, blank, blank, nbytes, block=4 * warp_size(device_name))
    for got, want in ((whole, source[:nbytes]), (warp, source[:nbytes]), (group, source[16:nbytes])):
        np.testing.assert_array_equal(got[: len(want)], want)
        assert not got[len(want) :].any()


CHUNK = 256


@ep.kernel
def bulk(src: ep.Ptr[ep.u32], dst: ep.Ptr[ep.u32], chunks: ep.i32):
    """Streams chunks through shared memory by the copy engine, two in flight, adding 1 to every word."""
    space = ep.shared(ep.u32, 2 * CHUNK)
    words = ep.shared(ep.u64, 2)
    t = ep.thread_idx.x
    first, second = ep.MBarrier(words), ep.MBarrier(words + 1)
    if t == 0:
        first.init(1)
        second.init(1)
        ep.proxy_fence("shared")
    ep.barrier()
    for c in range(chunks):
        slot = c % 2
        mine = space + slot * CHUNK
        barrier = ep.MBarrier(words + slot)
        if t == 0:
            barrier.expect(CHUNK * 4)
            ep.bulk_copy(mine, src + c * CHUNK, CHUNK * 4, barrier)
        barrier.wait((c // 2) % 2, timeout_ns=10**9)
        for i in range(t, CHUNK, ep.block_dim.x):
            mine[i] = mine[i] + 1
        ep.proxy_fence("shared")
        ep.barrier()
        if t == 0:
            ep.bulk_copy(dst + c * CHUNK, mine, CHUNK * 4)
            ep.bulk_commit()
            ep.bulk_wait(1, read="source")
    if t == 0:
        ep.bulk_wait(0)


@pytest.mark.parametrize("chunks", [1, 2, 7])
def test_bulk_copies_both_ways_through_several_phases(device_name: str, chunks: int) -> None:
    source = rng(SEED).integers(0, 2**31, chunks * CHUNK).astype(np.uint32)
    _, got = run(device_name, bulk, source, np.zeros_like(source), chunks, block=128)
    np.testing.assert_array_equal(got, source + 1)


@ep.kernel
def arrivals(out: ep.Ptr[ep.i32]):
    """Every warp arrives once a phase; all wait for all."""
    word = ep.shared(ep.u64, 1)
    value = ep.shared(ep.i32, 1)
    barrier = ep.MBarrier(word)
    if ep.thread_idx.x == 0:
        barrier.init(ep.block_dim.x // ep.warp_size())
        value[0] = 0
    ep.barrier()
    for phase in range(3):
        if ep.lane_id() == 0:
            ep.reduce_add(value, 1, order=ep.RELAXED, scope=ep.BLOCK)
            barrier.arrive()
        barrier.wait(phase % 2, timeout_ns=10**9)
        if ep.thread_idx.x == 0:
            out[phase] = value[0]
        ep.barrier()


def test_barriers_count_arrivals(device_name: str) -> None:
    (out,) = run(device_name, arrivals, np.zeros(3, np.int32), block=4 * warp_size(device_name))
    assert out.tolist() == [4, 8, 12]


def test_a_misaligned_argument_of_a_vector_access_is_refused(device_name: str) -> None:
    rank = rank_on(device_name)
    bytes_ = rank.zeros(ep.u8, 64)
    with pytest.raises(ValueError, match="align"):
        copies.launch(rank, grid=1, block=4 * warp_size(device_name), args=(bytes_[1:], bytes_, bytes_, bytes_, 16))
