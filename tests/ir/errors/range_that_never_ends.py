import epdsl as ep

@ep.kernel
def kernel(p: ep.Ptr[ep.i32], n: ep.i32):
    for i in range(0, n, 0):
        p[i] = 1
