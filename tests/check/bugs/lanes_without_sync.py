"""Lanes of a warp exchange through memory with a shuffle between, which orders nothing. Expect: race."""

import epdsl as ep

BLOCKS, THREADS = 3, 64
N = BLOCKS * THREADS


@ep.kernel
def kernel(out: ep.Ptr[ep.u32]):
    base = out + ep.block_idx.x * THREADS
    t = ep.thread_idx.x
    base[t] = ep.u32(t)  # expect: first, second, repair
    other = ep.shfl_xor(t, 1)
    got = base[other]  # expect: first, second, repair
    if got == 12345:
        ep.trap()


@ep.scenario(ranks=1)
def main(rank):
    out = rank.zeros(ep.u32, N)
    for _ in range(2):
        kernel.launch(rank, grid=2, block=THREADS, args=(out,))
        rank.synchronize()
