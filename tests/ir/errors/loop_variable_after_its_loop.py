import epdsl as ep

@ep.kernel
def kernel(p: ep.Ptr[ep.i32], n: ep.i32):
    for i in range(n):
        p[i] = 0
    p[0] = i
