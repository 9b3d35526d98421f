"""A bulk copy reads what another block stored and released; only its shared memory was fenced. Expect: proxy-race."""

import epdsl as ep

THREADS = 64


@ep.kernel
def kernel(data: ep.Ptr[ep.u32], flag: ep.Ptr[ep.u32], out: ep.Ptr[ep.u32], epoch: ep.u32):
    t = ep.thread_idx.x
    if ep.block_idx.x == 0:
        data[t] = epoch * 1000 + ep.u32(t)  # expect: first
        ep.barrier()
        if t == 0:
            ep.store(flag, epoch, order=ep.RELEASE, scope=ep.DEVICE)
    else:
        tile, word = ep.shared(ep.u32, THREADS), ep.shared(ep.u64, 1)
        arrived = ep.MBarrier(word)
        if t == 0:
            arrived.init(1)
            ep.wait(flag, until=lambda v: v == epoch, order=ep.ACQUIRE, scope=ep.DEVICE, timeout_ns=10**9)
            ep.proxy_fence("shared")
            arrived.expect(THREADS * 4)
            ep.bulk_copy(tile, data, THREADS * 4, barrier=arrived)  # expect: second, repair
        ep.barrier()
        arrived.wait(0, timeout_ns=10**9)
        out[t] = tile[t]


@ep.scenario(ranks=1)
def main(rank):
    data, flag = rank.zeros(ep.u32, THREADS), rank.zeros(ep.u32, 1)
    out = rank.zeros(ep.u32, THREADS)
    for epoch in (1, 2):
        kernel.launch(rank, grid=2, block=THREADS, args=(data, flag, out, epoch), cooperative=True)
        rank.synchronize()
