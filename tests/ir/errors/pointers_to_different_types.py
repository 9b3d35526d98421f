import epdsl as ep

@ep.kernel
def kernel(p: ep.Ptr[ep.i32], q: ep.Ptr[ep.f32], out: ep.Ptr[ep.i64]):
    out[0] = p - q
