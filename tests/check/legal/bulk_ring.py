"""A ring of one stage: its readers make a proxy fence before they say that it was read, so a bulk copy may fill it again."""

import epdsl as ep

THREADS, TOKENS = 64, 3


@ep.kernel
def kernel(data: ep.Ptr[ep.u32], out: ep.Ptr[ep.u32]):
    t = ep.thread_idx.x
    tile, words = ep.shared(ep.u32, THREADS), ep.shared(ep.u64, 2)
    full, empty = ep.MBarrier(words), ep.MBarrier(words + 1)
    if t == 0:
        full.init(1)
        empty.init(THREADS)
        ep.proxy_fence("shared")
    ep.barrier()
    for token in range(TOKENS):
        if t == 0:
            if token > 0:
                empty.wait((token - 1) & 1, timeout_ns=10**9)
            full.expect(THREADS * 4)
            ep.bulk_copy(tile, data + token * THREADS, THREADS * 4, barrier=full)
        full.wait(token & 1, timeout_ns=10**9)
        out[(ep.block_idx.x * TOKENS + token) * THREADS + t] = tile[t]
        ep.proxy_fence("shared")
        empty.arrive()


@ep.scenario(ranks=1)
def main(rank):
    data, out = rank.zeros(ep.u32, TOKENS * THREADS), rank.zeros(ep.u32, 2 * TOKENS * THREADS)
    for _ in range(2):
        kernel.launch(rank, grid=2, block=THREADS, args=(data, out))
        rank.synchronize()
