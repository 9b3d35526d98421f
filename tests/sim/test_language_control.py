"""Control flow: nested exits, short circuits, chained comparisons, closures, loops that carry anything."""

from __future__ import annotations

import numpy as np
import pytest
from language_run import built, run

import epdsl as ep


@ep.kernel
def nested_exits(a: ep.Ptr[ep.i32], out: ep.Ptr[ep.i32], n: ep.i32):
    t = ep.thread_idx.x
    found = ep.i32(-1)
    steps = 0
    for i in range(n):
        row = a + i * n
        j = 0
        while True:
            steps += 1
            if j >= n:
                break
            if row[j] == t:
                found = i * n + j
                if i > 2:
                    out[t] = found
                    return
                break
            if row[j] < 0:
                j += 2
                continue
            for k in range(j, n, 3):
                if row[k] == t + 1000:
                    out[t] = -k
                    return
                if row[k] > 500:
                    break
            j += 1
        if found >= 0 and i > 1:
            break
    out[t] = found * 1000 + steps


def nested_exits_in_python(a: list[int], n: int, t: int) -> int:
    found, steps = -1, 0
    for i in range(n):
        row = a[i * n : i * n + n]
        j = 0
        while True:
            steps += 1
            if j >= n:
                break
            if row[j] == t:
                found = i * n + j
                if i > 2:
                    return found
                break
            if row[j] < 0:
                j += 2
                continue
            for k in range(j, n, 3):
                if row[k] == t + 1000:
                    return -k
                if row[k] > 500:
                    break
            j += 1
        if found >= 0 and i > 1:
            break
    return found * 1000 + steps


def test_nested_loops_leave_at_every_depth(device_name: str) -> None:
    n = 8
    a = np.arange(n * n, dtype=np.int32)[::-1].copy()
    a[[3, 17, 40]] = [1005, 1030, 900]
    a[20] = -1
    _, out = run(device_name, nested_exits, a, np.zeros(64, np.int32), n, block=64)
    assert out.tolist() == [nested_exits_in_python(a.tolist(), n, t) for t in range(64)]


@ep.func
def noted(log: ep.Ptr[ep.i32], name: int, value: ep.i1) -> ep.i1:
    """`value`, after writing in the log that it was asked for."""
    log[0] = log[0] * 10 + name
    return value


@ep.kernel
def short_circuits(bits: ep.Ptr[ep.u8], log: ep.Ptr[ep.i32], out: ep.Ptr[ep.i1]):
    t = ep.thread_idx.x
    a, b, c = (bits[t] & 1) == 1, (bits[t] & 2) != 0, (bits[t] & 4) != 0
    l = log + t * 6  # noqa: E741
    o = out + t * 6
    o[0] = noted(l, 1, a) and noted(l, 2, b)
    o[1] = noted(l + 1, 1, a) or noted(l + 1, 2, b)
    o[2] = (noted(l + 2, 1, a) and noted(l + 2, 2, b)) or noted(l + 2, 3, c)
    o[3] = not (noted(l + 3, 1, a) or noted(l + 3, 2, b)) and noted(l + 3, 3, c)
    if noted(l + 4, 1, a) and (noted(l + 4, 2, b) or noted(l + 4, 3, c)):
        o[4] = True
    o[5] = noted(l + 5, 2, b) if noted(l + 5, 1, a) else noted(l + 5, 3, c)


def short_circuits_in_python(bits: int) -> tuple[list[int], list[bool]]:
    logs = [0] * 6

    def asked(i: int, name: int) -> bool:
        logs[i] = logs[i] * 10 + name
        return bool(bits >> (name - 1) & 1)

    out = [
        asked(0, 1) and asked(0, 2),
        asked(1, 1) or asked(1, 2),
        (asked(2, 1) and asked(2, 2)) or asked(2, 3),
        not (asked(3, 1) or asked(3, 2)) and asked(3, 3),
        asked(4, 1) and (asked(4, 2) or asked(4, 3)),
        asked(5, 2) if asked(5, 1) else asked(5, 3),
    ]
    return logs, out


