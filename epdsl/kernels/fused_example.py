"""Two classes of warps in one kernel: some run the dispatch, the others consume an expert's rows as soon as they have arrived.

The comm class runs the phases of `EPDispatchKernel` unchanged, told which threads and which named barrier are its own. It publishes every
tile of rows it has scattered (`emit_l1_release`); the compute class waits for one block of rows at a time instead of for the whole
dispatch. Here computing is the stand-in of `expert.py`; a grouped GEMM goes in its place.
"""

from __future__ import annotations

from dataclasses import dataclass

import epdsl as ep

from .buffers import DispatchState, ReceivedTokens, TokenInput
from .dispatch import EPDispatchKernel
from .layout import DISPATCH_EPOCH, ceildiv
from .token_format import CHUNK
from .trace import Event

COMM_BARRIER = 1
COMPUTE_BARRIER = 2


@dataclass(frozen=True)
class EPDispatchConsume:
    """Dispatch and consumption of its rows in one launch of n_sms blocks of n_compute_threads + dispatch.num_threads threads.

    dispatch           the family whose phases the comm class runs
    n_compute_threads  threads of the compute class, which come first in the block
    token_block        rows the compute class takes at a time; the format's tile is a multiple of it
    pad                words between two counters, so that they share no cache line
    """

    dispatch: EPDispatchKernel
    n_compute_threads: int
    token_block: int
    pad: int = 32

    def __post_init__(self) -> None:
        tile = self.dispatch.token_fmt_type.tile_rows
        if self.token_block < 1 or tile % self.token_block:
            raise ValueError(f"EPDispatchConsume: token_block={self.token_block} must divide the format's tile of {tile} rows")
        if self.n_compute_threads < 64 or self.n_compute_threads % 64:
            raise ValueError(f"EPDispatchConsume: n_compute_threads={self.n_compute_threads} must be a multiple of 64")

    @property
    def num_threads(self) -> int:
        """Threads of a block."""
        return self.n_compute_threads + self.dispatch.num_threads

    def l1_arrival_size(self) -> int:
        """u32 words of the release counters; 0 before the first launch and after every one."""
        return (ceildiv(self.dispatch.max_recv_tokens, self.token_block) + self.dispatch.n_slots) * self.pad

    @ep.func
    def consume(self, state: DispatchState, received: ReceivedTokens, y: ep.Ptr[ep.bf16], epoch: ep.u32):
        """The compute class: every n_sms-th block of rows, in order of slots."""
        kernel = self.dispatch
        group = ep.Group(0, self.n_compute_threads, COMPUTE_BARRIER)
        n_claims = kernel.token_fmt_type.tile_claims
        tid = ep.thread_idx.x
        warp = tid // ep.warp_size()
        n_warps = self.n_compute_threads // ep.warp_size()
        if tid == 0:
            kernel.wait_ready(state.counters + kernel.counters.dispatch_wait_base, epoch)
        ep.group_barrier(group)
        pool = ep.i32(0)
        for slot in range(kernel.n_slots):
            count = received.expert_counts[slot]
            start = ep.i32(received.row_offsets[slot])
            n_blocks = (count + (self.token_block - 1)) // self.token_block
            first = (ep.block_idx.x - pool % kernel.n_sms + kernel.n_sms) % kernel.n_sms
            for block in range(first, n_blocks, kernel.n_sms):
                arrived = received.l1_arrival + ep.i64(pool + block) * self.pad
                if tid == 0:
                    # Pairs with the releases in `copy_received_tokens_to_output`: all parts of this block's rows are in place.
                    ep.wait(arrived, until=lambda v: v == n_claims, order=ep.ACQUIRE, scope=ep.DEVICE, timeout_ns=kernel.timeout_ns)
                    kernel.trace.stamp(state.trace, kernel.trace.ring(ep.block_idx.x, 1), Event.CONSUME, pool + block)
                ep.group_barrier(group)
                scale = 1.0 + ep.f32((state.my_rank * kernel.n_local_experts + slot) % 8) * 0.125
                stop = ep.min((block + 1) * self.token_block, count)
                first_scale = kernel.token_fmt_type.first_scale_row(received.handler, received.row_offsets, slot)
                for i in range(block * self.token_block + warp, stop, n_warps):
                    row = ep.i64(start + i)
                    for column in range(ep.lane_id() * CHUNK, kernel.hid_dim, ep.warp_size() * CHUNK):
                        x = kernel.token_fmt_type.load_eight(received.handler, row, first_scale + i, column)
                        for e in (0, 1, 2, 3, 4, 5, 6, 7):
                            y[row * kernel.hid_dim + column + e] = ep.bf16(x[e] * scale)
                if tid == 0:
                    # Plain: all releases to this counter have been seen, and the next launch begins after this one.
                    arrived[0] = 0
            pool += n_blocks

    @ep.kernel(max_threads=lambda self: self.num_threads)
    def dispatch_and_consume(self, state: DispatchState, tokens: TokenInput, received: ReceivedTokens, y: ep.Ptr[ep.bf16]):
        """y [max_recv_tokens, hid_dim]: what the stand-in expert makes of every received row. Without a shared expert."""
        assert not self.dispatch.fused_shared_expert, "EPDispatchConsume does not compute a shared expert"
        epoch = state.epochs[DISPATCH_EPOCH] + 1
        # The comm class moves the launch number on when it is done; both classes must have read it by then.
        ep.barrier()
        if ep.thread_idx.x < self.n_compute_threads:
            self.consume(state, received, y, epoch)
        else:
            base, n = self.n_compute_threads, self.dispatch.num_threads
            options = {
                "emit_l1_release": True,
                "l1_release_token_block": self.token_block,
                "l1_release_atomic_pad": self.pad,
                "trace_scatter_release": self.dispatch.trace.enabled,
                "trace_rings_per_cta": 2,
                "trace_buf": self.dispatch.trace,
            }
            self.dispatch.send_phase(state, tokens, epoch, comm_thread_base=base, n_comm_threads=n, comm_barrier_id=COMM_BARRIER)
            self.dispatch.receive_phase(
                state, received, tokens.send_buf, ep.i32(0), ep.i32(0), epoch,
                comm_thread_base=base, n_comm_threads=n, comm_barrier_id=COMM_BARRIER, copy_options=options,
            )  # fmt: skip
