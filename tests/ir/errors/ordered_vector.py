import epdsl as ep

@ep.kernel
def kernel(p: ep.Ptr[ep.u32]):
    v = ep.load(p, width=4, order=ep.ACQUIRE, scope=ep.DEVICE)
