import epdsl as ep

@ep.func
def half(n: ep.i32) -> ep.f32:
    return n // 2

@ep.kernel
def kernel(p: ep.Ptr[ep.f32], n: ep.i32):
    p[0] = half(n)
