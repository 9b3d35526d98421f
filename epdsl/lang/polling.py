"""The loop behind every wait: look, and look again until it holds or the time is up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from epdsl_runtime import context_layout as layout

from epdsl.ir.types import I1, I32, I64, U64

from .arithmetic import address, convert
from .tracer import Tracer
from .values import Value

# A power of two. A GPU reads its timer once in so many looks, so that a look costs one load.
LOOKS_A_CHECK = 256

Look = Callable[[], tuple[Value, Value]]


def poll_until(t: Tracer, look: Look, pointer: Value, limit: Value, site: int, bits: int, expected: Any) -> Value:
    """Emits the loop and goes on where the look holds; returns the value it held for.

    look      emits one look; returns the word seen and the condition
    pointer   what is looked at, and `bits` its width, for the fault record and for the simulator, which resumes when it changes
    limit     nanoseconds until the thread reports a fault and the kernel stops
    expected  what the record says was expected
    """
    return (_simulated if t.target.simulated else _on_gpu)(t, look, pointer, limit, site, bits, expected)


def _simulated(t: Tracer, look: Look, pointer: Value, limit: Value, site: int, bits: int, expected: Any) -> Value:
    """The simulator suspends at each look that fails."""
    started = t.b.ep("special", [I64], [], name="globaltimer")
    header, done, missed, out = (t.b.new_block() for _ in range(4))
    t.b.branch(header)
    t.b.block = header
    value, holds = look()
    t.b.cond_branch(holds.ir, done, missed)
    t.b.block = missed
    word = convert(t.b, value, U64)
    expired = t.b.ep("poll", [I1], [pointer.ir, word.ir, started, limit.ir], site=site, bits=bits)
    t.b.cond_branch(expired, out, header, fault=True)
    _give_up(t, out, pointer, site, expected, word)
    t.b.block = done
    return value


def _on_gpu(t: Tracer, look: Look, pointer: Value, limit: Value, site: int, bits: int, expected: Any) -> Value:
    """Carries the number of looks, and the time of the first check (0: none yet)."""
    b = t.b
    header, onward = b.new_block([I32, I64]), b.new_block([I64])
    done, missed, check, skip, again, out = (b.new_block() for _ in range(6))
    b.branch(header, [b.constant(I32, 0), b.constant(I64, 0)])
    b.block = header
    looks, first = header.arguments
    value, holds = look()
    b.cond_branch(holds.ir, done, missed)
    b.block = missed
    looks = b.op("arith.addi", [b.i32], [looks, b.constant(I32, 1)])
    phase = b.op("arith.andi", [b.i32], [looks, b.constant(I32, LOOKS_A_CHECK - 1)])
    b.cond_branch(b.compare("==", I32, phase, b.constant(I32, 0)), check, skip)
    b.block = skip
    b.branch(onward, [first])
    b.block = check
    now = b.ep("special", [I64], [], name="globaltimer")
    started = b.select(b.compare("==", I64, first, b.constant(I64, 0)), now, first)
    word = convert(b, value, U64)
    expired = b.ep("poll", [I1], [pointer.ir, word.ir, started, limit.ir], site=site, bits=bits)
    b.cond_branch(expired, out, again, fault=True)
    b.block = again
    b.branch(onward, [started])
    b.block = onward
    b.branch(header, [looks, onward.arguments[0]])
    _give_up(t, out, pointer, site, expected, word)
    b.block = done
    return value


def _give_up(t: Tracer, out: Any, pointer: Value, site: int, expected: Any, last: Value) -> None:
    t.b.block = out
    t.write_fault(layout.KIND_TIMEOUT, site, address(t.b, pointer), expected, last)
    t.fault_exits.append(t.b.block)