def test_and_or_not_evaluate_only_what_they_need(device_name: str) -> None:
    bits = np.arange(64, dtype=np.uint8) % 8
    _, log, out = run(device_name, short_circuits, bits, np.zeros((64, 6), np.int32), np.zeros((64, 6), bool), block=64)
    for t in range(8):
        want_log, want_out = short_circuits_in_python(t)
        assert (log[t].tolist(), out[t].tolist()) == (want_log, want_out)


@ep.func
def counted(log: ep.Ptr[ep.i32], value: ep.i32) -> ep.i32:
    log[0] += 1
    return value


@ep.kernel
def chains(a: ep.Ptr[ep.i32], log: ep.Ptr[ep.i32], out: ep.Ptr[ep.i1], memory: ep.Ptr[ep.i32], n: ep.i32):
    t = ep.thread_idx.x
    x = a[t]
    out[t * 4] = 0 <= x < 10
    out[t * 4 + 1] = counted(log + t, x) < counted(log + t, 5) <= counted(log + t, x * 2)
    out[t * 4 + 2] = 0 <= x < n != memory[x]
    out[t * 4 + 3] = x in (1, 3, n) and x not in (3, 4)


def test_chained_comparisons_stop_at_the_first_that_fails(device_name: str) -> None:
    a = np.arange(-20, 44, dtype=np.int32)
    memory = np.array([7, 2, 4, 4], np.int32)
    _, log, out, _ = run(device_name, chains, a, np.zeros(64, np.int32), np.zeros((64, 4), bool), memory, 4, block=64)
    for t, x in enumerate(a.tolist()):
        assert out[t].tolist() == [0 <= x < 10, x < 5 <= x * 2, 0 <= x < 4 and memory[x] != 4, x in (1, 4) and x not in (3, 4)]
        assert log[t] == (3 if x < 5 else 2)


@ep.kernel
def ranges(out: ep.Ptr[ep.i32], low: ep.i32, high: ep.i32, up: ep.i32):
    if ep.thread_idx.x != 0:
        return
    n = 0
    for i in range(high, low, -3):
        out[n] = i
        n += 1
    for i in range(low, high, up):
        out[n] = i
        n += 1
    for u in range(ep.u32(7), 0, -2):
        out[n] = ep.i32(u)
        n += 1
    for u in range(ep.u64(3), ep.u64(3)):
        out[n] = ep.i32(u)
        n += 1
    for s in range(ep.i64(-2), 2):
        out[n] = ep.i32(s)
        n += 1
    for b in range(ep.u8(250), 256):
        out[n] = b
        n += 1
    for _ in range(5, 5):
        n = 1000
    for _ in range(3, 0):
        n = 1000
    out[n] = 99


def test_ranges_up_down_and_empty(device_name: str) -> None:
    (out,) = run(device_name, ranges, np.zeros(40, np.int32), -4, 7, 4)
    want = [*range(7, -4, -3), *range(-4, 7, 4), 7, 5, 3, 1, -2, -1, 0, 1, *range(250, 256), 99]
    assert out[: len(want)].tolist() == want and not out[len(want) :].any()


@ep.kernel
def carries(a: ep.Ptr[ep.f32], out: ep.Ptr[ep.f32], n: ep.i32):
    if ep.thread_idx.x != 0:
        return
    best, where, done, pair = ep.f32(-1e30), -1, False, (0, 0.5)
    p = a
    name = "kept"
    policy = max
    for i in range(n):
        if p[0] > best:
            best, where = p[0], i
        pair = (pair[0] + i, pair[1] * 2.0)
        p += 1
        if best > 50.0:
            done = True
            break
    else_count = 0
    while not done:
        else_count += 1
        done = else_count == 3
    assert name == "kept"
    out[0], out[1], out[2], out[3] = best, ep.f32(where), ep.f32(pair[0]), pair[1]
    out[4] = ep.f32(else_count)
    out[5] = policy(best, 12.0)
    out[6] = p[0]


