import epdsl as ep

@ep.kernel
def kernel(p: ep.Ptr[ep.f64]):
    v = ep.load(p, width=4)
