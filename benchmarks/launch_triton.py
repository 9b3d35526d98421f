"""The kernel of `launch.py` in Triton: as many parameters, and nothing done with them."""

from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]


@triton.jit
def many_parameters(
    p0, p1, p2, p3, p4, p5, p6, p7, p8, p9, a0, a1, a2, a3, a4, a5, a6, b0, b1, b2, b3, b4, c0, c1, never
):  # fmt: skip
    if never != 0:
        total = tl.load(p1) + tl.load(p2) + tl.load(p3) + tl.load(p4) + tl.load(p5) + tl.load(p6) + tl.load(p7) + tl.load(p8)
        tl.store(p0, total + tl.load(p9) + c0 + c1)
        tl.store(p1, (a0 + a1 + a2 + a3 + a4 + a5 + a6).to(tl.float32))
        tl.store(p2, (b0 + b1 + b2 + b3 + b4).to(tl.float32))
