import epdsl as ep

@ep.kernel
def kernel(p: ep.Ptr[ep.f32], n: ep.i32):
    total = 0
    for i in range(n):
        total = total + p[i]
    p[0] = total
