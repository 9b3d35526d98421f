import epdsl as ep

@ep.kernel
def kernel(p: ep.Ptr[ep.u8], q: ep.Ptr[ep.u8]):
    ep.bulk_copy(p, q, 64)
