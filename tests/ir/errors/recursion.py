import epdsl as ep

@ep.func
def down(n: ep.i32):
    return down(n - 1)

@ep.kernel
def kernel(p: ep.Ptr[ep.i32], n: ep.i32):
    p[0] = down(n)
