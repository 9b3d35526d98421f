import epdsl as ep

@ep.kernel
def kernel(p: ep.Ptr[ep.i32], n: ep.i32):
    while True:
        p[0] = n
