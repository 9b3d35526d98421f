import epdsl as ep

@ep.kernel
def kernel(p: ep.Ptr[ep.u32]):
    p[0] = ep.load(p, order=ep.ACQUIRE)
