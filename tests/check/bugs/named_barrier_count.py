"""A named barrier waits for one warp more than comes. Expect: barrier-deadlock."""

import epdsl as ep

BLOCKS, THREADS = 3, 64
N = BLOCKS * THREADS


@ep.kernel
def kernel(out: ep.Ptr[ep.u32]):
    t = ep.thread_idx.x
    ep.named_barrier(1, THREADS + ep.warp_size())  # expect: second
    out[ep.block_idx.x * THREADS + t] = ep.u32(t)


@ep.scenario(ranks=1)
def main(rank):
    out = rank.zeros(ep.u32, N)
    for _ in range(2):
        kernel.launch(rank, grid=2, block=THREADS, args=(out,))
        rank.synchronize()
