import epdsl as ep

@ep.kernel
def kernel(p: ep.Ptr[ep.f8e4m3]):
    p[0] = p[1] + p[2]
