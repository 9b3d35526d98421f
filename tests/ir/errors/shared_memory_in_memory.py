import epdsl as ep

@ep.kernel
def kernel(p: ep.Ptr[ep.Ptr[ep.i32]]):
    p[0] = ep.shared(ep.i32, 4)
