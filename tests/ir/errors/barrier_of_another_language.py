import epdsl as ep

@ep.kernel
def kernel(p: ep.Ptr[ep.u32], n: ep.i32):
    p[0] = 1
    ep.syncthreads()
