import epdsl as ep

@ep.kernel
def kernel(flags: ep.Peers[ep.u32], peer: ep.i32):
    ep.atomic_add(flags[peer], 1, order=ep.ACQ_REL, scope=ep.DEVICE)
