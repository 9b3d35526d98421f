import epdsl as ep

@ep.func
def meet(ready: ep.i1):
    while ready:
        ep.barrier()
        ready = False

@ep.kernel
def kernel(p: ep.Ptr[ep.i32]):
    meet(ep.atomic_add(p, 1, order=ep.RELAXED, scope=ep.DEVICE) == 0)
