import epdsl as ep

@ep.kernel
def kernel(p: ep.Ptr[ep.u32], n: ep.i32):
    if ep.thread_idx.x >= n:
        return
    ep.barrier()
    p[0] = 1
