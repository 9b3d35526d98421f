"""Blocks count with atomics of block scope. Expect: scope-race."""

import epdsl as ep

BLOCKS, THREADS = 3, 64
N = BLOCKS * THREADS


@ep.kernel
def kernel(out: ep.Ptr[ep.u32]):
    if ep.thread_idx.x == 0:
        ep.reduce_add(out, 1, order=ep.RELAXED, scope=ep.BLOCK)  # expect: first, second, repair


@ep.scenario(ranks=1)
def main(rank):
    out = rank.zeros(ep.u32, N)
    for _ in range(2):
        kernel.launch(rank, grid=3, block=THREADS, args=(out,))
        rank.synchronize()