@pytest.mark.parametrize("big", [False, True])
def test_loops_carry_tuples_flags_and_pointers(device_name: str, big: bool) -> None:
    a = np.array([1, 5, 3, 60 if big else 4, 2, 0], np.float32)
    _, out = run(device_name, carries, a, np.zeros(7, np.float32), 5)
    assert out.tolist() == ([60, 3, 6, 8, 0, 60, 2] if big else [5, 1, 10, 16, 3, 12, 0])


@ep.kernel
def closures(a: ep.Ptr[ep.i32], out: ep.Ptr[ep.i32]):
    t = ep.thread_idx.x
    scale = a[t]

    def twice(v, by=2):
        if v > 10:
            return v
        return v * by

    add = lambda v, extra=scale: v + extra + scale  # noqa: E731
    total = 0
    for i in range(4):
        total = total + twice(i) + add(i)
        scale = scale + 1
    out[t] = total + twice(total, 3) + (lambda: scale)()


def closures_in_python(value: int) -> int:
    scale = value

    def twice(v: int, by: int = 2) -> int:
        return v if v > 10 else v * by

    add = lambda v, extra=scale: v + extra + scale  # noqa: E731
    total = 0
    for i in range(4):
        total = total + twice(i) + add(i)
        scale = scale + 1
    return total + twice(total, 3) + scale


def test_closures_read_variables_when_they_are_called(device_name: str) -> None:
    a = np.arange(-32, 32, dtype=np.int32)
    _, out = run(device_name, closures, a, np.zeros(64, np.int32), block=64)
    assert out.tolist() == [closures_in_python(v) for v in a.tolist()]


def test_comprehensions_and_displays_run_while_building(device_name: str) -> None:
    @ep.kernel
    def works(out: ep.Ptr[ep.i32]):
        if ep.thread_idx.x != 0:
            return
        base = out[0]
        parts = [base + i for i in range(4) if i != 2]
        out[1] = sum(parts) + len(parts)
        squares = tuple(i * i for i in ep.unroll(range(3)))
        out[2] = max(parts) + squares[2]
        names = {"a": base, "b": 2}
        out[3] = names["a"] + names["b"]
        out[4] = min(base, *squares)
        if (n := out[0]) > 5:
            out[5] = n
        while (m := out[6]) < 3:
            out[6] = m + 1

    (out,) = run(device_name, works, np.array([6, 0, 0, 0, 0, 0, 0], np.int32))
    assert out.tolist() == [6, 22 + 3, 9 + 4, 8, 0, 6, 3]


@ep.func
def weighted(*values, scale=1, **others):
    total = 0
    for value in values:
        total = total + value * scale
    return total + others["last"]


@ep.kernel
def python_calls(a: ep.Ptr[ep.i32], out: ep.Ptr[ep.i32]):
    if ep.thread_idx.x != 0:
        return
    x, y, z = a[0], a[1], a[2]
    values = (x, y, z)
    out[0] = weighted(*values, scale=2, last=z)
    out[1] = sum(v for v in values)
    out[2] = 1 if any(v > 2 for v in values) else 0
    out[3] = 1 if all([v > 2 for v in values]) else 0
    total = 0
    for i, v in enumerate(values):
        total += i * v
    out[4] = total
    for u, v in zip(range(3), values, strict=True):
        out[5 + u] = u + v
    options = {"last": y}
    out[8] = weighted(1, 2, **options)
    p = out + 9
    p[0], p[1] = p[1] + 7, x
    out[11] = -x + ~y
    out[12] = abs(-z) + max(x, 2, z) + min((x, y))
    b = x > 0
    b &= y > 100
    out[13] = b
    out[14] = (x if b else y) if z else x
    wide: ep.i64 = x
    out[15] = ep.i32(wide)


