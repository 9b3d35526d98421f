"""A stand-in for the experts: every row of expert e is multiplied by a factor of e that bf16 holds exactly."""

from __future__ import annotations

import epdsl as ep


@ep.kernel
def expert_scale(
    y: ep.Ptr[ep.bf16],
    x: ep.Ptr[ep.bf16],
    row_offsets: ep.Ptr[ep.u32],
    first_expert: ep.i32,
    n_local_experts: ep.i32,
    hidden: ep.i32,
):
    """y[row] = bf16(x[row] * (1 + (expert % 8) / 8)) for the rows of each local expert. hidden is a multiple of 8.

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
