"""A bulk copy takes what ordinary stores wrote, without a proxy fence. Expect: proxy-race."""

import epdsl as ep

BLOCKS, THREADS = 3, 64
N = BLOCKS * THREADS


@ep.kernel
def kernel(out: ep.Ptr[ep.u32]):
    tile = ep.shared(ep.u32, THREADS)
    t = ep.thread_idx.x
    tile[t] = ep.u32(t)  # expect: first
    ep.barrier()
    if t == 0:
        ep.bulk_copy(out + ep.block_idx.x * THREADS, tile, THREADS * 4)  # expect: second
        ep.bulk_commit()
        ep.bulk_wait()


@ep.scenario(ranks=1)
def main(rank):
    out = rank.zeros(ep.u32, N)
    for _ in range(2):
        kernel.launch(rank, grid=2, block=THREADS, args=(out,))
        rank.synchronize()
