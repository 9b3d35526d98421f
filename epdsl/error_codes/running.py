"""EP300 to EP399: running kernels and ranks: waits, asserts, deadlocks, peers, the meeting of the ranks."""

from __future__ import annotations

from .code import ErrorCode, program

RUNNING = (
    ErrorCode(
        "EP301",
        "a wait ran out of time",
        "ep.wait did not see its condition within timeout_ns. Usually who should have signalled did not: it failed, it never launched, "
        "it waits itself, or it wrote to another address or with another order.",
        "Read who did not arrive. On the simulator the text also says who waits for whom, and `epdsl check` finds lost signals.",
        program("""
            @ep.kernel
            def kernel(flag: ep.Ptr[ep.u32]):
                if ep.thread_idx.x == 0:
                    ep.wait(flag, until=lambda v: v == 1, order=ep.ACQUIRE, scope=ep.SYSTEM, timeout_ns=10**6)


            rank = ep.Rank(0, 1, ep.open_device("sim"))
            kernel.launch(rank, grid=1, block=32, args=(rank.zeros(ep.u32, 1),))
            rank.synchronize()
        """),
    ),
    ErrorCode(
        "EP302",
        "a device assert failed",
        "The condition of an ep.device_assert was false in a thread. The values are in the text; the other threads went on.",
        "Correct what made it false; ep.printf before it shows more.",
        program("""
            @ep.kernel
            def kernel(n: ep.i32):
                if ep.thread_idx.x == 0:
                    ep.device_assert(n < 10, "n is {}", n)


            rank = ep.Rank(0, 1, ep.open_device("sim"))
            kernel.launch(rank, grid=1, block=32, args=(12,))
            rank.synchronize()
        """),
    ),
    ErrorCode(
        "EP303",
        "a kernel reported a fault of an unknown kind",
        "The record in the device's fault buffer is neither a wait nor an assert: another version of epdsl compiled the kernel, or a "
        "kernel overwrote the buffer.",
        "Compile again with the version that runs it; look for writes outside arrays on the simulator.",
        program("""
            from epdsl_runtime import context_layout as layout

            rank = ep.Rank(0, 1, ep.open_device("sim"))
            words = rank.device.context_words
            words[layout.FAULT_COUNT] = 1
            words[layout.FAULT_BASE + layout.FAULT_READY] = 1
            words[layout.FAULT_BASE + layout.FAULT_KIND] = 9
            rank.synchronize()
        """),
    ),
    ErrorCode(
        "EP304",
        "a deadlock",
        "Nothing can go on: every thread waits at a barrier, a warp operation or a memory word that no thread in flight will write, or "
        "goes round a loop that only looks at memory.",
        "The text says who waits for what at which line. Look for a barrier with another count, or a signal sent after it was waited for.",
        program("""
            @ep.kernel
            def kernel():
                if ep.warp_id() == 0:
                    ep.named_barrier(2, 64)


            rank = ep.Rank(0, 1, ep.open_device("sim"))
            kernel.launch(rank, grid=1, block=64)
            rank.synchronize()
        """),
    ),
    ErrorCode(
        "EP305",
        "a kernel trapped",
        "A thread executed ep.trap(), which ends the kernel. On a GPU it ends the device's context, and the driver's own error follows.",
        "Use ep.device_assert, which says why and leaves the device usable.",
        program("""
            @ep.kernel
            def kernel():
                if ep.thread_idx.x == 3:
                    ep.trap()


            rank = ep.Rank(0, 1, ep.open_device("sim"))
            kernel.launch(rank, grid=1, block=32)
            rank.synchronize()
        """),
    ),
    ErrorCode(
        "EP306",
        "memory beside an array was written",
        "On the simulator a kernel stored through an index that is negative or not below the array's length. Noticed at the next "
        "synchronisation, up to 16 KiB past the array's end and 256 bytes before it; reads, and writes further off, give wrong values or "
        "end the process with a segmentation fault.",
        "Run a scenario with `epdsl check`: it looks at every access and says which line and thread it was.",
        program("""
            @ep.kernel
            def kernel(x: ep.Ptr[ep.i32], n: ep.i32):
                for i in range(ep.thread_idx.x, n, ep.block_dim.x):
                    x[i] = i


            rank = ep.Rank(0, 1, ep.open_device("sim"))
            kernel.launch(rank, grid=1, block=32, args=(rank.zeros(ep.i32, 99), 100))
            rank.synchronize()
        """),
    ),
    ErrorCode(
        "EP310",
        "a rank failed",
        "A rank of the job raised an exception, or its process ended. This is raised on the ranks that wait for it and by ep.spawn.",
        "Read that rank's own error, which follows. `error.error` is the exception where it could be brought here.",
        program("""
            def main(rank):
                if rank.index == 1:
                    raise ValueError("no tokens for this rank")
                rank.barrier()


            ep.spawn(main, ranks=2, device="sim")
        """),
    ),
    ErrorCode(
        "EP311",
        "ranks did not meet in time",
        "A rank waited on the host for the others, and some did not come: not started, still compiling, or in another call.",
        "Look at the missing ranks' output; give a longer timeout= if they are only slow, and check the launcher's address and port.",
        program("""
            from epdsl_runtime.bootstrap import ThreadBootstrap, ThreadHub

            ThreadBootstrap(ThreadHub(2), 0, timeout=0.1).barrier()
        """),
    ),
    ErrorCode(
        "EP312",
        "ranks were given different values",
        "Layers and collective calls need equal sizes, kernels and versions on every rank, and some rank has another.",
        "Give every rank the same; the text has both values.",
        program("""
            def main(rank):
                try:
                    rank.agree("a layer", {"hidden": 256 << rank.index})
                except ValueError as error:
                    return error


            raise ep.spawn(main, ranks=2, device="sim")[0]
        """),
    ),
    ErrorCode(
        "EP313",
        "a collective call failed on every rank alike",
        "The ranks are in one call with different arguments, or it failed on one of them. Nobody has what it should have made.",
        "Correct the rank that the text names. The job can go on.",
        program("""
            def main(rank):
                try:
                    rank.symmetric(ep.f32, 4 + rank.index)
                except RuntimeError as error:
                    return error


            raise ep.spawn(main, ranks=2, device="sim")[0]
        """),
    ),
    ErrorCode(
        "EP314",
        "memory that cannot be shared with other ranks",
        "The memory was allocated in a way that has no handle for other processes, or the other process is on another machine.",
        "Use rank.symmetric(...), or an allocator that makes shareable memory.",
        program("""
            from epdsl_runtime.sim_process import ProcessDevice

            device = ProcessDevice("nvidia", 0)
            address = device.allocate(64)
            device.export_foreign(address, 64)
        """),
    ),
    ErrorCode(
        "EP315",
        "no kind of peer memory works between the ranks",
        "Each kind was tried (fabric handles, file descriptors, the driver's IPC) and failed; the text says why for each. Containers "
        "often lack permissions or a shared /dev/shm or IPC namespace.",
        "Run the ranks with --ipc=host or in one container, or choose GPUs that reach each other. EPDSL_PEER_MEMORY=auto tries all.",
        program("""
            def main(rank):
                rank.symmetric(ep.f32, 64)


            if __name__ == "__main__":
                ep.spawn(main, ranks=2, device="cuda", peer_memory="fabric")
        """),
    ),
    ErrorCode(
        "EP316",
        "this process cannot take its place in a job",
        "ep.init reads who this process is from its launcher. Those variables are missing or wrong, the number of ranks differs between "
        "processes, rank 0 cannot listen at its port, or the rendezvous is another job's.",
        "Correct what the text names. All ranks need the same number of ranks, MASTER_ADDR and port (EPDSL_PORT, or MASTER_PORT + 1), and "
        "each a number of its own.",
        program("""
            from epdsl_runtime.launchers import launched

            launched({"RANK": "2", "WORLD_SIZE": "2"})
        """),
    ),
    ErrorCode(
        "EP317",
        "ranks cannot be started as processes",
        "ep.spawn starts a process for each rank, which imports the script that called it. This process may start none, the script cannot "
        "be imported or calls spawn while it is, or `main` or its arguments cannot be sent.",
        "Put the program into a file, the call under `if __name__ == '__main__':`, and main at the top of a module. With device='sim' the "
        "ranks are threads and need none of this.",
        program("""
            from epdsl_runtime.sim_process import SimProcesses

            ep.spawn(lambda rank: rank.index, ranks=2, device=SimProcesses())
        """),
    ),
    ErrorCode(
        "EP318",
        "a job took too long",
        "ep.spawn was given a timeout, and some ranks had not returned by then. They were ended.",
        "The text has what each of them did. Give more time, or look for what it waits for: `rank.health()`, `epdsl check`.",
        program("""
            import time


            def main(rank):
                if rank.index == 1:
                    time.sleep(1)
                rank.barrier()


            ep.spawn(main, ranks=2, device="sim", timeout=0.5)
        """),
    ),
    ErrorCode(
        "EP319",
        "ranks are in different collective calls",
        "Collective calls (symmetric, barrier, allgather, close, ...) are made by all ranks in one order. Two ranks met in different ones; "
        "what each would have got cannot be said any more.",
        "Look at the two calls that the text names; a rank has left one out, or made one more, often in an `if` on its number.",
        program("""
            def main(rank):
                try:
                    rank.barrier() if rank.index == 0 else rank.allgather(1)
                except RuntimeError as error:
                    return error


            raise ep.spawn(main, ranks=2, device="sim")[0]
        """),
    ),
    ErrorCode(
        "EP320",
        "selections or rows that an exchange cannot use",
        "topk_idx named an expert that does not exist, or one twice in a row, or something wrote over what says where a dispatched row "
        "came from. Those were left out, nothing was written outside a buffer, and rank.synchronize() reports it: only the kernels see it.",
        "Correct the router; -1 is for a selection that is not used. The text has the first row and column, `error.count` how many. "
        "validate=True looks at arrays in host memory before anything is launched.",
        program("""
            import numpy as np
            from epdsl.moe import ExpertParallel


            def main(rank):
                layer = ExpertParallel(rank, hidden=16, n_experts=4, top_k=2, max_tokens_per_rank=3)
                ids = np.array([[0, 1], [2, 9], [3, 0]], np.int32)
                layer.dispatch(rank.zeros(ep.bf16, (3, 16)), ids, np.ones((3, 2), np.float32))
                try:
                    rank.synchronize()
                except ValueError as error:
                    return error


            raise ep.spawn(main, ranks=2, device="sim")[0]
        """),
    ),
    ErrorCode(
        "EP330",
        "a checked run that is too large",
        "The checker remembers who wrote and read every byte, and of every warp what it has seen of the others. It has a fixed amount of "
        "memory for that, of warps and of launches.",
        "Check a smaller shape: fewer tokens, blocks, threads or launches. The errors of a memory order show at any size.",
        program("""
            from epdsl.check.engine import Options
            from epdsl.check.run import run


            @ep.kernel
            def kernel(p: ep.Ptr[ep.u32]):
                ep.reduce_add(p, 1, order=ep.RELAXED, scope=ep.DEVICE)


            def main(rank):
                kernel.launch(rank, grid=1024, block=1024, args=(rank.zeros(ep.u32, 1),))
                rank.synchronize()


            raise run(main, 1, Options()).failures[0][1]
        """),
    ),
)
