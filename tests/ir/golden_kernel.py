"""The kernel whose IR `golden_kernel.mlir` holds: one of most operations."""

import epdsl as ep


@ep.struct
class Mailbox:
    slot: ep.Ptr[ep.u32]
    capacity: ep.i32


@ep.func
def publish(flag: ep.Ptr[ep.u32], value: ep.u32):
    ep.store(flag, value, order=ep.RELEASE, scope=ep.SYSTEM)


@ep.kernel
def kernel(src: ep.Ptr[ep.f32], peers: ep.Peers[ep.f32], flags: ep.Peers[ep.u32], box: Mailbox, me: ep.i32, n: ep.i32):
    staged = ep.shared(ep.f32, 64)
    total = ep.f32(0.0)
    for i in range(ep.thread_idx.x, n, ep.block_dim.x):
        if src[i] < 0.0:
            continue
        total += src[i]
        if total > 100.0:
            break
    staged[ep.thread_idx.x] = ep.warp_reduce("add", total) if ep.warp_size() == 64 else ep.shfl_xor(total, 1)
    ep.barrier()
    v = ep.load(src, width=4)
    ep.store(peers[me].cast(ep.f32), v)
    ep.named_barrier(1, 64)
    if ep.elect() and box.capacity > 0:
        ticket = ep.atomic_add(box.slot, 1, order=ep.ACQ_REL, scope=ep.DEVICE)
        ep.fence(order=ep.RELEASE, scope=ep.SYSTEM)
        if ticket == 3:
            publish(flags[me], 7)
