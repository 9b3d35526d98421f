import epdsl as ep

@ep.kernel
def kernel(p: ep.Ptr[ep.i32], n: ep.i32):
    if n > 0:
        x = n * 2
    p[0] = x
