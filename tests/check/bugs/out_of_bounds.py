"""The last thread writes one element past the end. Expect: out-of-bounds."""

import epdsl as ep

BLOCKS, THREADS = 3, 64
N = BLOCKS * THREADS


@ep.kernel
def kernel(out: ep.Ptr[ep.u32]):
    i = ep.block_idx.x * THREADS + ep.thread_idx.x
    out[i + 1] = ep.u32(i)  # expect: second, repair


@ep.scenario(ranks=1)
def main(rank):
    out = rank.zeros(ep.u32, N)
    for _ in range(2):
        kernel.launch(rank, grid=3, block=THREADS, args=(out,))
        rank.synchronize()
