"""EP100 to EP199: targets, code generation, dumps and edited files, faults of the compiler."""

from __future__ import annotations

from .code import ErrorCode, program

_STORE = """
            import os
            import tempfile
            from pathlib import Path

            from epdsl.dump import write_stages


            @ep.kernel
            def kernel(flag: ep.Ptr[ep.u32]):
                ep.store(flag, 1, order=ep.RELEASE, scope=ep.SYSTEM)


            folder = write_stages(kernel, "sm_90", {}, "ep,source", Path(tempfile.mkdtemp()))
            os.environ["EPDSL_OVERRIDE_DIR"] = str(folder)
"""


def _nested(depth: int) -> str:
    """A kernel with a wait under as many conditions."""
    conditions = "".join(f"{' ' * (4 * number + 4)}if flags[{number}] == t:\n" for number in range(depth))
    wait = "ep.wait(flags, until=lambda v: v == 1, order=ep.ACQUIRE, scope=ep.SYSTEM, timeout_ns=10**9)"
    head = "@ep.kernel\ndef kernel(flags: ep.Ptr[ep.i32]):\n    t = ep.thread_idx.x\n"
    return f'{head}{conditions}{" " * (4 * depth + 4)}{wait}\n\n\nkernel.compile("sim:amd")'


TARGETS = (
    ErrorCode(
        "EP101",
        "the target has no such instruction",
        "An operation of the `ep` dialect with this order, scope and width is no instruction of the target. The language emits none of "
        "these: they come from an edited file of a dump, or from IR that was made by hand.",
        "Give the operation an order, a scope and a width that the target has; the message lists them.",
        program(
            _STORE
            + """
            edited = folder / "ep.mlir"
            edited.write_text(edited.read_text().replace('order = "release"', 'order = "acquire"'))
            kernel.compile("sm_90")
        """
        ),
    ),
    ErrorCode(
        "EP103",
        "the target has no bulk copy engine",
        "ep.bulk_copy and ep.MBarrier are instructions of sm_90 and later; on AMD they are lowered to ordinary copies.",
        "Compile for sm_90 or later, or put it under `if ep.target.has_bulk_copy` with ep.copy and ep.barrier in the else.",
        program("""
            @ep.kernel
            def kernel(out: ep.Ptr[ep.u32]):
                tile = ep.shared(ep.u32, 32)
                ep.bulk_copy(out, tile, 128)
                ep.bulk_commit()
                ep.bulk_wait()


            kernel.compile("sm_80")
        """),
    ),
    ErrorCode(
        "EP104",
        "there is no code for this mathematical function",
        "The code generator of the target has no implementation of the function, or none for f64. The language emits none of these: "
        "they come from an edited file of a dump, or from IR that was made by hand.",
        "Convert to f32, or write the function with operations that exist.",
        program("""
            import os
            import tempfile
            from pathlib import Path

            from epdsl.dump import write_stages


            @ep.kernel
            def kernel(out: ep.Ptr[ep.f64]):
                out[0] = ep.floor(out[1])


            folder = write_stages(kernel, "sm_90", {}, "ep", Path(tempfile.mkdtemp()))
            edited = folder / "ep.mlir"
            edited.write_text(edited.read_text().replace("math.floor", "math.log"))
            os.environ["EPDSL_OVERRIDE_DIR"] = str(folder)
            kernel.compile("sm_90")
        """),
    ),
    ErrorCode(
        "EP105",
        "no linker or assembler for AMD code objects",
        "HSACO is linked by ld.lld, and inline assembly assembled by clang; neither is in $ROCM_PATH, /opt/rocm, the package ziglang or "
        "PATH.",
        "pip install 'epdsl[amd]', or install ROCm.",
        program("""
            import importlib.util
            import os
            from unittest.mock import patch


            @ep.kernel
            def kernel(out: ep.Ptr[ep.i32]):
                out[0] = 1


            os.environ.update(ROCM_PATH="", PATH="")
            with patch.object(importlib.util, "find_spec", return_value=None), patch("os.access", return_value=False):
                kernel.compile("gfx942")
        """),
    ),
    ErrorCode(
        "EP106",
        "the code generator, the assembler or the linker refused the module",
        "Inline assembly that does not assemble or is not ASCII, or a call of a function that nothing defines.",
        "Correct the assembly: the message ends with what the tool said, and the reproducer runs the tool again.",
        program("""
            @ep.kernel
            def kernel():
                ep.inline_asm("// größer", "", vendor="nvidia")


            kernel.compile("sm_90")
        """),
    ),
    ErrorCode(
        "EP107",
        "too many nested conditions around a wait on the simulator",
        "On sim:amd the lanes of a wave go through branches together, and the simulator keeps a fixed number of them for a lane.",
        "Nest fewer conditions around the wait: join them with `and`, or move the wait out.",
        program(_nested(16)),
    ),
    ErrorCode(
        "EP108",
        "more groups of bulk copies than the checker follows",
        "The checker of memory orders keeps a fixed number of a thread's bulk groups in mind.",
        "Wait with a smaller number of pending groups in what is checked.",
        program("""
            @ep.kernel
            def kernel():
                ep.bulk_wait(54)


            kernel.compile("sim:nvidia:checked")
        """),
    ),
    ErrorCode(
        "EP110",
        "EPDSL_DUMP names a stage that does not exist",
        "The variable is a comma list of stages, or all.",
        "Use names of the list in the message.",
        program("""
            import os


            @ep.kernel
            def kernel(out: ep.Ptr[ep.i32]):
                out[0] = 1


            os.environ["EPDSL_DUMP"] = "ptx"
            kernel.compile("sm_90")
        """),
    ),
    ErrorCode(
        "EP111",
        "EPDSL_OVERRIDE_DIR, or a file in it, is no dump",
        "Edited files are recognised by the first line that the dump wrote, which says which stage of which kernel they are.",
        "Point the variable at a directory, and keep the first line of each file in it.",
        program("""
            import os


            @ep.kernel
            def kernel(out: ep.Ptr[ep.i32]):
                out[0] = 1


            os.environ["EPDSL_OVERRIDE_DIR"] = "nowhere"
            kernel.compile("sm_90")
        """),
    ),
    ErrorCode(
        "EP112",
        "an edited file is stale",
        "The kernel, its constants or the compiler have changed since the file was dumped, so the edit belongs to another program.",
        "Dump again and repeat the edit in the new file.",
        program(
            _STORE
            + """
            edited = folder / "ep.mlir"
            edited.write_text(edited.read_text() + "// an edit\\n")


            @ep.kernel
            def kernel(flag: ep.Ptr[ep.u32]):
                ep.store(flag, 2, order=ep.RELEASE, scope=ep.SYSTEM)


            kernel.compile("sm_90")
        """
        ),
    ),
    ErrorCode(
        "EP113",
        "an edited file that cannot be used",
        "Nothing is made of the stage (source, sass, resources), or two files are the same stage of one kernel.",
        "Edit an earlier stage; keep one file of each stage in the directory.",
        program(
            _STORE
            + """
            edited = folder / "source.py"
            edited.write_text(edited.read_text() + "# an edit\\n")
            kernel.compile("sm_90")
        """
        ),
    ),
    ErrorCode(
        "EP114",
        "what follows an edited file fails",
        "A file of EPDSL_OVERRIDE_DIR took the place of a stage, and it does not parse or the next pass refuses it.",
        "Correct the edit. The reproducer that the message names runs the failing stage again.",
        program(
            _STORE
            + """
            edited = folder / "ep.mlir"
            edited.write_text(edited.read_text().replace("gpu.return", "gpu.retrun"))
            kernel.compile("sm_90")
        """
        ),
    ),
    ErrorCode(
        "EP199",
        "a fault of the compiler",
        "A pass or the code generator failed on a kernel that the language accepted. This is a bug of epdsl.",
        "Report it with the directory that the message names: it holds the module before the pass, the pipeline, the versions and a "
        "command that fails the same way.",
        program("""
            from unittest.mock import patch

            from epdsl import codegen


            @ep.kernel
            def kernel(out: ep.Ptr[ep.i32]):
                out[0] = 1


            with patch.object(codegen, "optimise", side_effect=RuntimeError("a bug of the compiler")):
                kernel.compile("sm_90")
        """),
    ),
)
