"""The small kernel whose every stage `tests/ir/stages` holds."""

import epdsl as ep


@ep.func
def scaled(x: ep.f32, by: ep.f32) -> ep.f32:
    y = x * by
    return y


@ep.kernel(max_threads=128)
def publish(data: ep.Ptr[ep.f32], flag: ep.Ptr[ep.u32], n: ep.i32):
    i = ep.thread_idx.x
    if i < n:
        data[i] = scaled(data[i], 2.0)
    ep.barrier()
    if i == 0:
        ep.store(flag, 1, order=ep.RELEASE, scope=ep.SYSTEM)


@ep.kernel
def sized(data: ep.Ptr[ep.i32], n: ep.Const[int]):
    data[ep.thread_idx.x] = n
