import epdsl as ep

@ep.kernel
def kernel(p: ep.Ptr[ep.i32], n: ep.i32):
    name = "a"
    for i in range(n):
        name = name + "b"
    p[0] = len(name)
