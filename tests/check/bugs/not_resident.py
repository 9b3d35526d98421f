"""A grid of waiting blocks is larger than the device. Expect: not-resident."""

import epdsl as ep

BLOCKS, THREADS = 3, 64
N = BLOCKS * THREADS


@ep.kernel
def kernel(out: ep.Ptr[ep.u32]):
    if ep.thread_idx.x == 0:
        ep.atomic_add(out, 1, order=ep.ACQ_REL, scope=ep.DEVICE)
        ep.wait(out, until=lambda v: v >= ep.grid_dim.x, order=ep.ACQUIRE, scope=ep.DEVICE, timeout_ns=10**9)  # expect: first


@ep.scenario(ranks=1, num_sms=1)
def main(rank):
    out = rank.zeros(ep.u32, 1)
    kernel.launch(rank, grid=64, block=THREADS, args=(out,))
    rank.synchronize()
