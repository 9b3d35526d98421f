import epdsl as ep

@ep.kernel
def kernel(flags: ep.Peers[ep.u32], peer: ep.i32):
    ep.store(flags[peer], 1, order=ep.RELEASE, scope=ep.BLOCK)
