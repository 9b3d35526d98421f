"""Loading the simulator's machine code: one object file per kernel, and the scheduler beside it."""

from __future__ import annotations

import ctypes
import struct
import threading
from typing import Any

_engines: dict[bytes, Any] = {}
_lock = threading.Lock()
_HEADER = struct.Struct("<4sQ")
_MAGIC = b"epsm"
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
    """An artifact's binary: the kernel's object and the scheduler it is to run under."""
    return _HEADER.pack(_MAGIC, len(kernel)) + kernel + scheduler


def unpack(binary: bytes) -> tuple[bytes, bytes]:
    """The two objects of `pack`. Raises ValueError for anything else."""
    if len(binary) < _HEADER.size or binary[:4] != _MAGIC:
        raise ValueError("the binary is not a simulator artifact of this version; build it again")
    _, size = _HEADER.unpack_from(binary)
    body = binary[_HEADER.size :]
    return body[:size], body[size:]


def address_of(object_file: bytes, symbol: str) -> int:
    """Loads an object file once and returns the address of a function in it."""
    import llvmlite.binding as llvm

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
    import llvmlite.binding as llvm

    machine = llvm.Target.from_triple(llvm.get_process_triple()).create_target_machine()
    return llvm.create_mcjit_compiler(llvm.parse_assembly(text), machine)


Scheduler = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)
