import epdsl as ep

N = 3

@ep.kernel
def kernel(p: ep.Ptr[ep.u32], n: ep.i32):
    N = N + 1
    p[0] = ep.u32(n + N)
