"""The loop behind every wait: look, and look again until it holds or the time is up."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from epdsl_runtime import context_layout as layout

from epdsl.ir.types import I1, I32, I64, U64

from .arithmetic import address, convert
from .tracer import Tracer
from .values import Value

# A power of two. A GPU reads its timer once in so many looks, so that a look costs one load.
LOOKS_A_CHECK = 256
# Of a wait that lasts: 16 ms where a look takes 2 us.
LOOKS_A_REPORT = 1 << 13


@dataclass(frozen=True)
class Look:
    """How one word is looked at.

    pointer  where it is, for the fault record and for the simulator, which resumes when it changes
    load     emits the load; returns what was seen
    holds    emits the condition on that
    """

    pointer: Value
    load: Callable[[], Value]
    holds: Callable[[Value], Value]


def poll_until(t: Tracer, looks: Sequence[Look], limit: Value, site: int, bits: int, expected: Any) -> tuple[Value, ...]:
    """Emits the loop and goes on where every word holds; returns the values they held for.

    A turn on a GPU makes all loads before it asks of any, so that they are on the way together. The simulator takes the words in order.

    looks     of words of `bits` bits, by pointers of one type
    limit     nanoseconds until the thread reports a fault and the kernel stops; the fault is about the first word that does not hold
    expected  what the record says was expected
    """
    return (_simulated if t.target.simulated else _on_gpu)(t, looks, limit, site, bits, expected)


def _simulated(t: Tracer, looks: Sequence[Look], limit: Value, site: int, bits: int, expected: Any) -> tuple[Value, ...]:
    return tuple(_suspending(t, look, limit, site, bits, expected) for look in looks)


def _suspending(t: Tracer, look: Look, limit: Value, site: int, bits: int, expected: Any) -> Value:
    """The simulator suspends at each look that fails."""
    pointer = look.pointer
    started = t.b.ep("special", [I64], [], name="globaltimer")
    header, done, missed, out = (t.b.new_block() for _ in range(4))
    t.b.branch(header)
    t.b.block = header
    value = look.load()
    t.b.cond_branch(look.holds(value).ir, done, missed)
    t.b.block = missed
    word = convert(t.b, value, U64)
    expired = t.b.ep("poll", [I1], [pointer.ir, word.ir, started, limit.ir], site=site, bits=bits)
    t.b.cond_branch(expired, out, header, fault=True)
    _give_up(t, out, pointer, site, expected, word)
    t.b.block = done
    return value


def _on_gpu(t: Tracer, looks: Sequence[Look], limit: Value, site: int, bits: int, expected: Any) -> tuple[Value, ...]:
    """Two loops: one that only looks, and for a wait that lasts one that also tells the host of it, once a period.

    The first is entered often and left soon. What telling needs is computed, and kept in registers, in the second alone.
    """
    b = t.b
    period = b.constant(I64, 2 << layout.WAIT_TICK_BITS)
    kind = looks[0].pointer.type
    tell, out = b.new_block([kind, I64]), b.new_block([kind, I64])

    def over(since: Any, limit: Any, missed: list[Any], then: Any, fault: bool) -> None:
        """Branches to `then` with the word that missed where the wait since `since` is over; else goes on here."""
        yes, no = b.new_block(), b.new_block()
        b.cond_branch(b.ep("poll", [I1], [*missed, since, limit], site=site, bits=bits), yes, no, fault=fault)
        b.block = yes
        b.branch(then, missed)
        b.block = no

    values, done, header, turns, missed = _turns(t, looks, None, [I64], [b.constant(I64, 0)])
    first = header.arguments[1]
    now = b.ep("special", [I64], [], name="globaltimer")
    started = b.select(b.compare("==", I64, first, b.constant(I64, 0)), now, first)
    over(started, limit.ir, missed, out, fault=True)
    over(started, period, missed, tell, fault=False)
    b.branch(header, [turns, started])

    b.block = tell
    ticks = _ticks(t, b.ep("special", [I64], [], name="globaltimer"))
    at, last = Value(kind, tell.arguments[0]), Value(U64, tell.arguments[1])
    t.write_wait(site, address(b, at), expected, last, Value(U64, started), Value(I32, ticks))
    _, done, header, turns, missed = _turns(t, looks, done, [], [])
    over(started, limit.ir, missed, out, fault=True)
    again, enough = b.new_block(), b.new_block()
    phase = b.op("arith.andi", [b.i32], [turns, b.constant(I32, LOOKS_A_REPORT - 1)])
    b.cond_branch(b.compare("==", I32, phase, b.constant(I32, 0)), enough, again)
    b.block = enough
    b.branch(tell, missed)
    b.block = again
    b.branch(header, [turns])

    _give_up(t, out, Value(kind, out.arguments[0]), site, expected, Value(U64, out.arguments[1]))
    b.block = done
    return tuple(Value(value.type, argument) for value, argument in zip(values, done.arguments, strict=True))


def _turns(
    t: Tracer, looks: Sequence[Look], done: Any, carried: list[Any], initial: list[Any]
) -> tuple[list[Value], Any, Any, Any, list[Any]]:
    """Emits a loop that looks until every word holds, then branches to `done` with the values (made where it is None).

    Goes on where LOOKS_A_CHECK more turns have failed. Returns the values, `done`, the loop's header, which takes the number of turns
    and what else it carries, that number, and of the first word that did not hold its pointer and its value as an u64.
    """
    b = t.b
    header = b.new_block([I32, *carried])
    held, missed, check, skip = (b.new_block() for _ in range(4))
    b.branch(header, [b.constant(I32, 0), *initial])
    b.block = header
    values = [look.load() for look in looks]
    hold = [look.holds(value).ir for look, value in zip(looks, values, strict=True)]
    done = done or b.new_block([value.type for value in values])
    b.cond_branch(functools.reduce(lambda a, c: b.op("arith.andi", [b.i1], [a, c]), hold), held, missed)
    b.block = held
    b.branch(done, [value.ir for value in values])
    b.block = missed
    turns = b.op("arith.addi", [b.i32], [header.arguments[0], b.constant(I32, 1)])
    phase = b.op("arith.andi", [b.i32], [turns, b.constant(I32, LOOKS_A_CHECK - 1)])
    b.cond_branch(b.compare("==", I32, phase, b.constant(I32, 0)), check, skip)
    b.block = skip
    b.branch(header, [turns, *header.arguments[1:]])
    b.block = check
    pointers, words = [look.pointer.ir for look in looks], [convert(b, value, U64).ir for value in values]
    at, word = pointers[-1], words[-1]
    for i in reversed(range(len(looks) - 1)):
        at, word = b.select(hold[i], at, pointers[i]), b.select(hold[i], word, words[i])
    return values, done, header, turns, [at, word]


def _ticks(t: Tracer, ns: Any) -> Any:
    """Nanoseconds as ticks of the context's records: an i32 that is not negative."""
    b = t.b
    ticks = b.op("arith.trunci", [b.i32], [b.op("arith.shrui", [b.i64], [ns, b.constant(I64, layout.WAIT_TICK_BITS)])])
    return b.op("arith.andi", [b.i32], [ticks, b.constant(I32, layout.WAIT_TICK_MASK)])


def _give_up(t: Tracer, out: Any, pointer: Value, site: int, expected: Any, last: Value) -> None:
    t.b.block = out
    t.write_fault(layout.KIND_TIMEOUT, site, address(t.b, pointer), expected, last)
    t.fault_exits.append(t.b.block)
