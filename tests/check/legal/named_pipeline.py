"""Producer and consumer warps with named barriers: arrive on one side, wait on the other."""

import epdsl as ep

BLOCKS, THREADS = 3, 64
N = BLOCKS * THREADS


WARP = 64


@ep.kernel
def kernel(out: ep.Ptr[ep.u32]):
    tile = ep.shared(ep.u32, WARP)
    t = ep.thread_idx.x
    for step in range(3):
        if t < WARP:
            tile[t] = ep.u32(t + step)
            ep.named_arrive(1, 2 * WARP)
            ep.named_barrier(2, 2 * WARP)
        else:
            ep.named_barrier(1, 2 * WARP)
            out[ep.block_idx.x * WARP + t - WARP] = tile[2 * WARP - 1 - t]
            ep.named_arrive(2, 2 * WARP)


@ep.scenario(ranks=1)
def main(rank):
    out = rank.zeros(ep.u32, N)
    for _ in range(2):
        kernel.launch(rank, grid=2, block=2 * WARP, args=(out,))
        rank.synchronize()
