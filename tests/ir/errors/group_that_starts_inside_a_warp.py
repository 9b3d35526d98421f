import epdsl as ep

@ep.kernel
def kernel(p: ep.Ptr[ep.i32]):
    ep.group_barrier(ep.Group(16, 64, 3))
