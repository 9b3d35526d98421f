import epdsl as ep

@ep.kernel
def kernel(p: ep.Ptr[ep.i32], n: ep.i32):
    i = ep.lane_id() + 1
    if p[i] == 3 and n > 2:
        return
    ep.group_barrier(ep.Group(0, 64))
