import epdsl as ep

@ep.kernel
def kernel(p: ep.Ptr[ep.u32]):
    words = ep.shared(ep.u32, 8)
    ep.store(words + 1, ep.vec(ep.u32, 2)(0))
