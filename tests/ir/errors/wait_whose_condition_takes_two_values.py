import epdsl as ep

@ep.kernel
def kernel(p: ep.Ptr[ep.u32], n: ep.i32):
    ep.wait(p, until=lambda v, w: v == w, order=ep.ACQUIRE, scope=ep.SYSTEM, timeout_ns=10**9)
