"""The scheduler: resumes the coroutines of every thread of every launch in flight, and does what barriers and warps do.

It is an ordinary kernel of the language that never suspends. Its data is described in `epdsl_runtime.sim_layout`.
"""

from __future__ import annotations

import functools
import inspect
import sys
from typing import Any

from epdsl_runtime.sim_layout import (
    B_ACTIVE,
    B_ALIVE,
    B_ARRIVED,
    B_FAULTED,
    B_NAMED,
    B_THREADS,
    B_X,
    B_Y,
    B_Z,
    D_CAPACITY,
    D_USED,
    E_COUNT,
    E_LAUNCHES,
    E_LEVEL,
    E_MODE,
    E_PASSES,
    E_RANDOM,
    E_RESUMES,
    E_SALT,
    E_SPIN_LIMIT,
    E_SPIN_RESUMES,
    E_SPINS,
    E_STARVED,
    E_STATUS,
    E_SWEPT,
    E_TIME,
    E_USEFUL,
    L_ARGS,
    L_BLOCKS,
    L_COST,
    L_DEVICE,
    L_DONE,
    L_DX,
    L_DY,
    L_ENTRY,
    L_GX,
    L_GY,
    L_LOCKSTEP,
    L_NEXT,
    L_SEED,
    L_SLOT_COUNT,
    L_SLOTS,
    L_THREADS,
    L_TRAPS,
    L_WARP_SIZE,
    LEVELS,
    MODE_PRIORITY,
    MODE_STARVE,
    MODE_UNIFORM,
    OP_ARRIVE,
    OP_BARRIER,
    OP_DONE,
    OP_ELECT,
    OP_HELD,
    OP_JOIN,
    OP_NAMED,
    OP_POLL,
    OP_READY,
    OP_SHUFFLE,
    OP_SLEEP,
    OP_SPLIT,
    OP_SYNC,
    OP_TRAP,
    OP_VOTE,
    OP_YIELD,
    STATUS_FINISHED,
    STATUS_LIVELOCK,
    STATUS_STUCK,
    T_A0,
    T_A1,
    T_A2,
    T_A3,
    T_DEPTH,
    T_HANDLE,
    T_LANE,
    T_MASK,
    T_OP,
    T_RESULT,
    T_STACK,
    T_WARP,
    T_X,
    T_Y,
    T_Z,
    THREAD_WORDS,
)

import epdsl as ep
from epdsl.ir.types import U64
from epdsl.lang.arithmetic import convert, materialize
from epdsl.lang.intrinsic import intrinsic
from epdsl.lang.tracer import Tracer
from epdsl.lang.values import Value

Words = ep.Ptr[ep.u64]
NANOSECONDS_A_PASS = 64


@intrinsic
def host_call(t: Tracer, function: Any, *words: Any) -> Value:
    """Calls the function at an address with pointers; returns what it returned."""
    from mlir import ir

    with t.b.context:
        pointer = ir.Type.parse("!llvm.ptr")
        attributes = {
            "operandSegmentSizes": ir.DenseI32ArrayAttr.get([1 + len(words), 0]),
            "op_bundle_sizes": ir.DenseI32ArrayAttr.get([]),
        }
    operands = [t.b.op("llvm.inttoptr", [pointer], [convert(t.b, materialize(t.b, w), U64).ir]) for w in (function, *words)]
    return Value(U64, t.b.op("llvm.ptrtoint", [t.b.i64], [t.b.op("llvm.call", [pointer], operands, attributes)]))


@ep.func
def at(base: Words, index: int):
    """The memory that word `index` points to."""
    return base.cast(ep.Ptr[ep.u64])[index]


@ep.func
def random_below(engine: Words, n: ep.u64):
    x = engine[E_RANDOM]
    x = x ^ (x << 13)
    x = x ^ (x >> 7)
    x = x ^ (x << 17)
    engine[E_RANDOM] = x
    return (x >> 16) % n


