import epdsl as ep

@ep.kernel
def kernel(p: ep.Ptr[ep.u32]):
    ep.wait(p, until=lambda v: v == 1, order=ep.RELEASE, scope=ep.SYSTEM, timeout_ns=10)
