import epdsl as ep

@ep.func
def forever(p: ep.Ptr[ep.i32]):
    while True:
        p[0] = 1

@ep.kernel
def kernel(p: ep.Ptr[ep.i32], n: ep.i32):
    forever(p)
