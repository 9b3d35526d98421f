import epdsl as ep

@ep.kernel
def kernel(p: ep.Ptr[ep.i32], n):
    p[0] = n
