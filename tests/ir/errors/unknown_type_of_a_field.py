import epdsl as ep

@ep.struct
class Pair:
    first: ep.i32
    second: complex

@ep.kernel
def kernel(p: ep.Ptr[Pair]):
    p[0].first = 1