def test_pythons_own_calls_on_device_values(device_name: str) -> None:
    _, out = run(device_name, python_calls, np.array([1, 2, 3], np.int32), np.zeros(16, np.int32))
    assert out.tolist() == [15, 6, 1, 0, 8, 1, 3, 5, 5, 7, 1, -4, 7, 0, 2, 1]


@ep.kernel
def augments(a: ep.Ptr[ep.i32], next_slot: ep.Ptr[ep.i32], out: ep.Ptr[ep.u8]):
    if ep.thread_idx.x != 0:
        return
    a[ep.atomic_add(next_slot, 1, order=ep.RELAXED, scope=ep.DEVICE)] += 5
    a[ep.atomic_add(next_slot, 1, order=ep.RELAXED, scope=ep.DEVICE)] *= 2
    a[2] //= 3
    a[3] %= 3
    a[4] <<= 2
    a[5] ^= -1
    v = ep.vec(ep.u8, 4)(1, 2, 3, 4)
    i = a[6]
    v[i] += 10
    v[3] -= 4
    out[0], out[1], out[2], out[3] = v[0], v[1], v[2], v[3]


def test_an_augmented_target_is_evaluated_once(device_name: str) -> None:
    a = np.array([1, 2, -7, -7, 3, 8, 1], np.int32)
    got, slot, out = run(device_name, augments, a, np.zeros(1, np.int32), np.zeros(4, np.uint8))
    assert got.tolist() == [6, 4, -3, 2, 12, -9, 1]
    assert slot.tolist() == [2]
    assert out.tolist() == [1, 12, 3, 0]


# ---- compile time


@ep.kernel
def dead_sides(out: ep.Ptr[ep.i32], mode: ep.Const[str], n: ep.Const[int]):
    if mode == "none":
        ep.this_is_never_looked_at(out)
    elif mode == "fill":
        for i in ep.unroll(range(n)):
            if i % 2:
                continue
            if i > 6:
                break
            out[i] = i * i
    else:
        raise ValueError(f"no mode {mode}")


def test_a_compile_time_if_drops_the_other_side(device_name: str) -> None:
    (out,) = run(device_name, dead_sides, np.zeros(12, np.int32), "fill", 12)
    assert out.tolist() == [0, 0, 4, 0, 16, 0, 36, 0, 0, 0, 0, 0]
    text = built(dead_sides, mode="fill", n=12)
    assert "cond_br" not in text and text.count("ep.store") == 4
    with pytest.raises(ep.CompileError, match="the kernel refuses this configuration: no mode other"):
        built(dead_sides, mode="other", n=1)


def test_unroll_repeats_and_range_does_not() -> None:
    @ep.kernel
    def loops(out: ep.Ptr[ep.i32]):
        for i in range(8):
            out[i] = i

    @ep.kernel
    def unrolled(out: ep.Ptr[ep.i32]):
        for i in ep.unroll(range(8)):
            out[i] = i

    assert built(loops).count("ep.store") == 1
    assert built(unrolled).count("ep.store") == 8


@ep.kernel
def unrolled_exits(a: ep.Ptr[ep.i32], out: ep.Ptr[ep.i32]):
    t = ep.thread_idx.x
    total = 0
    last = ep.i32(-1)
    for i in ep.unroll(range(5)):
        if a[i] == t:
            continue
        if a[i] > t + 3:
            break
        total += a[i]
        last = i
    out[t] = total * 10 + last


def test_unrolled_loops_leave_at_run_time(device_name: str) -> None:
    a = [1, 4, 2, 9, 3]
    want = []
    for t in range(64):
        total, last = 0, -1
        for i in range(5):
            if a[i] == t:
                continue
            if a[i] > t + 3:
                break
            total, last = total + a[i], i
        want.append(total * 10 + last)
    _, out = run(device_name, unrolled_exits, np.array(a, np.int32), np.zeros(64, np.int32), block=64)
    assert out.tolist() == want
