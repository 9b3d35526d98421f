"""Loading the simulator's machine code: one object file per kernel, and the scheduler beside it."""

from __future__ import annotations

import ctypes
import functools
import platform
import struct
import threading
from typing import Any

_engines: dict[bytes, Any] = {}
_lock = threading.Lock()
_HEADER = struct.Struct("<4sQQ")
_MAGIC = b"epsn"
# What code generators call where a processor has no bf16, and compilers' run-time libraries have only lately: f32 to bf16, rounded to
# nearest even. The result is in the lower half of a float, where a bf16 is returned.
_SUPPORT = """
define float @__truncsfbf2(float %x) {
  %bits = bitcast float %x to i32
  %above = lshr i32 %bits, 16
  %odd = and i32 %above, 1
  %half = add i32 %odd, 32767
  %sum = add i32 %bits, %half
  %rounded = lshr i32 %sum, 16
  %quiet = or i32 %above, 64
  %nan = fcmp uno float %x, %x
  %found = select i1 %nan, i32 %quiet, i32 %rounded
  %result = bitcast i32 %found to float
  ret float %result
}
"""


def pack(kernel: bytes, scheduler: bytes) -> bytes:
    """An artifact's binary: the kernel's object and the scheduler it is to run under, and what this machine, for which they are, can do."""
    return _HEADER.pack(_MAGIC, len(kernel), len(scheduler)) + kernel + scheduler + "\n".join(sorted(_host())).encode()


def unpack(binary: bytes) -> tuple[bytes, bytes]:
    """The two objects of `pack`. Raises ValueError for anything else."""
    kernel, scheduler, _ = _parts(binary)
    return kernel, scheduler


def check(binary: bytes) -> None:
    """Raises ValueError for what `pack` has not made, or has made on a machine with what this one lacks; ImportError without llvmlite."""
    needs = set(_parts(binary)[2].decode().split("\n"))
    lacking = sorted(needs - _host())
    if lacking:
        shown = ", ".join(lacking[:8])
        raise ValueError(
            f"it is code for a processor with {len(needs)} features, of which this one ({platform.machine()}) lacks {len(lacking)} "
            f"({shown}); build it on this machine"
        )


def _parts(binary: bytes) -> tuple[bytes, bytes, bytes]:
    if len(binary) < _HEADER.size or binary[:4] != _MAGIC:
        raise ValueError("its binary is no simulator code of this version; build it again")
    _, kernel, scheduler = _HEADER.unpack_from(binary)
    body = binary[_HEADER.size :]
    return body[:kernel], body[kernel : kernel + scheduler], body[kernel + scheduler :]


@functools.cache
def _host() -> frozenset[str]:
    """The architecture of this machine and what its processor can do, by LLVM's names."""
    return frozenset((platform.machine(), *(name for name, here in _llvm().get_host_cpu_features().items() if here)))


def _llvm() -> Any:
    try:
        import llvmlite.binding as llvm
    except ImportError as error:
        raise ImportError(
            f"the simulator loads its code with llvmlite, which is not installed here ({error}); pip install llvmlite"
        ) from error
    return llvm


def address_of(object_file: bytes, symbol: str) -> int:
    """Loads an object file once and returns the address of a function in it."""
    llvm = _llvm()
    with _lock:
        if not _engines:
            llvm.initialize_native_target()
            llvm.initialize_native_asmprinter()
            support = _engines[b""] = _compiler(_SUPPORT)
            support.finalize_object()
            llvm.add_symbol("__truncsfbf2", support.get_function_address("__truncsfbf2"))
        engine = _engines.get(object_file)
        if engine is None:
            engine = _engines[object_file] = _compiler("")
            engine.add_object_file(llvm.ObjectFileRef.from_data(object_file))
            engine.finalize_object()
    found = engine.get_function_address(symbol)
    if not found:
        raise ValueError(f"the object file has no function {symbol}")
    return found


def _compiler(text: str) -> Any:
    """A compiler for this process, of LLVM IR."""
    llvm = _llvm()
    machine = llvm.Target.from_triple(llvm.get_process_triple()).create_target_machine()
    return llvm.create_mcjit_compiler(llvm.parse_assembly(text), machine)


Scheduler = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)
