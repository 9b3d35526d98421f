import epdsl as ep

@ep.kernel
def kernel(p: ep.Ptr[ep.u32]):
    print(p[0])
