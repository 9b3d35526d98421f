import epdsl as ep

@ep.kernel
def kernel(p: ep.Ptr[ep.u32]):
    p[1] = ep.load(p, order=ep.RELEASE, scope=ep.DEVICE)
