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
        engine = _engines.get(object_file)
        if engine is None:
            llvm.initialize_native_target()
            llvm.initialize_native_asmprinter()
            machine = llvm.Target.from_triple(llvm.get_process_triple()).create_target_machine()
            empty = llvm.parse_assembly("")
            engine = _engines[object_file] = llvm.create_mcjit_compiler(empty, machine)
            engine.add_object_file(llvm.ObjectFileRef.from_data(object_file))
            engine.finalize_object()
    found = engine.get_function_address(symbol)
    if not found:
        raise ValueError(f"the object file has no function {symbol}")
    return found


Scheduler = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)
