import epdsl as ep

@ep.kernel
def kernel(p: ep.Ptr[ep.f32], n: ep.i32):
    for i in ep.unroll(range(n)):
        p[i] = 0.0
