"""Dispatch: every token travels to the ranks of its experts and lands expert by expert in the output.

A launch has a number, the epoch, kept in device memory (`epochs[DISPATCH_EPOCH]` is the last one finished), so a captured launch can be
replayed. Who writes what, who waits for it:

    send block     payload -> recv_buf of the destination; finished[pair] += 1 (release, device)
    monitor warp   waits finished[pair] == count (acquire, device); publishes count to the destination (ep_signal_completion)
    offset block   waits for the counts of all ranks (acquire, system); writes the offsets; ready = epoch (release, device)
    copy block     waits ready == epoch (acquire, device); copies recv_buf -> output
    last block out tells every source "epoch consumed" (release, system), which that source's next launch waits for (acquire, system)

The chain is cumulative: lanes of a warp store payload, the warp synchronises, lane 0 releases at device scope, the monitor acquires at
device scope and releases at system scope, the destination acquires at system scope, its ready flag hands on to its copy blocks.

Why buffers may be used again, whatever the skew between ranks and whatever runs between two dispatches: nothing of launch n + 1 is
written to rank r (payload, counts, flag) before r said it consumed launch n, and r says so after the last of its blocks has read its last
byte of launch n. A count or flag carries its launch number and is compared for equality, so an old one satisfies nobody and nothing has to
be re-armed. No cycle of waits: rank r's launch n needs only launches n of its peers, which need only launches n - 1 of theirs.

In the final layout a monitor warp first finds out where this rank's block of an expert begins (a count that every rank tells every other,
or a reservation at the destination's cursor) and hands the send warps the base in a mailbox, tagged with the launch number:

    monitor warp   mailbox[g] = base; mailbox[E + g] = epoch (release, device)
    send warp      waits mailbox[E + g] == epoch (acquire, device)

A base of another launch has another tag, so a stale reservation is never used. The destination sets its cursors back after it has all
counts of launch n and before it says "consumed n"; a source reserves for launch n + 1 after it has seen that.

All blocks of a launch must be resident at once, since blocks wait for each other; the host checks.
"""

from __future__ import annotations

from dataclasses import dataclass

import epdsl as ep

from .buffers import DispatchState, ReceivedTokens, TokenInput
from .dispatch_receive import DispatchReceive
from .layout import DISPATCH_EPOCH


@dataclass(frozen=True)
class EPDispatchKernel(DispatchReceive):
    """The dispatch kernels of one configuration (see `DispatchParameters`): `dispatch_async`, `dispatch_wait`, and both as `dispatch`."""

    @ep.kernel(max_threads=lambda self: self.num_threads, blocks=lambda self: self.n_sms)
    def dispatch_async(self, state: DispatchState, tokens: TokenInput):
        """Sends. `dispatch_wait` must follow before the next `dispatch_async`."""
        epoch = state.epochs[DISPATCH_EPOCH] + 1
        self.send_phase(state, tokens, epoch)

    @ep.kernel(max_threads=lambda self: self.num_threads, blocks=lambda self: self.n_sms)
    def dispatch_wait(
        self, state: DispatchState, received: ReceivedTokens, send_buf: ep.Ptr[ep.u8], shared_start: ep.i32, shared_count: ep.i32
    ):
        """Receives. `send_buf` and the shared tokens as in the `TokenInput` of `dispatch_async`."""
        epoch = state.epochs[DISPATCH_EPOCH] + 1
        self.receive_phase(state, received, send_buf, shared_start, shared_count, epoch)

    @ep.kernel(max_threads=lambda self: self.num_threads, blocks=lambda self: self.n_sms)
    def dispatch(self, state: DispatchState, tokens: TokenInput, received: ReceivedTokens):
        """`dispatch_async` and `dispatch_wait` in one launch."""
        epoch = state.epochs[DISPATCH_EPOCH] + 1
        self.send_phase(state, tokens, epoch)
        self.receive_phase(state, received, tokens.send_buf, tokens.shared_start, tokens.shared_count, epoch)
