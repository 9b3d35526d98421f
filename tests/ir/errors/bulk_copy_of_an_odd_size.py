import epdsl as ep

@ep.kernel
def kernel(p: ep.Ptr[ep.u8]):
    space = ep.shared(ep.u8, 64)
    ep.bulk_copy(p, space, 40)
