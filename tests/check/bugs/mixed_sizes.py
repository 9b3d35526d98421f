"""One thread adds to the low half of a word that another adds to as a whole. Expect: mixed-size-race."""

import epdsl as ep

BLOCKS, THREADS = 3, 64
N = BLOCKS * THREADS


@ep.kernel
def kernel(out: ep.Ptr[ep.u32]):
    if ep.thread_idx.x == 0:
        if ep.block_idx.x == 0:
            ep.reduce_add(out, 1, order=ep.RELAXED, scope=ep.DEVICE)  # expect: first, second
        else:
            ep.reduce_add(out.cast(ep.u64), 1, order=ep.RELAXED, scope=ep.DEVICE)  # expect: first, second


@ep.scenario(ranks=1)
def main(rank):
    out = rank.zeros(ep.u32, N)
    for _ in range(2):
        kernel.launch(rank, grid=2, block=THREADS, args=(out,))
        rank.synchronize()
