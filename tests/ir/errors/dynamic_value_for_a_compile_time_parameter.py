import epdsl as ep

@ep.func
def fill(p: ep.Ptr[ep.i32], n: int):
    for i in ep.unroll(range(n)):
        p[i] = 0

@ep.kernel
def kernel(p: ep.Ptr[ep.i32], n: ep.i32):
    fill(p, n)
