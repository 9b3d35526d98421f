"""EP200 to EP299: launches and their arguments, graphs, devices."""

from __future__ import annotations

from .code import ErrorCode, program

_KERNEL = """
            @ep.kernel
            def kernel(out: ep.Ptr[ep.f32], n: ep.i32):
                out[ep.thread_idx.x] = ep.f32(n)


            rank = ep.Rank(0, 1, ep.open_device("sim"))
            out = rank.zeros(ep.f32, 64)
"""

LAUNCHES = (
    ErrorCode(
        "EP201",
        "the extents of a grid or a block are wrong",
        "A grid and a block have one to three extents, each a number from 1 to the driver's limit.",
        "Correct the extent that the message names.",
        program(_KERNEL + "            kernel.launch(rank, grid=0, block=64, args=(out, 1))"),
    ),
    ErrorCode(
        "EP202",
        "the code is for another target than the device",
        "An artifact runs on the architecture that it was compiled for, and PTX on later ones.",
        "Compile it for the device's target; `epdsl devices` shows it.",
        program(
            """
            from epdsl_runtime.launch import launcher


            @ep.kernel
            def kernel(out: ep.Ptr[ep.f32]):
                out[0] = 1.0


            launcher(ep.open_device("sim"), kernel.compile("sm_90"))
            """
        ),
    ),
    ErrorCode(
        "EP203",
        "a block of this size cannot be launched",
        "The block is no whole number of warps, or larger than max_threads= of the kernel or the device allow.",
        "Use a block within both limits that is a multiple of the warp.",
        program(_KERNEL + "            kernel.launch(rank, grid=1, block=33, args=(out, 1))"),
    ),
    ErrorCode(
        "EP204",
        "a grid of another size than the kernel was compiled for",
        "The kernel's blocks count one another: blocks= was given, and the launch has another number.",
        "Launch with that many blocks, or change blocks=.",
        program("""
            @ep.kernel(blocks=4)
            def kernel(out: ep.Ptr[ep.f32]):
                out[ep.block_idx.x] = 1.0


            rank = ep.Rank(0, 1, ep.open_device("sim"))
            kernel.launch(rank, grid=8, block=32, args=(rank.zeros(ep.f32, 8),))
        """),
    ),
    ErrorCode(
        "EP205",
        "more shared memory than a block can have",
        "What ep.shared takes and shared_bytes= together are more than the device has for a block.",
        "Use smaller tiles, or fewer of them at a time.",
        program(_KERNEL + "            kernel.launch(rank, grid=1, block=64, args=(out, 1), shared_bytes=1 << 20)"),
    ),
    ErrorCode(
        "EP206",
        "the grid cannot be on the device at once",
        "The launch is cooperative: its blocks wait for each other, so all of them must be resident, or it never ends.",
        "Use a grid of at most the number in the message, or smaller blocks.",
        program(_KERNEL + "            kernel.launch(rank, grid=100000, block=64, args=(out, 1), cooperative=True)"),
    ),
    ErrorCode(
        "EP207",
        "a wrong number of arguments, or an unknown one",
        "A launch gives one argument for each parameter, ep.Const ones included; `prepared.set` changes parameters that exist.",
        "Give the arguments in the order that the message lists.",
        program(_KERNEL + "            kernel.launch(rank, grid=1, block=64, args=(out,))"),
    ),
    ErrorCode(
        "EP208",
        "an argument of a type that the parameter does not take",
        "A pointer takes device memory of its element type, an integer parameter an integer, a float parameter a number, peers a table.",
        "Pass a matching array (`rank.array(x, dtype)`) or number, or change the parameter.",
        program(_KERNEL + "            kernel.launch(rank, grid=1, block=64, args=(out, 2.5))"),
    ),
    ErrorCode(
        "EP209",
        "an argument that does not fit its parameter",
        "The number is outside the parameter's range, or the tuple has another length.",
        "Pass a value that fits, or declare the parameter wider.",
        program(_KERNEL + "            kernel.launch(rank, grid=1, block=64, args=(out, 1 << 40))"),
    ),
    ErrorCode(
        "EP210",
        "this cannot be captured in a graph",
        "While a graph is captured nothing runs: no copies to or from the host, allocations, synchronisations or work for other streams.",
        "Do it before the capture, and capture launches alone.",
        program(
            _KERNEL
            + """
            kernel.launch(rank, grid=1, block=64, args=(out, 1))
            with rank.capture():
                kernel.launch(rank, grid=1, block=64, args=(out, 1))
                rank.zeros(ep.f32, 64)
            """
        ),
    ),
    ErrorCode(
        "EP211",
        "a graph that cannot be replayed",
        "Its capture failed or is under way, it was closed, or memory that it uses was freed.",
        "Keep the buffers until the graph is closed, or capture again.",
        program(
            _KERNEL
            + """
            kernel.launch(rank, grid=1, block=64, args=(out, 1))
            with rank.capture() as graph:
                kernel.launch(rank, grid=1, block=64, args=(out, 1))
            graph.close()
            graph.replay()
            """
        ),
    ),
    ErrorCode(
        "EP212",
        "an argument in another device's memory",
        "The array or tensor lies on another GPU, or in memory that the kernel's device cannot reach.",
        "Copy it to the device of the rank: rank.array(x).",
        program(
            _KERNEL
            + """


            class OnGpu:
                __cuda_array_interface__ = {"shape": (64,), "typestr": "<f4", "data": (4096, False), "version": 3}


            kernel.launch(rank, grid=1, block=64, args=(OnGpu(), 1))
            """
        ),
    ),
    ErrorCode(
        "EP213",
        "an argument that is misaligned or not contiguous",
        "The kernel's vector accesses need the memory to begin at a multiple of their size, and kernels know no strides.",
        "Begin the view at a multiple of the bytes in the message; call .contiguous() on a tensor.",
        program("""
            @ep.kernel
            def kernel(out: ep.Ptr[ep.f32]):
                v = ep.load(out, width=4)
                out[0] = v[3]


            rank = ep.Rank(0, 1, ep.open_device("sim"))
            kernel.launch(rank, grid=1, block=32, args=(rank.zeros(ep.f32, 64)[1:],))
        """),
    ),
    ErrorCode(
        "EP220",
        "no device of this kind can be used here",
        "The Python bindings or the driver's library are missing, or the driver does not start.",
        'Install what the message names, or use device="sim".',
        program("""
            ep.open_device("cuda:0")
        """),
    ),
    ErrorCode(
        "EP221",
        "this process does not see a device of this number",
        "The machine has fewer, or CUDA_VISIBLE_DEVICES or HIP_VISIBLE_DEVICES hides it. What is visible is numbered from 0.",
        "Use a lower number, or change the variable.",
        program("""
            ep.open_device("cuda:7")
        """),
    ),
    ErrorCode(
        "EP222",
        "two devices have no peer access",
        "Neither NVLink nor PCIe lets one GPU read the other's memory: other sockets, other virtual machines, or access switched off.",
        "Choose GPUs that reach each other: nvidia-smi topo -p2p r, or rocm-smi --showtopo.",
        program("""
            from epdsl_runtime.cuda import CudaDriver

            CudaDriver(0).enable_peer(1)
        """),
    ),
    ErrorCode(
        "EP223",
        "a driver call failed",
        "The driver refused a call: the message has the call, the device, the driver's name for the error and its description.",
        "Free memory for an out-of-memory error. An illegal address means that a kernel wrote outside its arrays: run it on the "
        'simulator (device="sim"), or under `epdsl check`.',
        program("""
            from epdsl_runtime.cuda import CudaDriver

            CudaDriver(0).allocate(1 << 44)
        """),
    ),
)
