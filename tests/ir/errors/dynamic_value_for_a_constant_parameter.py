import epdsl as ep

@ep.func
def fill(p: ep.Ptr[ep.i32], n: ep.Const[int]):
    p[0] = n

@ep.kernel
def kernel(p: ep.Ptr[ep.i32], n: ep.i32):
    fill(p, p[0])
