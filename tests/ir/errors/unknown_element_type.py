import epdsl as ep

@ep.kernel
def kernel(p: ep.Ptr[str]):
    p[0] = 1
