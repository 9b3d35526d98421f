import epdsl as ep

@ep.kernel
def kernel(p: ep.Ptr[ep.u32], n: ep.i32):
    a = [n, 1]
    a.append(n)
