import epdsl as ep

@ep.kernel
def kernel(p: ep.Ptr[ep.i32], n: ep.i32):
    for i in range(n):
        last = p[i]
    p[0] = last
