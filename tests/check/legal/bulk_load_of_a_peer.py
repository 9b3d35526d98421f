"""A bulk copy of what the peer's launch stored while this one runs: the thread that copies fences after its wait."""

import epdsl as ep

THREADS = 64


@ep.kernel
def kernel(data: ep.Peers[ep.u32], flag: ep.Peers[ep.u32], out: ep.Ptr[ep.u32], me: ep.i32, epoch: ep.u32):
    t = ep.thread_idx.x
    peer = 1 - me
    tile, word = ep.shared(ep.u32, THREADS), ep.shared(ep.u64, 1)
    # Two banks, so that what the peer reads is not overwritten.
    bank = ep.i32(epoch & 1) * THREADS
    data[peer][bank + t] = epoch * 1000 + ep.u32(t)
    ep.barrier()
    arrived = ep.MBarrier(word)
    if t == 0:
        arrived.init(1)
        ep.store(flag[peer], epoch, order=ep.RELEASE, scope=ep.SYSTEM)
        ep.wait(flag[me], until=lambda v: ep.i32(v - epoch) >= 0, order=ep.ACQUIRE, scope=ep.SYSTEM, timeout_ns=10**9)
        ep.proxy_fence("shared")
        ep.proxy_fence("global")
        arrived.expect(THREADS * 4)
        ep.bulk_copy(tile, data[me] + bank, THREADS * 4, barrier=arrived)
    ep.barrier()
    arrived.wait(0, timeout_ns=10**9)
    out[t] = tile[t]


@ep.scenario(ranks=2)
def main(rank):
    data, flag = rank.symmetric(ep.u32, 2 * THREADS), rank.symmetric(ep.u32, 1)
    out = rank.zeros(ep.u32, THREADS)
    rank.barrier()
    for epoch in (1, 2, 3):
        # A peer that is one launch ahead may have stored its number already.
        kernel.launch(rank, grid=1, block=THREADS, args=(data.peers, flag.peers, out, rank.index, epoch))
    rank.synchronize()
