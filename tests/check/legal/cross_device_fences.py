"""Message passing between ranks by system fences around relaxed accesses."""

import epdsl as ep

BLOCKS, THREADS = 3, 64
N = BLOCKS * THREADS


@ep.kernel
def kernel(data: ep.Peers[ep.u32], flag: ep.Peers[ep.u32], me: ep.i32, epoch: ep.u32):
    if me == 0:
        data[1][ep.thread_idx.x] = epoch
        ep.barrier()
        if ep.thread_idx.x == 0:
            ep.fence(order=ep.RELEASE, scope=ep.SYSTEM)
            ep.store(flag[1], epoch, order=ep.RELAXED, scope=ep.SYSTEM)
    else:
        if ep.thread_idx.x == 0:
            ep.wait(flag[1], until=lambda v: v == epoch, order=ep.RELAXED, scope=ep.SYSTEM, timeout_ns=10**9)
            ep.fence(order=ep.ACQUIRE, scope=ep.SYSTEM)
        ep.barrier()
        if data[1][ep.thread_idx.x] != epoch:
            ep.trap()


@ep.scenario(ranks=2)
def main(rank):
    data, flag = rank.symmetric(ep.u32, THREADS), rank.symmetric(ep.u32, 1)
    rank.barrier()
    for epoch in (1, 2):
        kernel.launch(rank, grid=1, block=THREADS, args=(data.peers, flag.peers, rank.index, epoch))
        rank.synchronize()
        rank.barrier()
