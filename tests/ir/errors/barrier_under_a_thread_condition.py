import epdsl as ep

@ep.kernel
def kernel(p: ep.Ptr[ep.u32]):
    if ep.thread_idx.x < 32:
        p[0] = 1
        ep.barrier()
