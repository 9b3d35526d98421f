"""The `ep` dialect: what upstream MLIR dialects do not say in a vendor-neutral way.

Every operation is defined here once, in IRDL, and lowered by one row in each of `lower_nvvm`, `lower_rocdl` and `lower_sim`.
Attributes are plain strings so that a dump reads without a table:

* `order`  `plain` (no promise to any other thread), `relaxed`, `acquire`, `release`, `acq_rel`, `seq_cst`
* `scope`  `none` (only with `plain`), `block`, `device`, `system`
* `cache`  `default`, `streaming` (read or written once, do not keep)
* `site`   index into the artifact's table of source sites (an i32). Barriers, warp operations and sleeps carry it too where the front end
  made them, so that the simulator's reports name their lines; lowerings to a GPU leave it alone
"""

from __future__ import annotations

import sys
from typing import Any

ORDERS = ("plain", "relaxed", "acquire", "release", "acq_rel", "seq_cst")
SCOPES = ("none", "block", "device", "system")

LOAD_ORDERS = ("relaxed", "acquire", "seq_cst")
STORE_ORDERS = ("relaxed", "release", "seq_cst")
RMW_ORDERS = ("relaxed", "acquire", "release", "acq_rel", "seq_cst")
FENCE_ORDERS = ("acquire", "release", "acq_rel", "seq_cst")
ATOMIC_SCOPES = ("block", "device", "system")

RMW_OPS = ("add", "sub", "min", "max", "umin", "umax", "and", "or", "xor", "xchg", "fadd")
SHUFFLE_KINDS = ("idx", "up", "down", "xor")
VOTE_KINDS = ("ballot", "any", "all")

STOPS = "ep.stops_at_lines"
"""Attribute of a kernel that a debugger may step through."""

SPECIALS_32 = (*(f"{n}.{a}" for n in ("thread_idx", "block_idx", "block_dim", "grid_dim") for a in "xyz"), "lane_id", "warp_id")
SPECIALS_64 = ("clock", "globaltimer")

