import epdsl as ep

@ep.kernel
def kernel(p: ep.Ptr[ep.u64], n: ep.i64):
    p[0] = p[1] + n
