import epdsl as ep

import math

@ep.kernel
def kernel(p: ep.Ptr[ep.f32]):
    p[0] = math.sqrt(p[0])
