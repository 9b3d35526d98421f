import epdsl as ep

@ep.kernel
def kernel(p: ep.Ptr[ep.u32]):
    ep.wait(p, order=ep.ACQUIRE, scope=ep.SYSTEM, timeout_ns=10)
