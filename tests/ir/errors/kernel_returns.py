import epdsl as ep

@ep.kernel
def kernel(p: ep.Ptr[ep.u32]):
    return p[0]
