import epdsl as ep

@ep.kernel
def kernel(p: ep.Ptr[ep.i32]):
    if p:
        p[0] = 1
