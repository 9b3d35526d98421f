"""A warp stores tiles and fences each, running ahead of the one that hands them to the copy engine."""

import epdsl as ep

TILES, LANES = 4, 64


@ep.kernel
def kernel(out: ep.Ptr[ep.u32]):
    tiles = ep.shared(ep.u32, TILES * LANES)
    t = ep.thread_idx.x
    if t >= LANES:
        for i in ep.unroll(range(TILES)):
            tiles[i * LANES + t - LANES] = ep.u32(t)
            ep.proxy_fence("shared")
            ep.named_arrive(1 + i, 2 * LANES)
    else:
        for i in ep.unroll(range(TILES)):
            ep.named_barrier(1 + i, 2 * LANES)
            if t == 0:
                ep.bulk_copy(out + (ep.block_idx.x * TILES + i) * LANES, tiles + i * LANES, LANES * 4)
                ep.bulk_commit()
        if t == 0:
            ep.bulk_wait()


@ep.scenario(ranks=1)
def main(rank):
    out = rank.zeros(ep.u32, 2 * TILES * LANES)
    for _ in range(2):
        kernel.launch(rank, grid=2, block=2 * LANES, args=(out,))
        rank.synchronize()
