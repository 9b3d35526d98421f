import epdsl as ep

@ep.kernel
def kernel(p: ep.Ptr[ep.i64], n: ep.i32):
    total = 0
    for i in range(n):
        total = p[i]
    p[0] = ep.i64(total)
