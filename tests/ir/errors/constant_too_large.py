import epdsl as ep

@ep.kernel
def kernel(p: ep.Ptr[ep.u8]):
    p[0] = 256
