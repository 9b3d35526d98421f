import epdsl as ep

@ep.kernel(max_threads=128)
def kernel(p: ep.Ptr[ep.i32]):
    ep.named_barrier(1, 256)
