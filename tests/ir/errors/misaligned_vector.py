import epdsl as ep

@ep.kernel
def kernel(p: ep.Ptr[ep.f32]):
    v = ep.load(p + 1, width=4)
    p[0] = v[0]
