"""A thread waits for a word that no buffer has. Expect: out-of-bounds."""

import epdsl as ep


@ep.kernel
def kernel(flags: ep.Ptr[ep.u32], at: ep.i64):
    if ep.thread_idx.x == 0:
        ep.wait(flags + at, until=lambda v: v == 1, order=ep.ACQUIRE, scope=ep.DEVICE, timeout_ns=10**9)  # expect: second, repair


@ep.scenario(ranks=1)
def main(rank):
    flags = rank.zeros(ep.u32, 1)
    for _ in range(2):
        kernel.launch(rank, grid=2, block=64, args=(flags, 1 << 36))
    rank.synchronize()
