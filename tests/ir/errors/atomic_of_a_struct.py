import epdsl as ep

@ep.struct
class Pair:
    first: ep.i32
    second: ep.i32

@ep.kernel
def kernel(p: ep.Ptr[Pair]):
    ep.atomic_add(p, 1, order=ep.RELAXED, scope=ep.DEVICE)
