"""A 32-bit index overflows before it is widened. Expect: address-overflow."""

import epdsl as ep

BLOCKS, THREADS = 3, 64
N = BLOCKS * THREADS


@ep.kernel
def kernel(out: ep.Ptr[ep.u32], n: ep.i32):
    t = ep.thread_idx.x
    row = t * n  # expect: second, repair
    out[row - t * n + t] = 1


@ep.scenario(ranks=1)
def main(rank):
    out = rank.zeros(ep.u32, N)
    for _ in range(2):
        kernel.launch(rank, grid=1, block=THREADS, args=(out, 2**28))
        rank.synchronize()
