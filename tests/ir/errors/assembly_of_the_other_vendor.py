import epdsl as ep

@ep.kernel
def kernel(p: ep.Ptr[ep.u32]):
    ep.inline_asm("s_nop 0", "", vendor="amd")
