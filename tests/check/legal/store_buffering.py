"""Relaxed store buffering on atomics: no data depends on it."""

import epdsl as ep

BLOCKS, THREADS = 3, 64
N = BLOCKS * THREADS


@ep.kernel
def kernel(out: ep.Ptr[ep.u32]):
    if ep.thread_idx.x == 0:
        me = ep.block_idx.x
        ep.store(out + me, 1, order=ep.RELAXED, scope=ep.DEVICE)
        seen = ep.load(out + (1 - me), order=ep.RELAXED, scope=ep.DEVICE)
        out[4 + me] = seen


@ep.scenario(ranks=1)
def main(rank):
    out = rank.zeros(ep.u32, N)
    for _ in range(2):
        kernel.launch(rank, grid=2, block=THREADS, args=(out,))
        rank.synchronize()
