import epdsl as ep

@ep.kernel
def kernel(q: ep.Peers[ep.u32]):
    for r in range(len(q)):
        q[r][0] = 0