@ep.func
def start_block(launch: Words, block: Words):
    index = launch[L_NEXT]
    launch[L_NEXT] = index + 1
    gx, gy, dx, dy = launch[L_GX], launch[L_GY], launch[L_DX], launch[L_DY]
    block[B_X] = index % gx
    block[B_Y] = index // gx % gy
    block[B_Z] = index // (gx * gy)
    n = launch[L_THREADS]
    block[B_ALIVE] = n
    block[B_ARRIVED] = 0
    block[B_ACTIVE] = 1
    block[B_FAULTED] = 0
    for i in range(16):
        block[B_NAMED + i] = 0
    warp_size = launch[L_WARP_SIZE]
    thread = at(block, B_THREADS)
    for i in range(0, n):
        thread[T_X] = i % dx
        thread[T_Y] = i // dx % dy
        thread[T_Z] = i // (dx * dy)
        thread[T_LANE] = i % warp_size
        thread[T_WARP] = i // warp_size
        thread[T_RESULT] = 0
        thread[T_MASK] = 0xFFFF_FFFF_FFFF_FFFF >> (64 - warp_size)
        thread[T_DEPTH] = 0
        thread[T_OP] = OP_READY
        thread[T_HANDLE] = host_call(launch[L_ENTRY], launch[L_ARGS], ep.u64(thread))
        thread = thread + THREAD_WORDS
    device = at(launch, L_DEVICE)
    device[D_USED] = device[D_USED] + launch[L_COST]


@ep.func
def release_barrier(launch: Words, block: Words, operation: int, barrier: ep.u64):
    faulted = block[B_FAULTED]
    thread = at(block, B_THREADS)
    for _ in range(0, launch[L_THREADS]):
        if thread[T_OP] == operation and (operation == OP_BARRIER or thread[T_A0] == barrier):
            thread[T_OP] = OP_READY
            if operation == OP_BARRIER:
                thread[T_RESULT] = faulted
        thread = thread + THREAD_WORDS


@ep.func
def meet_at_block_barrier(launch: Words, block: Words):
    """Lets the block's barrier open when every thread that has not ended is there; all end there when one has left through a fault."""
    if block[B_ARRIVED] > 0 and block[B_ARRIVED] == block[B_ALIVE]:
        block[B_ARRIVED] = 0
        release_barrier(launch, block, OP_BARRIER, 0)


# ---- waves in lockstep (AMD): lanes part at a branch, run its sides one after the other, and meet at its join


@ep.func
def open_join(thread: Words):
    """The join of the innermost branch a lane is in, or all ones."""
    found = ep.u64(0xFFFF_FFFF_FFFF_FFFF)
    if thread[T_DEPTH] > 0:
        found = thread[T_STACK + 2 * (thread[T_DEPTH] - 1)]
    return found


@ep.func
def wave_of(thread: Words):
    return thread - ep.i64(thread[T_LANE]) * THREAD_WORDS


@ep.func
def all_at(first: Words, size: ep.u64, mask: ep.u64, operation: int, join: ep.u64):
    """Whether every lane of `mask` that has not ended is at `operation` for `join`."""
    complete = True
    for i in range(0, size):
        if (mask >> i) & 1:
            p = first + i * THREAD_WORDS
            if p[T_OP] != OP_DONE and (p[T_OP] != operation or p[T_A0] != join):
                complete = False
                break
    return complete


@ep.func
def go_on(thread: Words):
    """Lets a lane run again. Branches are passed in every turn of a loop, so this is no more than going round it."""
    thread[T_OP] = OP_YIELD
    thread[T_A0] = 0


@ep.func
def release_held(launch: Words, first: Words):
    """Lets the second side of a branch run when the lanes of the first are all at the join or have ended."""
    size = launch[L_WARP_SIZE]
    for i in range(0, size):
        p = first + i * THREAD_WORDS
        if p[T_OP] == OP_HELD and all_at(first, size, p[T_A3], OP_JOIN, p[T_A0]):
            go_on(p)


@ep.func
def meet_at_split(launch: Words, thread: Words):
    size, mask, join = launch[L_WARP_SIZE], thread[T_MASK], thread[T_A0]
    first = wave_of(thread)
    if all_at(first, size, mask, OP_SPLIT, join):
        sooner, later = ep.u64(0), ep.u64(0)
        for i in range(0, size):
            p = first + i * THREAD_WORDS
            if (mask >> i) & 1 and p[T_OP] == OP_SPLIT:
                if p[T_A1] == p[T_A2]:
                    sooner = sooner | (ep.u64(1) << i)
                else:
                    later = later | (ep.u64(1) << i)
        for i in range(0, size):
            p = first + i * THREAD_WORDS
            if (mask >> i) & 1 and p[T_OP] == OP_SPLIT:
                if open_join(p) != join:
                    depth = p[T_DEPTH]
                    p[T_STACK + 2 * depth] = join
                    p[T_STACK + 2 * depth + 1] = mask
                    p[T_DEPTH] = depth + 1
                if (sooner >> i) & 1:
                    p[T_MASK] = sooner
                    go_on(p)
                else:
                    p[T_MASK] = later
                    p[T_A3] = sooner
                    if sooner == 0:
                        go_on(p)
                    else:
                        p[T_OP] = OP_HELD