IRDL = """
irdl.dialect @ep {
  // %value = ep.load(%ptr): scalar or vector of up to 16 bytes.
  irdl.operation @load {
    %ptr = irdl.any
    %value = irdl.any
    %o = irdl.base "#builtin.string"
    %s = irdl.base "#builtin.string"
    %c = irdl.base "#builtin.string"
    irdl.operands(ptr: %ptr)
    irdl.attributes { "order" = %o, "scope" = %s, "cache" = %c }
    irdl.results(value: %value)
  }
  // ep.store(%value, %ptr)
  irdl.operation @store {
    %value = irdl.any
    %ptr = irdl.any
    %o = irdl.base "#builtin.string"
    %s = irdl.base "#builtin.string"
    %c = irdl.base "#builtin.string"
    irdl.operands(value: %value, ptr: %ptr)
    irdl.attributes { "order" = %o, "scope" = %s, "cache" = %c }
  }
  // %old = ep.atomic_rmw(%ptr, %value)
  irdl.operation @atomic_rmw {
    %ptr = irdl.any
    %value = irdl.any
    %k = irdl.base "#builtin.string"
    %o = irdl.base "#builtin.string"
    %s = irdl.base "#builtin.string"
    irdl.operands(ptr: %ptr, value: %value)
    irdl.attributes { "op" = %k, "order" = %o, "scope" = %s }
    irdl.results(old: %value)
  }
  // ep.reduce(%ptr, %value): a read-modify-write whose old value nobody wants.
  irdl.operation @reduce {
    %ptr = irdl.any
    %value = irdl.any
    %k = irdl.base "#builtin.string"
    %o = irdl.base "#builtin.string"
    %s = irdl.base "#builtin.string"
    irdl.operands(ptr: %ptr, value: %value)
    irdl.attributes { "op" = %k, "order" = %o, "scope" = %s }
  }
  // %old = ep.atomic_cas(%ptr, %expected, %desired)
  irdl.operation @atomic_cas {
    %ptr = irdl.any
    %value = irdl.any
    %o = irdl.base "#builtin.string"
    %s = irdl.base "#builtin.string"
    irdl.operands(ptr: %ptr, expected: %value, desired: %value)
    irdl.attributes { "order" = %o, "scope" = %s }
    irdl.results(old: %value)
  }
  irdl.operation @fence {
    %o = irdl.base "#builtin.string"
    %s = irdl.base "#builtin.string"
    irdl.attributes { "order" = %o, "scope" = %s }
  }
  // Orders this thread's ordinary accesses with the bulk copy engine's. space: "shared" or "global".
  irdl.operation @proxy_fence {
    %k = irdl.base "#builtin.string"
    irdl.attributes { "space" = %k }
  }
  irdl.operation @barrier { }
  irdl.operation @named_barrier {
    %i32 = irdl.is i32
    irdl.operands(id: %i32, threads: %i32)
  }
  irdl.operation @named_arrive {
    %i32 = irdl.is i32
    irdl.operands(id: %i32, threads: %i32)
  }
  irdl.operation @warp_sync {
    %i64 = irdl.is i64
    irdl.operands(mask: %i64)
  }
  // %result = ep.shuffle(%value, %lane, %mask): %value has 32 or 64 bits. kind "idx": %lane is the source lane,
  // else the distance; a lane whose source would be outside the warp keeps its own value.
  irdl.operation @shuffle {
    %value = irdl.any
    %i32 = irdl.is i32
    %i64 = irdl.is i64
    %k = irdl.base "#builtin.string"
    irdl.operands(value: %value, lane: %i32, mask: %i64)
    irdl.attributes { "kind" = %k }
    irdl.results(result: %value)
  }
  // ballot -> i64 (bit = lane), any and all -> i1
  irdl.operation @vote {
    %i1 = irdl.is i1
    %i64 = irdl.is i64
    %r = irdl.any
    %k = irdl.base "#builtin.string"
    irdl.operands(predicate: %i1, mask: %i64)
    irdl.attributes { "kind" = %k }
    irdl.results(result: %r)
  }
  // True in exactly one lane of %mask.
  irdl.operation @elect {
    %i1 = irdl.is i1
    %i64 = irdl.is i64
    irdl.operands(mask: %i64)
    irdl.results(result: %i1)
  }
  irdl.operation @special {
    %r = irdl.any
    %n = irdl.base "#builtin.string"
    irdl.attributes { "name" = %n }
    irdl.results(value: %r)
  }
  // Address of byte `offset` of the block's shared memory, as !llvm.ptr<3>.
  irdl.operation @shared {
    %r = irdl.any
    %n = irdl.any
    irdl.attributes { "offset" = %n }
    irdl.results(ptr: %r)
  }
  irdl.operation @sleep {
    %i32 = irdl.is i32
    irdl.operands(ns: %i32)
  }
  // One failed look at %ptr, which held %value (as i64). True when the wait that began at globaltimer %started
  // has used up %timeout nanoseconds. `bits`: the width of what was looked at. The simulator suspends here.
  irdl.operation @poll {
    %ptr = irdl.any
    %i64 = irdl.is i64
    %i1 = irdl.is i1
    %n = irdl.any
    %b = irdl.any
    irdl.operands(ptr: %ptr, value: %i64, started: %i64, timeout: %i64)
    irdl.attributes { "site" = %n, "bits" = %b }
    irdl.results(expired: %i1)
  }
  // The back edge of a loop that other threads may have to end or see. Nothing on a GPU; the simulator suspends here.
  // `bounded` 1: it ends whatever they do.
  irdl.operation @yield {
    %n = irdl.any
    %b = irdl.any
    irdl.attributes { "site" = %n, "bounded" = %b }
  }
  irdl.operation @trap { }
  // A value that a debugger shows at the next `breakpoint`, in slot `slot`. Exists on the simulator only.
  irdl.operation @debug_value {
    %value = irdl.any
    %n = irdl.any
    irdl.operands(value: %value)
    irdl.attributes { "slot" = %n }
  }
  // Where a debugger stops the thread: always (kind "breakpoint"), or while it is stepped ("line"). Exists on the simulator only.
  irdl.operation @breakpoint {
    %n = irdl.any
    %k = irdl.base "#builtin.string"
    irdl.attributes { "site" = %n, "kind" = %k }
  }
  irdl.operation @mbarrier_init {
    %ptr = irdl.any
    %i32 = irdl.is i32
    irdl.operands(barrier: %ptr, count: %i32)
  }
  irdl.operation @mbarrier_arrive {
    %ptr = irdl.any
    irdl.operands(barrier: %ptr)
  }
  // Arrives and announces %bytes more bytes of bulk copies.
  irdl.operation @mbarrier_expect {
    %ptr = irdl.any
    %i32 = irdl.is i32
    irdl.operands(barrier: %ptr, bytes: %i32)
  }
  // True when the phase of parity %parity is complete; may be false spuriously. Acquires at block scope when true.
  irdl.operation @mbarrier_test {
    %ptr = irdl.any
    %i32 = irdl.is i32
    %i1 = irdl.is i1
    irdl.operands(barrier: %ptr, parity: %i32)
    irdl.results(done: %i1)
  }
  // Asynchronous copy of %bytes (a multiple of 16, both addresses 16-byte aligned) global -> shared, completing on %barrier.
  irdl.operation @bulk_load {
    %dst = irdl.any
    %src = irdl.any
    %bar = irdl.any
    %i32 = irdl.is i32
    irdl.operands(dst: %dst, src: %src, bytes: %i32, barrier: %bar)
  }
  // Asynchronous copy shared -> global, completing with the thread's bulk group.
  irdl.operation @bulk_store {
    %dst = irdl.any
    %src = irdl.any
    %i32 = irdl.is i32
    irdl.operands(dst: %dst, src: %src, bytes: %i32)
  }
  irdl.operation @bulk_commit { }
  // Waits until at most `pending` of this thread's bulk groups are in flight. read: "source" (the shared memory may be
  // reused) or "full" (the writes have been made).
  irdl.operation @bulk_wait {
    %n = irdl.any
    %k = irdl.base "#builtin.string"
    irdl.attributes { "pending" = %n, "read" = %k }
  }
}
"""


_USED = ("arith", "cf", "gpu", "llvm", "math", "nvvm", "rocdl", "vector")


def context() -> Any:
    """A new MLIR context with the dialects of a kernel. Others are loaded when a pass or a text needs them: all at once take 8 ms."""
    from mlir.ir import Context

    made = Context(load_on_create_dialects=())  # pyright: ignore[reportCallIssue]
    for name in _USED:
        # Unlike `dialects`, this leaves the Python module of the dialect alone, which takes longer than all the rest.
        made.get_dialect_descriptor(name)
    # A kernel is one function: there is nothing for other threads to do.
    made.enable_multithreading(False)
    register(made)
    return made


def register(context: Any) -> None:
    """Loads the `ep` dialect into an MLIR context. Call once per context."""
    # MLIR looks for a dialect's Python module at every operation it shows, and does not remember that there is none.
    sys.modules.setdefault("mlir.dialects.ep", sys.modules[__name__])
    from mlir.dialects import irdl
    from mlir.ir import Location, Module

    with context, Location.unknown():
        irdl.load_dialects(Module.parse(IRDL))  # pyright: ignore[reportAttributeAccessIssue]
