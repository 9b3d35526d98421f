import epdsl as ep

@ep.func
def publish(flag: ep.Ptr[ep.u32], value: ep.u32):
    ep.store(flag, value, order=ep.RELEASE, scope=ep.SYSTEM)

@ep.kernel
def kernel(p: ep.Ptr[ep.u32], n: ep.i32):
    publish(p, 1, 2)
