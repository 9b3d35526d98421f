import epdsl as ep

@ep.kernel
def kernel(p: ep.Ptr[ep.f64]):
    v = ep.vec(ep.u32, 8)(0)