@ep.func
def meet_at_join(launch: Words, thread: Words):
    join = thread[T_A0]
    if open_join(thread) != join:
        go_on(thread)
    else:
        size = launch[L_WARP_SIZE]
        first = wave_of(thread)
        mask = thread[T_STACK + 2 * (thread[T_DEPTH] - 1) + 1]
        if all_at(first, size, mask, OP_JOIN, join):
            for i in range(0, size):
                p = first + i * THREAD_WORDS
                if (mask >> i) & 1 and p[T_OP] == OP_JOIN:
                    p[T_DEPTH] = p[T_DEPTH] - 1
                    p[T_MASK] = mask
                    go_on(p)
        else:
            release_held(launch, first)


@ep.func
def lane_ended(launch: Words, thread: Words):
    """What the other lanes waited for may have been this one."""
    size = launch[L_WARP_SIZE]
    first = wave_of(thread)
    release_held(launch, first)
    for i in range(0, size):
        p = first + i * THREAD_WORDS
        if p[T_OP] == OP_SPLIT:
            meet_at_split(launch, p)
        elif p[T_OP] == OP_JOIN:
            meet_at_join(launch, p)


@ep.func
def retire(launch: Words, block: Words, thread: Words):
    handle = at(thread, T_HANDLE)
    host_call(handle[1], ep.u64(handle))
    thread[T_OP] = OP_DONE
    block[B_ALIVE] = block[B_ALIVE] - 1
    if block[B_ALIVE] == 0:
        block[B_ACTIVE] = 0
        launch[L_DONE] = launch[L_DONE] + 1
        device = at(launch, L_DEVICE)
        device[D_USED] = device[D_USED] - launch[L_COST]
    else:
        meet_at_block_barrier(launch, block)
        if launch[L_LOCKSTEP] != 0:
            lane_ended(launch, thread)


@ep.func
def lane_source(lane: ep.u64, kind: ep.u64, argument: ep.u64, size: ep.u64):
    """The lane a shuffle reads."""
    source = argument % size
    if kind == 1:
        source = lane - argument if argument <= lane else lane
    elif kind == 2:
        source = lane + argument if lane + argument < size else lane
    elif kind == 3:
        source = (lane ^ argument) % size
    return source


@ep.func
def meet_in_warp(launch: Words, thread: Words):
    """Completes a warp operation when every lane of its mask is at it."""
    size = launch[L_WARP_SIZE]
    lane, mask, operation, kind = thread[T_LANE], thread[T_A0], thread[T_OP], thread[T_A1]
    first = thread - ep.i64(lane) * THREAD_WORDS
    complete = ((mask >> lane) & 1) == 1
    for step in range(1, size):
        other = (lane + step) % size
        if (mask >> other) & 1:
            p = first + other * THREAD_WORDS
            if p[T_OP] != operation or p[T_A0] != mask or ((operation == OP_SHUFFLE or operation == OP_VOTE) and p[T_A1] != kind):
                complete = False
                break
    if complete:
        ballot = ep.u64(0)
        elected = ep.count_trailing_zeros(mask)
        if operation == OP_VOTE:
            for i in range(0, size):
                if (mask >> i) & 1:
                    ballot = ballot | ((first + i * THREAD_WORDS)[T_A2] << i)
        for i in range(0, size):
            if (mask >> i) & 1:
                p = first + i * THREAD_WORDS
                if operation == OP_SHUFFLE:
                    p[T_RESULT] = (first + lane_source(i, kind, p[T_A2], size) * THREAD_WORDS)[T_A3]
                elif operation == OP_VOTE:
                    if kind == 0:
                        p[T_RESULT] = ballot
                    elif kind == 1:
                        p[T_RESULT] = ep.u64(1) if ballot != 0 else ep.u64(0)
                    else:
                        p[T_RESULT] = ep.u64(1) if ballot == mask else ep.u64(0)
                elif operation == OP_ELECT:
                    p[T_RESULT] = ep.u64(1) if i == elected else ep.u64(0)
        for i in range(0, size):
            if (mask >> i) & 1:
                (first + i * THREAD_WORDS)[T_OP] = OP_READY


