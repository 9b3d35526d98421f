import epdsl as ep

@ep.kernel
def kernel(p: ep.Ptr[ep.u32], n: ep.i32):
    for i in range(len(p)):
        p[i] = 0
