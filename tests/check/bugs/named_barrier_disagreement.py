"""Two classes of warps give one barrier different counts. Expect: barrier-count."""

import epdsl as ep

BLOCKS, THREADS = 3, 64
N = BLOCKS * THREADS


WARP = 64


@ep.kernel
def kernel(out: ep.Ptr[ep.u32]):
    t = ep.thread_idx.x
    if t < WARP:
        ep.named_barrier(1, 2 * WARP)  # expect: first, second
    else:
        ep.named_barrier(1, 3 * WARP)  # expect: first, second
    out[ep.block_idx.x * 2 * WARP + t] = ep.u32(t)


@ep.scenario(ranks=1)
def main(rank):
    out = rank.zeros(ep.u32, 2 * N)
    for _ in range(2):
        kernel.launch(rank, grid=1, block=2 * WARP, args=(out,))
        rank.synchronize()