@ep.func
def may_run(engine: Words, thread: Words):
    operation = thread[T_OP]
    runs = operation == OP_READY or operation == OP_YIELD
    if operation == OP_POLL:
        if thread[T_A2] == 32:
            runs = ep.u64(thread.cast(ep.Ptr[ep.u32])[T_A0][0]) != thread[T_A1]
        else:
            runs = at(thread, T_A0)[0] != thread[T_A1]
        if runs:
            thread[T_RESULT] = 0
    elif operation == OP_SLEEP:
        runs = engine[E_TIME] >= thread[T_A0]
    return runs


@ep.func
def resume(engine: Words, launch: Words, block: Words, thread: Words):
    """Runs one thread until it suspends, and takes note of why it did."""
    handle = at(thread, T_HANDLE)
    host_call(handle[0], ep.u64(handle))
    engine[E_RESUMES] = engine[E_RESUMES] + 1
    operation = thread[T_OP]
    if operation == OP_DONE:
        retire(launch, block, thread)
    elif operation == OP_BARRIER:
        block[B_ARRIVED] = block[B_ARRIVED] + 1
        meet_at_block_barrier(launch, block)
    elif operation == OP_NAMED or operation == OP_ARRIVE:
        barrier, wanted = thread[T_A0], thread[T_A1]
        arrived = block[B_NAMED + barrier % 16] + 1
        block[B_NAMED + barrier % 16] = arrived
        if operation == OP_ARRIVE:
            thread[T_OP] = OP_READY
        if arrived == wanted:
            block[B_NAMED + barrier % 16] = 0
            release_barrier(launch, block, OP_NAMED, barrier)
    elif operation == OP_SYNC or operation == OP_SHUFFLE or operation == OP_VOTE or operation == OP_ELECT:
        meet_in_warp(launch, thread)
    elif operation == OP_SPLIT:
        meet_at_split(launch, thread)
    elif operation == OP_JOIN:
        meet_at_join(launch, thread)
    elif operation == OP_TRAP:
        launch[L_TRAPS] = launch[L_TRAPS] + 1
        retire(launch, block, thread)
        # The launch is over: what is left of it only has to say where.
        thread[T_OP] = OP_TRAP


@ep.func
def has_turn(engine: Words, launch: Words, block: Words, thread: Words):
    """Whether the schedule lets a runnable thread go now."""
    mode = engine[E_MODE]
    chosen = True
    if mode == MODE_UNIFORM:
        chosen = random_below(engine, 2) == 0
    elif mode == MODE_PRIORITY:
        place = (launch[L_SEED] << 40) + (block[B_X] << 16) + thread[T_WARP] * 64 + thread[T_LANE]
        chosen = ((place ^ engine[E_SALT]) * 0x9E37_79B9_7F4A_7C15 >> 40) % LEVELS == engine[E_LEVEL]
    elif mode == MODE_STARVE:
        chosen = launch[L_DEVICE] != engine[E_STARVED] or engine[E_LEVEL] == 0
    return chosen


@ep.func
def next_level(engine: Words, ran: ep.u64, useful: ep.u64):
    """After a pass of a schedule by priority: the level of the next one. Returns how many ran, for a whole sweep where one ends."""
    engine[E_SWEPT] = engine[E_SWEPT] + ran
    result = ep.u64(1)
    if useful != 0:
        engine[E_LEVEL] = LEVELS - 1
        engine[E_SWEPT] = 0
        if random_below(engine, 32) == 0:
            engine[E_SALT] = engine[E_RANDOM]
    elif engine[E_LEVEL] != 0:
        engine[E_LEVEL] = engine[E_LEVEL] - 1
    else:
        result = engine[E_SWEPT]
        engine[E_LEVEL] = LEVELS - 1
        engine[E_SWEPT] = 0
    return result


@ep.func
def run_warp(engine: Words, launch: Words, block: Words, first: Words):
    """Gives every lane that may run one turn. Returns how many ran, and how many of those were doing more than going round a loop."""
    size = launch[L_WARP_SIZE]
    ran, useful = ep.u64(0), ep.u64(0)
    turn = random_below(engine, size)
    for i in range(0, size):
        thread = first + (i + turn) % size * THREAD_WORDS
        operation, bounded = thread[T_OP], thread[T_A0]
        if launch[L_TRAPS] != 0:
            break
        if may_run(engine, thread):
            if has_turn(engine, launch, block, thread):
                resume(engine, launch, block, thread)
                ran += 1
            elif engine[E_MODE] != MODE_UNIFORM:
                continue
            else:
                ran += 1
            if operation != OP_SLEEP and (operation != OP_YIELD or bounded != 0):
                useful += 1
    return ran, useful


