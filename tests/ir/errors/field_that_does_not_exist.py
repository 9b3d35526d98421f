import epdsl as ep

@ep.struct
class Pair:
    first: ep.i32
    second: ep.f32

@ep.kernel
def kernel(p: ep.Ptr[Pair]):
    pair = p[0]
    pair.third = 1
