import epdsl as ep

@ep.kernel
def kernel(p: ep.Ptr[ep.i32], f: ep.f32):
    p[0] = f
