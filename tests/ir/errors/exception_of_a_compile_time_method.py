import epdsl as ep

class Policy:
    def limit(self):
        raise NotImplementedError("limit of this policy")

POLICY = Policy()

@ep.kernel
def kernel(p: ep.Ptr[ep.i32], n: ep.i32):
    p[0] = POLICY.limit() + 1
