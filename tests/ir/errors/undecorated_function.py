import epdsl as ep

def twice(x):
    return x + x

@ep.kernel
def kernel(p: ep.Ptr[ep.f32]):
    p[0] = twice(p[1])
