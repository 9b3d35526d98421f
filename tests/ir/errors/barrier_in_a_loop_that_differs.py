import epdsl as ep

@ep.func
def step(p: ep.Ptr[ep.u32]):
    ep.barrier()

@ep.kernel
def kernel(p: ep.Ptr[ep.u32], n: ep.i32):
    for i in range(ep.thread_idx.x, n, 64):
        step(p)
