"""Every warp of a grid releases by adds, again and again; one thread acquires the last."""

import epdsl as ep

BLOCKS, THREADS = 3, 64
N = BLOCKS * THREADS


WARPS, ROUNDS = 12, 5


@ep.kernel
def kernel(data: ep.Ptr[ep.u32], count: ep.Ptr[ep.u32], out: ep.Ptr[ep.u32], launch: ep.u32):
    warps = ep.block_dim.x // ep.warp_size()
    mine = (ep.block_idx.x * warps + ep.warp_id()) * ROUNDS
    if ep.block_idx.x + 1 < ep.grid_dim.x:
        for round in range(ROUNDS):
            if ep.lane_id() == 1:
                data[mine + round] = launch
            ep.warp_sync()
            if ep.lane_id() == 0:
                ep.reduce_add(count, 1, order=ep.RELEASE, scope=ep.DEVICE)
    elif ep.thread_idx.x == 0:
        total = ep.u32((ep.grid_dim.x - 1) * warps * ROUNDS)
        ep.wait(count, until=lambda v: v == launch * total, order=ep.ACQUIRE, scope=ep.DEVICE, timeout_ns=10**9)
        sum = ep.u32(0)
        for i in range(ep.i32(total)):
            sum += data[i]
        out[0] = sum


@ep.scenario(ranks=1)
def main(rank):
    data, count, out = rank.zeros(ep.u32, 1024), rank.zeros(ep.u32, 1), rank.zeros(ep.u32, 1)
    for launch in (1, 2):
        kernel.launch(rank, grid=5, block=256, args=(data, count, out, launch))
        rank.synchronize()
