import epdsl as ep

@ep.kernel
def kernel(p: ep.Ptr[ep.u32]):
    ep.group_barrier(ep.Group(0, 96, 2))
