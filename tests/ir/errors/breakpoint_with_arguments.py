import epdsl as ep

@ep.kernel
def kernel(n: ep.i32):
    breakpoint(header=n)
