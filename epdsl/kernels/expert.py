"""A stand-in for the experts: every row of expert e is multiplied by a factor of e that bf16 holds exactly."""

from __future__ import annotations

from dataclasses import dataclass

import epdsl as ep

from .buffers import ReceivedTokens
from .token_format import CHUNK, TokenFormat


@dataclass(frozen=True)
class SampleExperts:
    """The stand-in for one token format.

    shared   slot 0 is the shared expert, whose factor is 1; the local experts follow
    """

    token_fmt_type: TokenFormat
    n_local_experts: int
    shared: bool = False

    @ep.kernel
    def scale(self, y: ep.Ptr[ep.bf16], received: ReceivedTokens, first_expert: ep.i32):
        """y[row] = bf16(x[row] * (1 + (expert % 8) / 8)) for the rows of each local expert, x the received element as f32.

        y [rows, hid_dim]; a warp takes a row; any grid will do.
        """
        n_warps = ep.block_dim.x // ep.warp_size()
        warp = ep.block_idx.x * n_warps + ep.warp_id()
        hidden = self.token_fmt_type.hid_dim
        for slot in range(self.n_local_experts + int(self.shared)):
            scale = 1.0 + ep.f32((first_expert + slot - int(self.shared)) % 8) * 0.125
            if self.shared and slot == 0:
                scale = ep.f32(1.0)
            start = ep.i32(received.row_offsets[slot])
            first_scale = self.token_fmt_type.first_scale_row(received.handler, received.row_offsets, slot)
            for i in range(warp, received.expert_counts[slot], n_warps * ep.grid_dim.x):
                row = ep.i64(start + i)
                for column in range(ep.lane_id() * CHUNK, hidden, ep.warp_size() * CHUNK):
                    x = self.token_fmt_type.load_eight(received.handler, row, first_scale + i, column)
                    ep.store(
                        y + (row * hidden + column),
                        ep.vec(ep.bf16, 8)(
                            ep.bf16(x[0] * scale), ep.bf16(x[1] * scale), ep.bf16(x[2] * scale), ep.bf16(x[3] * scale),
                            ep.bf16(x[4] * scale), ep.bf16(x[5] * scale), ep.bf16(x[6] * scale), ep.bf16(x[7] * scale),
                        ),
                    )  # fmt: skip


@ep.kernel
def expert_scale(
    y: ep.Ptr[ep.bf16],
    x: ep.Ptr[ep.bf16],
    row_offsets: ep.Ptr[ep.u32],
    first_expert: ep.i32,
    n_local_experts: ep.i32,
    hidden: ep.i32,
):
    """y[row] = bf16(x[row] * (1 + (expert % 8) / 8)) for bf16 rows of each local expert. hidden is a multiple of 8.

    A warp takes a row; any grid will do.
    """
    n_warps = ep.block_dim.x // ep.warp_size()
    warp = ep.block_idx.x * n_warps + ep.warp_id()
    for local_expert in range(n_local_experts):
        scale = 1.0 + ep.f32((first_expert + local_expert) % 8) * 0.125
        for row in range(ep.i32(row_offsets[local_expert]) + warp, ep.i32(row_offsets[local_expert + 1]), n_warps * ep.grid_dim.x):
            start = ep.i64(row) * hidden
            for column in range(ep.lane_id() * 8, hidden, ep.warp_size() * 8):
                v = ep.load(x + (start + column), width=8)
                for i in ep.unroll(range(8)):
                    v[i] = ep.bf16(ep.f32(v[i]) * scale)
                ep.store(y + (start + column), v)
