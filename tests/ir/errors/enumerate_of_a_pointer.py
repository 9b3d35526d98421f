import epdsl as ep

@ep.kernel
def kernel(p: ep.Ptr[ep.u32], n: ep.i32):
    for i, x in enumerate(p):
        p[i] = x