@ep.func
def run_launch(engine: Words, launch: Words):
    ran, useful = ep.u64(0), ep.u64(0)
    slots = launch[L_SLOT_COUNT]
    device = at(launch, L_DEVICE)
    warps = launch[L_THREADS] // launch[L_WARP_SIZE]
    stride = launch[L_WARP_SIZE] * THREAD_WORDS
    turn = random_below(engine, slots)
    table = at(launch, L_SLOTS)
    for i in range(0, slots):
        block = table.cast(ep.Ptr[ep.u64])[(i + turn) % slots]
        if (
            launch[L_TRAPS] == 0
            and block[B_ACTIVE] == 0
            and launch[L_NEXT] < launch[L_BLOCKS]
            and device[D_USED] + launch[L_COST] <= device[D_CAPACITY]
        ):
            start_block(launch, block)
            ran += 1
            useful += 1
        if block[B_ACTIVE] != 0:
            threads = at(block, B_THREADS)
            shift = random_below(engine, warps)
            for w in range(0, warps):
                more, better = run_warp(engine, launch, block, threads + (w + shift) % warps * stride)
                ran += more
                useful += better
    return ran, useful


@ep.func
def next_wake(engine: Words):
    """The earliest time at which a sleeping thread wakes, or all ones."""
    earliest = ep.u64(0xFFFF_FFFF_FFFF_FFFF)
    for l in range(0, engine[E_COUNT]):  # noqa: E741
        launch = at(engine, E_LAUNCHES).cast(ep.Ptr[ep.u64])[l]
        table = at(launch, L_SLOTS).cast(ep.Ptr[ep.u64])
        for s in range(0, launch[L_SLOT_COUNT]):
            block = table[s]
            if block[B_ACTIVE] != 0:
                thread = at(block, B_THREADS)
                for _ in range(0, launch[L_THREADS]):
                    if thread[T_OP] == OP_SLEEP:
                        earliest = min(earliest, thread[T_A0])
                    thread = thread + THREAD_WORDS
    return earliest


@ep.kernel
def run(engine: Words):
    """Runs until a launch ends or nothing can go on; sets the engine's status."""
    status = ep.u64(0)
    while status == 0:
        engine[E_PASSES] = engine[E_PASSES] + 1
        # While threads only go round loops, time runs faster: what waits for the clock need not wait long.
        engine[E_TIME] = engine[E_TIME] + NANOSECONDS_A_PASS * (1 + engine[E_SPINS])
        ran, useful = ep.u64(0), ep.u64(0)
        launches = engine[E_COUNT]
        turn = random_below(engine, launches)
        for i in range(0, launches):
            launch = at(engine, E_LAUNCHES).cast(ep.Ptr[ep.u64])[(i + turn) % launches]
            more, better = run_launch(engine, launch)
            ran += more
            useful += better
            if launch[L_DONE] == launch[L_BLOCKS] or launch[L_TRAPS] != 0:
                status = ep.u64(STATUS_FINISHED)
        if engine[E_MODE] >= MODE_PRIORITY:
            ran = next_level(engine, ran, useful)
        if useful == 0:
            engine[E_SPINS] = engine[E_SPINS] + 1
        else:
            engine[E_SPINS] = 0
            engine[E_USEFUL] = engine[E_RESUMES]
        if status == 0 and ran == 0:
            wake = next_wake(engine)
            if wake == 0xFFFF_FFFF_FFFF_FFFF:
                status = ep.u64(STATUS_STUCK)
            else:
                engine[E_TIME] = wake
        if status == 0 and engine[E_SPINS] > engine[E_SPIN_LIMIT] and engine[E_RESUMES] - engine[E_USEFUL] > engine[E_SPIN_RESUMES]:
            status = ep.u64(STATUS_LIVELOCK)
    engine[E_STATUS] = status


@functools.cache
def scheduler_object() -> bytes:
    """The scheduler as an object file for this machine; its symbol is `run`, called with a pointer to the engine's address."""
    from epdsl import fingerprint
    from epdsl.build import build
    from epdsl.cache import cached, key_of
    from epdsl.compiler import CompileRequest
    from epdsl.lower_sim import compile_module
    from epdsl.targets import parse_target

    target = parse_target("sim")
    built = build(CompileRequest("run", run.function, None, run.parameters, {}, target))
    lowering = inspect.getsource(sys.modules[compile_module.__module__])
    key = key_of("scheduler", built.bytecode, lowering, fingerprint.versions()["llvm"], fingerprint.host())
    return cached(key, "the simulator's scheduler", lambda: compile_module(built.module, target, "run", host=True).binary)
