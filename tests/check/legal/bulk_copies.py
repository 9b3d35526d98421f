"""Bulk copies in and out, waited for, with a proxy fence."""

import epdsl as ep

BLOCKS, THREADS = 3, 64
N = BLOCKS * THREADS


@ep.kernel
def kernel(out: ep.Ptr[ep.u32]):
    tile = ep.shared(ep.u32, THREADS)
    t = ep.thread_idx.x
    tile[t] = ep.u32(t)
    ep.proxy_fence("shared")
    ep.barrier()
    if t == 0:
        ep.bulk_copy(out + ep.block_idx.x * THREADS, tile, THREADS * 4)
        ep.bulk_commit()
        ep.bulk_wait()
    ep.barrier()
    word = ep.shared(ep.u64, 1)
    arrived = ep.MBarrier(word)
    if t == 0:
        arrived.init(1)
        ep.proxy_fence("shared")
    ep.barrier()
    if t == 0:
        arrived.expect(THREADS * 4)
        ep.bulk_copy(tile, out + ep.block_idx.x * THREADS, THREADS * 4, barrier=arrived)
    arrived.wait(0, timeout_ns=10**9)
    if tile[t] != ep.u32(t):
        ep.trap()


@ep.scenario(ranks=1)
def main(rank):
    out = rank.zeros(ep.u32, N)
    for _ in range(2):
        kernel.launch(rank, grid=2, block=THREADS, args=(out,))
        rank.synchronize()
