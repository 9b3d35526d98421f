"""Builds driver.c as the library of a kind, "cuda" or "hip"."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
LIBRARIES = {"cuda": "libcuda.so.1", "hip": "libamdhip64.so"}


class NoCompiler(RuntimeError):
    """This machine has no C compiler."""


def compiler() -> list[str]:
    for name in ("cc", "gcc", "clang"):
        if shutil.which(name):
            return [name]
    if importlib.util.find_spec("ziglang") is not None:
        return [sys.executable, "-m", "ziglang", "cc"]
    raise NoCompiler("no C compiler to build the stand-in with: install cc, or the package ziglang")


def build(kind: str, folder: Path, old: bool = False) -> Path:
    """Puts the library into a folder, which is returned; `old` is one without what came late. Raises NoCompiler."""
    name = LIBRARIES[kind]
    options = ["-shared", "-fPIC", "-w", f"-D{kind.upper()}", *["-DOLD"] * old, f"-Wl,-soname,{name}", "-lpthread", "-ldl"]
    subprocess.run([*compiler(), str(HERE / "driver.c"), "-o", str(folder / name), *options], check=True, timeout=120)
    return folder
