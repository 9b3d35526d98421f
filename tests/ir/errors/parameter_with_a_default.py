import epdsl as ep

@ep.kernel
def kernel(p: ep.Ptr[ep.u32], n: ep.i32 = 4):
    p[0] = ep.u32(n)
