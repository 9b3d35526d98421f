import epdsl as ep

@ep.kernel
def kernel(p: ep.Ptr[ep.u32]):
    ep.fence(order=ep.ACQ_REL)
