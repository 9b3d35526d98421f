"""Threads write neighbouring bytes and halves of one word."""

import epdsl as ep

BLOCKS, THREADS = 3, 64
N = BLOCKS * THREADS


@ep.kernel
def kernel(out: ep.Ptr[ep.u32]):
    i = ep.block_idx.x * THREADS + ep.thread_idx.x
    out.cast(ep.u8)[i] = ep.u8(i)
    (out.cast(ep.u16) + THREADS * 2)[i] = ep.u16(i)


@ep.scenario(ranks=1)
def main(rank):
    out = rank.zeros(ep.u32, N)
    for _ in range(2):
        kernel.launch(rank, grid=2, block=THREADS, args=(out,))
        rank.synchronize()
