"""The smallest exchange: every rank copies an array into the next rank's memory and signals it.

python examples/put_signal.py                 # four simulated ranks
EPDSL_DEVICE=cuda python examples/put_signal.py 2
"""

from __future__ import annotations

import sys

import numpy as np

import epdsl as ep

N = 1024


@ep.kernel
def put_signal(src: ep.Ptr[ep.f32], dst: ep.Peers[ep.f32], flags: ep.Peers[ep.u32], me: ep.i32, n: ep.i32):
    """Copies n floats into the next rank's buffer and waits for the previous rank's."""
    peer = (me + 1) % dst.size
    for i in range(ep.thread_idx.x, n, ep.block_dim.x):
        dst[peer][i] = src[i]
    # The block's stores happen before thread 0's release.
    ep.barrier()
    if ep.thread_idx.x == 0:
        # Pairs with the wait below on the next rank.
        ep.store(flags[peer], 1, order=ep.RELEASE, scope=ep.SYSTEM)
        ep.wait(flags[me], until=lambda v: v == 1, order=ep.ACQUIRE, scope=ep.SYSTEM, timeout_ns=10**10)


def main(rank: ep.Rank) -> float:
    """Runs on every rank. Returns the first value it got."""
    src = rank.array(np.arange(N, dtype=np.float32) + 10000 * rank.index)
    dst, flags = rank.symmetric(ep.f32, N), rank.symmetric(ep.u32, 1)
    rank.barrier()
    put_signal.launch(rank, grid=1, block=128, args=(src, dst.peers, flags.peers, rank.index, N))
    rank.synchronize()
    previous = (rank.index - 1) % rank.size
    got = dst.local.numpy()
    assert (got == np.arange(N, dtype=np.float32) + 10000 * previous).all()
    return float(got[0])


if __name__ == "__main__":
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 4
    print(ep.spawn(main, ranks=ranks))
