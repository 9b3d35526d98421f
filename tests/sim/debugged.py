"""A kernel that stops in the debugger. Run as a program, it reads the debugger's commands from standard input."""

import sys

import numpy as np

import epdsl as ep


@ep.struct
class Box:
    slot: ep.Ptr[ep.u32]
    limit: ep.i32


@ep.func
def doubled(value: ep.f32):
    result = value + value  # doubled
    return result  # result


@ep.kernel
def summed(a: ep.Ptr[ep.f32], to: ep.Peers[ep.f32], box: Box, n: ep.i32, stop: ep.Const[bool]):
    t = ep.thread_idx.x
    kept = ep.shared(ep.f32, 4)
    scale = 3  # noqa: F841
    pair = ep.vec(ep.f32, 2)(1.5, 2.5)  # noqa: F841
    total = ep.f32(0)
    for i in range(n):
        square = a[i] * a[i]
        total = total + square  # loop
    if t == 5 and ep.block_idx.x == 1:
        kept[1] = total
        if stop:
            breakpoint()  # stop
        total = doubled(total)  # call
        a[t] = total  # store
    ep.barrier()


def main(rank: ep.Rank, stop: bool = True) -> float:
    a = rank.array(np.arange(64, dtype=np.float32))
    to = rank.symmetric(ep.f32, 16, name="inbox")
    slots = rank.array(np.arange(4, dtype=np.uint32))
    summed.launch(rank, grid=2, block=64, args=(a, to.peers, Box(slots, 7), 4, stop))
    rank.synchronize()
    return float(a.numpy()[5])


if __name__ == "__main__":
    print(ep.spawn(main, ranks=2, device=sys.argv[1]))
