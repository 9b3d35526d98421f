import epdsl as ep

@ep.kernel
def kernel(p: ep.Ptr[ep.i32], n: ep.i32):
    def again(x):
        return again(x - 1)

    p[0] = again(n)
