import epdsl as ep

@ep.struct
class Pair:
    first: ep.i32
    second: ep.f32

@ep.kernel
def kernel(p: ep.Ptr[Pair], n: ep.i32):
    p[0] = Pair(first=n, third=2)
