import epdsl as ep

@ep.kernel
def other(p: ep.Ptr[ep.u32]):
    p[0] = 1

@ep.kernel
def kernel(p: ep.Ptr[ep.u32], n: ep.i32):
    other(p)
