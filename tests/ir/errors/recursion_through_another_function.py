import epdsl as ep

@ep.func
def ping(n: ep.i32):
    pong(n)

@ep.func
def pong(n: ep.i32):
    ping(n)

@ep.kernel
def kernel(p: ep.Ptr[ep.i32], n: ep.i32):
    ping(n)
