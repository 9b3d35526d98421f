"""A kernel adds to a buffer that nothing has written. Expect: uninitialised-read."""

import epdsl as ep

BLOCKS, THREADS = 3, 64
N = BLOCKS * THREADS


@ep.kernel
def kernel(out: ep.Ptr[ep.u32], fresh: ep.Ptr[ep.u32]):
    i = ep.block_idx.x * THREADS + ep.thread_idx.x
    out[i] = fresh[i] + 1  # expect: second, repair


@ep.scenario(ranks=1)
def main(rank):
    out, fresh = rank.zeros(ep.u32, N), rank.empty(ep.u32, N)
    for _ in range(2):
        kernel.launch(rank, grid=3, block=THREADS, args=(out, fresh))
        rank.synchronize()
