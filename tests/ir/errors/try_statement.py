import epdsl as ep

@ep.kernel
def kernel(p: ep.Ptr[ep.u32]):
    try:
        p[0] = 1
    finally:
        p[1] = 2
