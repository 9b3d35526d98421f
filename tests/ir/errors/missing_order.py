import epdsl as ep

@ep.kernel
def kernel(p: ep.Ptr[ep.u32]):
    ep.store(p, 1, scope=ep.DEVICE)
