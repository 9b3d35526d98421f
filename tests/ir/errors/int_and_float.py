import epdsl as ep

@ep.kernel
def kernel(p: ep.Ptr[ep.f32], n: ep.i32):
    p[0] = p[1] * n
