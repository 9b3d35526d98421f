"""A rank uploads to its buffer while its peer's kernel reads it: no barrier between them. Expect: race."""

import epdsl as ep

BLOCKS, THREADS = 3, 64
N = BLOCKS * THREADS


@ep.kernel
def kernel(source: ep.Peers[ep.u32], out: ep.Ptr[ep.u32]):
    i = ep.block_idx.x * THREADS + ep.thread_idx.x
    out[i] = source[1][i]  # expect: second


@ep.scenario(ranks=2)
def main(rank):
    source, out = rank.symmetric(ep.u32, N, "source"), rank.zeros(ep.u32, N)
    rank.barrier()
    if rank.index == 1:
        source.local.copy_from([1] * N)  # expect: first
    else:
        for _ in range(2):
            kernel.launch(rank, grid=3, block=THREADS, args=(source.peers, out))
    rank.synchronize()
    rank.barrier()
