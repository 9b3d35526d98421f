"""A rank frees a buffer that its peer's kernel still writes. Expect: use-after-free."""

from epdsl_runtime.binding import Address

import epdsl as ep

BLOCKS, THREADS = 3, 64
N = BLOCKS * THREADS


@ep.kernel
def kernel(out: ep.Ptr[ep.u32]):
    out[ep.block_idx.x * THREADS + ep.thread_idx.x] = 1  # expect: second


@ep.scenario(ranks=2)
def main(rank):
    mine = rank.zeros(ep.u32, N)
    addresses = rank.bootstrap.allgather(mine.address)
    if rank.index == 1:
        mine.free()
    rank.barrier()
    if rank.index == 0:
        for _ in range(2):
            kernel.launch(rank, grid=3, block=THREADS, args=(Address(addresses[1]),))
    rank.synchronize()
    rank.barrier()
