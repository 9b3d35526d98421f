import epdsl as ep

@ep.kernel
def kernel(p: ep.Ptr[ep.u32]):
    ep.inline_asm("nanosleep.u32 1;", "", vendor="nvidia")
