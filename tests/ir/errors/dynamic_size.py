import epdsl as ep

@ep.kernel
def kernel(p: ep.Ptr[ep.f32], n: ep.i32):
    s = ep.shared(ep.f32, n)
    s[0] = p[0]
