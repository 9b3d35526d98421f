"""A bulk copy out is not waited for; a later copy in is, which says nothing of it. Expect: race."""

import epdsl as ep

THREADS = 64


@ep.kernel
def kernel(data: ep.Ptr[ep.u32], out: ep.Ptr[ep.u32], seen: ep.Ptr[ep.u32]):
    t = ep.thread_idx.x
    tile, word = ep.shared(ep.u32, 2 * THREADS), ep.shared(ep.u64, 1)
    arrived = ep.MBarrier(word)
    tile[t] = ep.u32(t)
    ep.proxy_fence("shared")
    ep.barrier()
    if t == 0:
        arrived.init(1)
        ep.proxy_fence("shared")
        ep.bulk_copy(out + ep.block_idx.x * THREADS, tile, THREADS * 4)  # expect: first
        ep.bulk_commit()
        ep.bulk_wait(0, read="source")
        arrived.expect(THREADS * 4)
        ep.bulk_copy(tile + THREADS, data, THREADS * 4, barrier=arrived)
        arrived.wait(0, timeout_ns=10**9)
    ep.barrier()
    seen[ep.block_idx.x * THREADS + t] = out[ep.block_idx.x * THREADS + t]  # expect: second


@ep.scenario(ranks=1)
def main(rank):
    data, out, seen = (rank.zeros(ep.u32, 2 * THREADS) for _ in range(3))
    for _ in range(2):
        kernel.launch(rank, grid=2, block=THREADS, args=(data, out, seen))
        rank.synchronize()
