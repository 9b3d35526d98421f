import epdsl as ep

@ep.kernel
def kernel(p: ep.Ptr[ep.i32]):
    q = p * 2
