"""What a kernel tells the host, and how it stops: asserts, printf, trap; and assembly of the target."""

from __future__ import annotations

import string
from typing import Any

from epdsl_runtime import context_layout as layout

from epdsl.ir.types import I1, I64, U64, PtrType, ScalarType

from .arithmetic import condition, convert, materialize
from .errors import CompileError
from .intrinsic import intrinsic
from .tracer import Tracer
from .types import as_type, f64
from .values import Value, describe

ASSERT_VALUES = 3


@intrinsic
def device_assert(t: Tracer, test: Any, message: str = "", *values: Any) -> None:
    """Where `test` is false the thread reports `message` and leaves the kernel, and the host raises. Each `{}` takes a value, at most 3."""
    holds = condition(t.b, test)
    dtypes, words = _record(t, "device_assert", message, values, ASSERT_VALUES)
    site = t.site("assert", message, dtypes)
    out, on = t.b.new_block(), t.b.new_block()
    t.b.cond_branch(t.b.op("arith.xori", [t.b.i1], [holds.ir, t.b.constant(I1, True)]), out, on, fault=True)
    t.b.block = out
    first, second, third = (*words, 0, 0, 0)[:3]
    t.write_fault(layout.KIND_ASSERT, site, third, second, first)
    t.fault_exits.append(t.b.block)
    t.b.block = on


@intrinsic
def printf(t: Tracer, text: str, *values: Any) -> None:
    """Prints `text` with its `{}` filled in, preceded by rank, block and thread, at the next synchronisation.

    At most 8 values. Records past the log's capacity are counted and reported, not lost silently.
    """
    dtypes, words = _record(t, "printf", text, values, layout.LOG_MAX_VALUES)
    t.write_log(t.site("printf", text, dtypes), tuple(words))


def _record(t: Tracer, name: str, text: Any, values: tuple[Any, ...], most: int) -> tuple[list[str], list[Value]]:
    """The values of a report as 64-bit words, and how to read them."""
    if not isinstance(text, str):
        raise CompileError("EP070", f"ep.{name} needs a text, not {describe(text)}", '"x = {}" and a value for each {}')
    holes = sum(1 for _, hole, _, _ in string.Formatter().parse(text) if hole is not None)
    if holes != len(values):
        raise CompileError("EP070", f"ep.{name}: the text has {holes} {{}} for {len(values)} values", "one {} for each value")
    if len(values) > most:
        raise CompileError("EP070", f"ep.{name} of {len(values)} values", f"at most {most}")
    dtypes: list[str] = []
    words: list[Value] = []
    for value in values:
        dtype, word = _as_word(t, value)
        dtypes.append(dtype)
        words.append(word)
    return dtypes, words


def _as_word(t: Tracer, value: Any) -> tuple[str, Value]:
    made = materialize(t.b, value)
    kind = made.type
    if isinstance(kind, PtrType):
        return "u64", convert(t.b, made, U64)
    if not isinstance(kind, ScalarType):
        raise CompileError("EP070", f"{describe(value)} cannot be printed", "scalars and pointers")
    if kind.is_float:
        return "f64", Value(U64, t.b.op("arith.bitcast", [t.b.i64], [t.call(f64, (made,), {}).ir]))
    if kind.kind == "i":
        return "i64", Value(U64, convert(t.b, made, I64).ir)
    return "u64", convert(t.b, made, U64)


@intrinsic
def trap(t: Tracer) -> None:
    """Stops the kernel with a hardware error. Prefer ep.device_assert, which says why."""
    t.b.ep("trap", [], [], site=t.site("trap", "ep.trap()"))


@intrinsic
def inline_asm(t: Tracer, text: str, constraints: str, *operands: Any, result: Any = None, vendor: str | None = None) -> Any:
    """Target assembly: `$0`, `$1`, ... are the result (if any) and the operands, as in LLVM.

    `vendor` ("nvidia" or "amd") is required and must be the target's: guard the call with `if ep.target.vendor == ...`.
    """
    if vendor not in ("nvidia", "amd"):
        raise CompileError("EP071", "ep.inline_asm needs vendor=", 'vendor="nvidia" or vendor="amd", inside if ep.target.vendor == ...')
    if t.target.simulated:
        raise CompileError("EP072", "the simulator cannot run assembly", "if not ep.target.simulated: ..., with another way in the else")
    if vendor != t.target.vendor:
        raise CompileError("EP072", f"{vendor} assembly in a kernel for {t.target.name}", f'if ep.target.vendor == "{vendor}": ...')
    kind = as_type(result) if result is not None else None
    if kind is not None and not isinstance(kind, ScalarType):
        raise CompileError("EP071", f"ep.inline_asm gives one scalar, not {kind}", "result=ep.u32")
    made = t.b.inline_asm(text, constraints, kind, [materialize(t.b, v).ir for v in operands])
    return Value(kind, made) if kind is not None else None
