"""EP040 to EP079: memory, orders and scopes, threads and barriers, the copy engine, reports."""

from __future__ import annotations

from .code import ErrorCode, program

DEVICE = (
    ErrorCode(
        "EP040",
        "an order or a scope is missing",
        "An atomic, a fence, a wait and a load or store with either keyword say both: which accesses they order, and for which threads. "
        "None is assumed.",
        "Write order= and scope=. A plain access is p[i].",
        program("""
            @ep.kernel
            def kernel(flag: ep.Ptr[ep.u32]):
                ep.store(flag, 1, scope=ep.SYSTEM)


            kernel.compile("sm_90")
        """),
    ),
    ErrorCode(
        "EP041",
        "not an order, or not a scope",
        "order= or scope= was given a text, or the two were exchanged.",
        "Use ep.RELAXED, ep.ACQUIRE, ep.RELEASE, ep.ACQ_REL or ep.SEQ_CST, and ep.BLOCK, ep.DEVICE or ep.SYSTEM.",
        program("""
            @ep.kernel
            def kernel(flag: ep.Ptr[ep.u32]):
                ep.store(flag, 1, order="release", scope=ep.SYSTEM)


            kernel.compile("sm_90")
        """),
    ),
    ErrorCode(
        "EP042",
        "this operation cannot have this order",
        "A load acquires and cannot release; a store releases and cannot acquire; a wait acquires; a relaxed fence would do nothing.",
        "Use one of the orders that the message lists.",
        program("""
            @ep.kernel
            def kernel(flag: ep.Ptr[ep.u32]):
                ep.store(flag, 1, order=ep.ACQUIRE, scope=ep.SYSTEM)


            kernel.compile("sm_90")
        """),
    ),
    ErrorCode(
        "EP043",
        "the scope is too narrow for another rank's memory",
        "BLOCK and DEVICE order threads of one device. The memory belongs to a rank on another device, which would see the accesses in "
        "any order.",
        "Use scope=ep.SYSTEM on pointers from ep.Peers.",
        program("""
            @ep.kernel
            def kernel(flags: ep.Peers[ep.u32], peer: ep.i32):
                ep.store(flags[peer], 1, order=ep.RELEASE, scope=ep.DEVICE)


            kernel.compile("sm_90")
        """),
    ),
    ErrorCode(
        "EP044",
        "not one access on every target",
        "Atomic and ordered accesses are 32 or 64 bits of one scalar: wider, narrower and vector ones would be torn on some target.",
        "Use a pointer to a 32- or 64-bit type (`p.cast(ep.u32)`), or a plain access behind an ordered one.",
        program("""
            @ep.kernel
            def kernel(p: ep.Ptr[ep.u16]):
                ep.store(p, 1, order=ep.RELEASE, scope=ep.SYSTEM)


            kernel.compile("sm_90")
        """),
    ),
    ErrorCode(
        "EP045",
        "a misaligned access",
        "An access of n bytes needs an address that is a multiple of n, and this one is known not to be.",
        "Move the address to a multiple, or access fewer bytes.",
        program("""
            @ep.kernel
            def kernel(a: ep.Ptr[ep.u32], out: ep.Ptr[ep.u32]):
                v = ep.load(a + 1, width=4)
                out[0] = v[0]


            kernel.compile("sm_90")
        """),
    ),
    ErrorCode(
        "EP046",
        "this atomic or wait does not exist for this type",
        "Floats have no atomic minimum, maximum, bit operations or compare-and-swap, and a wait compares integer words.",
        "Use an integer type: `p.cast(ep.u32)` for the bits of an f32, or ep.atomic_add.",
        program("""
            @ep.kernel
            def kernel(p: ep.Ptr[ep.f32]):
                ep.atomic_max(p, 1.0, order=ep.RELAXED, scope=ep.DEVICE)


            kernel.compile("sm_90")
        """),
    ),
    ErrorCode(
        "EP047",
        "a keyword has no such value",
        "The keyword takes one of a few words, known while building.",
        "Use one of those that the message lists.",
        program("""
            @ep.kernel
            def kernel(a: ep.Ptr[ep.u32], out: ep.Ptr[ep.u32]):
                out[0] = ep.load(a, cache="none")


            kernel.compile("sm_90")
        """),
    ),
    ErrorCode(
        "EP048",
        "a pointer is needed",
        "The operation works on memory and was given a value: an element instead of its address.",
        "Give it the pointer: `p + i` where `p[i]` is the element.",
        program("""
            @ep.kernel
            def kernel(flags: ep.Ptr[ep.u32], i: ep.i32):
                ep.store(flags[i], 1, order=ep.RELEASE, scope=ep.SYSTEM)


            kernel.compile("sm_90")
        """),
    ),
    ErrorCode(
        "EP049",
        "this address cannot be stored in memory",
        "Shared memory belongs to one block, so its address means nothing to whoever reads it; a table of peers is no single pointer.",
        "Keep it in a variable, or pass it as a parameter.",
        program("""
            @ep.kernel
            def kernel(table: ep.Ptr[ep.Ptr[ep.u32]]):
                table[0] = ep.shared(ep.u32, 32)


            kernel.compile("sm_90")
        """),
    ),
    ErrorCode(
        "EP050",
        "shared memory of this size or place",
        "Shared memory is laid out while building: its size, and its place if given, are known then, and two arrays share all of their "
        "bytes or none.",
        "Give a compile-time size of at least 1; for a size known at launch use shared_bytes=. Places are multiples of the alignment.",
        program("""
            @ep.kernel
            def kernel(out: ep.Ptr[ep.u32], n: ep.i32):
                tile = ep.shared(ep.u32, n)
                out[0] = tile[0]


            kernel.compile("sm_90")
        """),
    ),
    ErrorCode(
        "EP051",
        "a wait without a condition or without a timeout",
        "A wait says what it waits for and for how long: no wait is unbounded.",
        "Write until=lambda v: ... and timeout_ns=.",
        program("""
            @ep.kernel
            def kernel(flag: ep.Ptr[ep.u32]):
                ep.wait(flag, until=lambda v: v == 1, order=ep.ACQUIRE, scope=ep.SYSTEM)


            kernel.compile("sm_90")
        """),
    ),
    ErrorCode(
        "EP060",
        "a block barrier that some threads would not reach",
        "The barrier stands under a condition, or after a return, that differs between threads of the block. The others would wait for "
        "ever.",
        "Move the barrier out of the condition, or use ep.group_barrier for a class of warps.",
        program("""
            @ep.kernel
            def kernel(out: ep.Ptr[ep.i32]):
                if ep.thread_idx.x < 32:
                    out[0] = 1
                    ep.barrier()


            kernel.compile("sm_90")
        """),
    ),
    ErrorCode(
        "EP061",
        "this barrier id cannot be used",
        "A block has named barriers 1 to 15; 0 is ep.barrier's own.",
        "Use an id from 1 to 15.",
        program("""
            @ep.kernel
            def kernel():
                ep.named_barrier(16, 64)


            kernel.compile("sm_90")
        """),
    ),
    ErrorCode(
        "EP062",
        "not a whole number of warps",
        "Barriers, groups and blocks consist of whole warps: 32 threads on NVIDIA, 64 on most AMD devices.",
        "Use a multiple of ep.warp_size() of the target.",
        program("""
            @ep.kernel
            def kernel():
                ep.named_barrier(1, 48)


            kernel.compile("sm_90")
        """),
    ),
    ErrorCode(
        "EP063",
        "a barrier of more threads than the block has",
        "max_threads= says how large a block can be; the barrier waits for more.",
        "Wait for at most that many threads, or raise max_threads=.",
        program("""
            @ep.kernel(max_threads=128)
            def kernel():
                ep.named_barrier(1, 256)


            kernel.compile("sm_90")
        """),
    ),
    ErrorCode(
        "EP064",
        "a thread operation cannot take this value",
        "Shuffles move scalars and vectors of numbers; barriers take numbers or an ep.Group.",
        "Convert the value: ep.u64(p) for a pointer, ep.i32(...) for a count.",
        program("""
            @ep.kernel
            def kernel(p: ep.Ptr[ep.i32]):
                other = ep.shfl(p, 0)
                other[0] = 1


            kernel.compile("sm_90")
        """),
    ),
    ErrorCode(
        "EP065",
        "a wrong mask of lanes",
        "A mask is an integer with a bit for each lane of the warp that takes part, and at least one of them is set.",
        "Leave the mask out for the whole warp, or use what ep.ballot returned.",
        program("""
            @ep.kernel
            def kernel(out: ep.Ptr[ep.i32], n: ep.i32):
                out[0] = ep.shfl(n, 0, mask=0)


            kernel.compile("sm_90")
        """),
    ),
    ErrorCode(
        "EP066",
        "a bulk copy of this kind does not exist",
        "The copy engine moves multiples of 16 bytes between global and shared memory.",
        "Put one side in shared memory and round the size up to 16; ep.copy copies the rest.",
        program("""
            @ep.kernel
            def kernel(out: ep.Ptr[ep.u32]):
                tile = ep.shared(ep.u32, 32)
                ep.bulk_copy(out, tile, 40)


            kernel.compile("sm_90")
        """),
    ),
    ErrorCode(
        "EP067",
        "a bulk copy and how it completes do not match",
        "A copy to shared memory completes on an ep.MBarrier in shared memory; one from shared memory with the bulk group.",
        "Give barrier= to a copy to shared memory; after one from it, ep.bulk_commit() and ep.bulk_wait().",
        program("""
            @ep.kernel
            def kernel(source: ep.Ptr[ep.u32]):
                tile = ep.shared(ep.u32, 32)
                ep.bulk_copy(tile, source, 128)


            kernel.compile("sm_90")
        """),
    ),
    ErrorCode(
        "EP070",
        "a report's text and values do not match",
        "ep.printf and ep.device_assert take a text known while building, with a {} for each value, and a few scalars or pointers.",
        "Write one {} for each value, and no more values than the message allows.",
        program("""
            @ep.kernel
            def kernel(n: ep.i32):
                ep.printf("n = {} of {}", n)


            kernel.compile("sm_90")
        """),
    ),
    ErrorCode(
        "EP071",
        "inline assembly without a vendor, or with a wrong result",
        "Assembly is one vendor's, and gives nothing or one scalar.",
        'Write vendor="nvidia" or vendor="amd", and result= a scalar type.',
        program("""
            @ep.kernel
            def kernel(out: ep.Ptr[ep.u32]):
                out[0] = ep.inline_asm("mov.u32 $0, %smid;", "=r", result=ep.u32)


            kernel.compile("sm_90")
        """),
    ),
    ErrorCode(
        "EP072",
        "assembly that the target does not run",
        "A kernel is compiled for a target of the other vendor, or for the simulator, which runs no assembly.",
        "Put it under `if ep.target.vendor == ...` and `if not ep.target.simulated`, with another way in the else.",
        program("""
            @ep.kernel
            def kernel():
                ep.inline_asm("s_nop 0", "", vendor="amd")


            kernel.compile("sm_90")
        """),
    ),
    ErrorCode(
        "EP073",
        "breakpoint() where no debugger can stop",
        "A kernel stops in the debugger on the simulator only, and there without arguments.",
        'Run it with device="sim", or write `if ep.target.simulated: breakpoint()`.',
        program("""
            @ep.kernel
            def kernel(n: ep.i32):
                breakpoint()


            kernel.compile("sm_90")
        """),
    ),
)
