"""The asynchronous copy engine: bulk copies between global and shared memory, and the barriers that count their bytes.

On sm_90 and later these are TMA bulk copies and mbarriers; elsewhere the copy is made by the issuing thread, at once.
"""

from __future__ import annotations

from typing import Any

from epdsl.ir.types import I1, I32, U64, PtrType

from .arithmetic import convert, materialize
from .elements import as_pointer
from .errors import CompileError
from .function import func
from .intrinsic import intrinsic
from .memory import nanoseconds
from .polling import Look, poll_until
from .tracer import Tracer
from .types import TypeObject, struct
from .values import Value, is_number

SharedWord = TypeObject(PtrType(U64, "shared"))


def _shared(value: Any, operation: str) -> Value:
    pointer, kind = as_pointer(value, operation)
    if kind.space != "shared":
        raise CompileError("EP067", f"{operation} needs a barrier in shared memory", "ep.MBarrier(ep.shared(ep.u64, 1))")
    return pointer


@intrinsic
def mbarrier_init(t: Tracer, word: Any, count: Any) -> None:
    """Makes `word` a barrier of `count` arrivals. One thread does it.

    `ep.proxy_fence("shared")` by the same thread shows it to the copy engine, and a block barrier to the other threads.
    """
    t.b.ep("mbarrier_init", [], [_shared(word, "ep.MBarrier.init").ir, convert(t.b, materialize(t.b, count, I32), I32).ir])


@intrinsic
def mbarrier_arrive(t: Tracer, word: Any) -> None:
    t.b.ep("mbarrier_arrive", [], [_shared(word, "ep.MBarrier.arrive").ir])


@intrinsic
def mbarrier_expect(t: Tracer, word: Any, nbytes: Any) -> None:
    t.b.ep("mbarrier_expect", [], [_shared(word, "ep.MBarrier.expect").ir, convert(t.b, materialize(t.b, nbytes, I32), I32).ir])


@intrinsic
def mbarrier_wait(t: Tracer, word: Any, parity: Any, timeout_ns: Any = None) -> None:
    """Waits until the phase of `parity` is complete; what its arrivals and copies wrote is then visible."""
    pointer = _shared(word, "ep.MBarrier.wait")
    if timeout_ns is None:
        raise CompileError("EP051", "ep.MBarrier.wait needs timeout_ns=: no wait is unbounded", "timeout_ns=10**9")
    phase = convert(t.b, materialize(t.b, parity, I32), I32)
    limit = nanoseconds(t, timeout_ns)
    site = t.site("wait", "the barrier's phase to complete", ("u64",))

    look = Look(
        pointer,
        # The word is the hardware's own; all ones, which it never is, lets the simulator look again at each turn.
        lambda: Value(U64, t.b.constant(U64, U64.max)),
        lambda _: Value(I1, t.b.ep("mbarrier_test", [I1], [pointer.ir, phase.ir])),
    )
    poll_until(t, (look,), limit, site, 64, convert(t.b, phase, U64))


@struct
class MBarrier:
    """A barrier in shared memory that counts arrivals and the bytes of bulk copies. Phases alternate parity 0, 1, 0, ..."""

    word: SharedWord  # pyright: ignore[reportInvalidTypeForm]

    @func
    def init(self, count: Any = 1):
        """Makes the word a barrier of `count` arrivals. One thread does it, then `ep.proxy_fence("shared")`; a block barrier follows."""
        mbarrier_init(self.word, count)

    @func
    def arrive(self):
        """Counts one arrival of the current phase, and releases what this thread did before to who waits for the phase."""
        mbarrier_arrive(self.word)

    @func
    def expect(self, nbytes: Any):
        """Arrives, and lets the phase wait for `nbytes` more bytes of bulk copies."""
        mbarrier_expect(self.word, nbytes)

    @func
    def wait(self, parity: Any, timeout_ns: Any = None):
        """Waits until the phase of `parity` is complete; what its arrivals and copies wrote is then visible. `timeout_ns` is required."""
        mbarrier_wait(self.word, parity, timeout_ns)


@intrinsic
def bulk_copy(t: Tracer, dst: Any, src: Any, nbytes: Any, barrier: Any = None) -> None:
    """Starts copying `nbytes` (a multiple of 16; both addresses 16-byte aligned) between global and shared memory, issued by one thread.

    To shared memory it completes on `barrier`. From shared memory it joins the thread's bulk group: `ep.bulk_commit`, `ep.bulk_wait`;
    what ordinary stores wrote there must be published with `ep.proxy_fence("shared")` first.
    """
    to, to_kind = as_pointer(dst, "ep.bulk_copy")
    source, source_kind = as_pointer(src, "ep.bulk_copy")
    if is_number(nbytes) and (int(nbytes) % 16 or int(nbytes) < 0):
        raise CompileError("EP066", f"ep.bulk_copy of {nbytes} bytes: the engine copies 16 at a time", "a multiple of 16", about="nbytes")
    size = convert(t.b, materialize(t.b, nbytes, I32), I32)
    if to_kind.space == "shared" and source_kind.space == "global":
        word = getattr(barrier, "fields", {}).get("word")
        if word is None:
            raise CompileError("EP067", "ep.bulk_copy to shared memory needs barrier=", "barrier=ep.MBarrier(...)")
        t.b.ep("bulk_load", [], [to.ir, source.ir, size.ir, _shared(word, "ep.bulk_copy").ir])
    elif to_kind.space == "global" and source_kind.space == "shared":
        if barrier is not None:
            raise CompileError(
                "EP067",
                "ep.bulk_copy from shared memory completes with the bulk group, not on a barrier",
                "ep.bulk_commit(); ep.bulk_wait()",
            )
        t.b.ep("bulk_store", [], [to.ir, source.ir, size.ir])
    else:
        raise CompileError(
            "EP066", f"ep.bulk_copy from {source_kind.space} to {to_kind.space} memory", "one side in shared memory, or ep.copy"
        )


@intrinsic
def bulk_commit(t: Tracer) -> None:
    """Closes the thread's current group of bulk copies from shared memory."""
    t.b.ep("bulk_commit", [], [])


@intrinsic
def bulk_wait(t: Tracer, pending: int = 0, read: str = "full") -> None:
    """Waits until at most `pending` of the thread's groups are in flight. read="source": their shared memory may be reused;
    read="full": their writes are made."""
    if not is_number(pending) or read not in ("source", "full"):
        raise CompileError(
            "EP047", f"ep.bulk_wait(pending={pending!r}, read={read!r})", 'a compile-time pending and read="source" or "full"'
        )
    t.b.ep("bulk_wait", [], [], pending=int(pending), read=read)


@intrinsic
def proxy_fence(t: Tracer, space: str = "shared") -> None:
    """Orders this thread's ordinary accesses to `space` ("shared" or "global") with the copy engine's."""
    if space not in ("shared", "global"):
        raise CompileError("EP047", f"ep.proxy_fence({space!r})", '"shared" or "global"')
    t.b.ep("proxy_fence", [], [], space=space)
