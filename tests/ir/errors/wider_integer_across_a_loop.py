import epdsl as ep

@ep.kernel
def kernel(p: ep.Ptr[ep.i64], n: ep.i32):
    total = 0
    while total < n:
        total = total + p[0]
    p[0] = total
