import epdsl as ep

@ep.kernel
def kernel(p: ep.Ptr[ep.u32]):
    v = ep.load(p, width=4)
    p[0] = v[4]
