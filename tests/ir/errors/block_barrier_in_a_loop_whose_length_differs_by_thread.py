import epdsl as ep

@ep.kernel
def kernel(p: ep.Ptr[ep.i32], n: ep.i32):
    for i in range(ep.thread_idx.x, n, ep.block_dim.x):
        if n > 7:
            ep.barrier()
