import epdsl as ep

@ep.func
def half(n: ep.i32):
    if n > 2:
        return n // 2

@ep.kernel
def kernel(p: ep.Ptr[ep.i32], n: ep.i32):
    p[0] = half(n)
