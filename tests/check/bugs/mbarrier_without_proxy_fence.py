"""The copy engine is given a barrier that was made without a proxy fence. Expect: proxy-race."""

import epdsl as ep

THREADS = 64


@ep.kernel
def kernel(data: ep.Ptr[ep.u32], out: ep.Ptr[ep.u32]):
    t = ep.thread_idx.x
    tile, word = ep.shared(ep.u32, THREADS), ep.shared(ep.u64, 1)
    arrived = ep.MBarrier(word)
    if t == 0:
        arrived.init(1)  # expect: first, repair
        arrived.expect(THREADS * 4)
        ep.bulk_copy(tile, data, THREADS * 4, barrier=arrived)  # expect: second
    ep.barrier()
    arrived.wait(0, timeout_ns=10**9)
    out[ep.block_idx.x * THREADS + t] = tile[t]


@ep.scenario(ranks=1)
def main(rank):
    data, out = rank.zeros(ep.u32, THREADS), rank.zeros(ep.u32, 2 * THREADS)
    for _ in range(2):
        kernel.launch(rank, grid=2, block=THREADS, args=(data, out))
        rank.synchronize()
