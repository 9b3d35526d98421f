import epdsl as ep

@ep.kernel
def kernel(p: ep.Ptr[ep.i32], f: ep.f32):
    for i in range(f):
        p[i] = 1
