import epdsl as ep

@ep.kernel(max_threads=100)
def kernel(p: ep.Ptr[ep.i32]):
    p[0] = 1
