"""The flag is published by a plain store while another thread polls it. Expect: race."""

import epdsl as ep

BLOCKS, THREADS = 3, 64
N = BLOCKS * THREADS


@ep.kernel
def produce(data: ep.Peers[ep.u32], flag: ep.Peers[ep.u32], counter: ep.Ptr[ep.u32], epoch: ep.u32):
    i = ep.block_idx.x * ep.block_dim.x + ep.thread_idx.x
    data[1][i] = epoch * 1000 + ep.u32(i)
    ep.barrier()
    if ep.thread_idx.x == 0:
        old = ep.atomic_add(counter, 1, order=ep.ACQ_REL, scope=ep.DEVICE)
        if old == BLOCKS - 1:
            counter[0] = 0
            flag[1][0] = epoch  # expect: first, repair


@ep.kernel
def consume(data: ep.Ptr[ep.u32], flag: ep.Ptr[ep.u32], out: ep.Ptr[ep.u32], epoch: ep.u32):
    if ep.thread_idx.x == 0:
        ep.wait(flag, until=lambda v: v == epoch, order=ep.ACQUIRE, scope=ep.SYSTEM, timeout_ns=10**9)  # expect: second
    ep.barrier()
    for i in range(ep.thread_idx.x, N, ep.block_dim.x):
        out[i] = data[i]


@ep.scenario(ranks=2)
def main(rank):
    data, flag = rank.symmetric(ep.u32, N, "data"), rank.symmetric(ep.u32, 1, "flag")
    counter, out = rank.zeros(ep.u32, 1), rank.zeros(ep.u32, N)
    rank.barrier()
    for epoch in (1, 2):
        if rank.index == 0:
            produce.launch(rank, grid=BLOCKS, block=THREADS, args=(data.peers, flag.peers, counter, epoch))
        else:
            consume.launch(rank, grid=1, block=THREADS, args=(data.local, flag.local, out, epoch))
        rank.synchronize()
        rank.barrier()
