"""Neighbours exchange through shared memory without a barrier. Expect: race."""

import epdsl as ep

BLOCKS, THREADS = 3, 64
N = BLOCKS * THREADS


@ep.kernel
def kernel(out: ep.Ptr[ep.u32]):
    tile = ep.shared(ep.u32, THREADS)
    t = ep.thread_idx.x
    tile[t] = ep.u32(t)  # expect: first, second, repair
    out[ep.block_idx.x * THREADS + t] = tile[(t + 1) % THREADS]  # expect: first, second, repair


@ep.scenario(ranks=1)
def main(rank):
    out = rank.zeros(ep.u32, N)
    for _ in range(2):
        kernel.launch(rank, grid=2, block=THREADS, args=(out,))
        rank.synchronize()
