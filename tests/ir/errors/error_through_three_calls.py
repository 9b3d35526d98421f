import epdsl as ep

@ep.func
def third(x: ep.i32):
    return x + ep.f32(1.0)

@ep.func
def second(x: ep.i32):
    y = third(x - 1)
    return y

@ep.func
def first(x: ep.i32):
    return second(x) * 2

@ep.kernel
def kernel(p: ep.Ptr[ep.i32], n: ep.i32):
    if n > 1:
        p[0] = 3 + first(n)
