import epdsl as ep

@ep.kernel
def kernel(p: ep.Ptr[ep.u32]):
    ep.wait(p, until=lambda v: v == 1, timeout_ns=10)
