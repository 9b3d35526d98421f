"""What the kernels are given, bundled: the memory a layer keeps, a launch's tokens, and where received tokens go."""

from __future__ import annotations

import epdsl as ep

from .token_format import FormatHandler

__all__ = ["CombineState", "DispatchState", "FormatHandler", "ReceivedTokens", "TokenInput"]


@ep.struct
class DispatchState:
    """Memory of the dispatch that lasts from launch to launch (see `DispatchParameters` for sizes). All zero at first.

    recv_bufs     u8: messages
    recv_counts   u64: counts, rank flags, reservation cursors
    consumed      u32 [n_ranks]: launch that each peer has finished
    reservations  u64 [n_experts]: with ep_final_layout, what a source tells about a block before its rows
    counters      i32: EPLocalSyncCounters
    mailbox       i32 [3 * n_experts]: with ep_final_layout, bases, tags, counts of this rank's own blocks
    epochs        u32 [EPOCH_WORDS]
    status        u64 [STATUS_WORDS]
    trace         u64: rings, for a kernel that traces
    """

    recv_bufs: ep.Peers[ep.u8]
    recv_counts: ep.Peers[ep.u64]
    consumed: ep.Peers[ep.u32]
    reservations: ep.Peers[ep.u64]
    counters: ep.Ptr[ep.i32]
    mailbox: ep.Ptr[ep.i32]
    epochs: ep.Ptr[ep.u32]
    status: ep.Ptr[ep.u64]
    trace: ep.Ptr[ep.u64]
    my_rank: ep.i32


@ep.struct
class CombineState:
    """Memory of the combine that lasts from launch to launch. counters, epochs and status are the dispatch's too. All zero at first.

    recv_bufs    u8: rows by (token, k)
    recv_counts  u64: a word a pair, rank flags
    consumed     u32 [n_ranks]: launch that each peer has finished
    trace        u64: rings, for a kernel that traces
    """

    recv_bufs: ep.Peers[ep.u8]
    recv_counts: ep.Peers[ep.u64]
    consumed: ep.Peers[ep.u32]
    counters: ep.Ptr[ep.i32]
    epochs: ep.Ptr[ep.u32]
    status: ep.Ptr[ep.u64]
    trace: ep.Ptr[ep.u64]
    my_rank: ep.i32


@ep.struct
class TokenInput:
    """One launch's tokens.

    tokens        [n_tokens, hid_dim] bf16, or the format's own bytes when they are quantised already
    scales        the quantised input's scales [n_tokens, groups]; or f32 [1], the global scale of a format that has one
    topk_ids      i32 [n_tokens, top_k]: global expert ids, -1 for none
    send_buf      u8: one message a token
    routed_ids    i32 [n_tokens, top_k]: out, topk_ids with every selection that was not sent as -1
    shared_start, shared_count   tokens that also go to this rank's shared expert (with fused_shared_expert)
    """

    tokens: ep.Ptr[ep.u8]
    scales: ep.Ptr[ep.u8]
    topk_ids: ep.Ptr[ep.i32]
    n_tokens: ep.i32
    send_buf: ep.Ptr[ep.u8]
    routed_ids: ep.Ptr[ep.i32]
    shared_start: ep.i32
    shared_count: ep.i32


@ep.struct
class ReceivedTokens:
    """What a dispatch makes. A slot is a local expert, or with fused_shared_expert the shared expert (slot 0) and then those.

    handler        where rows and scales go
    row_offsets    u32 [n_slots + 1]: first row of each slot, then the end
    expert_ids     i32 [n_slots]
    expert_counts  i32 [n_slots]: rows of each slot without padding
    src_info       i32 [rows, 2]: (source token, k)
    l1_arrival     u32: counters that copies publish, with emit_l1_release
    """

    handler: FormatHandler
    row_offsets: ep.Ptr[ep.u32]
    expert_ids: ep.Ptr[ep.i32]
    expert_counts: ep.Ptr[ep.i32]
    src_info: ep.Ptr[ep.i32]
    l1_arrival: ep.Ptr[ep.u32]
