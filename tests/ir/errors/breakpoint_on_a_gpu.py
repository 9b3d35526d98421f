import epdsl as ep

@ep.func
def watched(n: ep.i32):
    breakpoint()

@ep.kernel
def kernel(n: ep.i32):
    watched(n)
