import epdsl as ep

@ep.kernel
def kernel(p: ep.Ptr[ep.f32], n: ep.i32):
    if n > 0:
        x = p[0]
    else:
        x = n
    p[1] = ep.f32(x)
