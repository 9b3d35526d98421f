"""A benchmark's cases in Python processes of their own, as where the project is installed: Python has compiled its modules before."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


@contextmanager
def kept_bytecode() -> Iterator[dict[str, str]]:
    """An environment whose processes share the bytecode of what they import. There is none at first: the first one compiles it.

    An installer compiles what it installs. A checkout, or a machine that is told to write no bytecode, would show Python's own compiler.
    """
    with tempfile.TemporaryDirectory() as folder:
        told = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        yield {**told, "PYTHONPYCACHEPREFIX": folder}


def shown(environment: dict[str, str], script: str, arguments: Sequence[str], runs: int = 1) -> list[Any]:
    """What a script printed, as JSON, in each of some processes that share a cache of compiled kernels, which is empty at first."""
    with tempfile.TemporaryDirectory() as empty:
        command = [sys.executable, script, *arguments]
        cold = {**environment, "EPDSL_CACHE_DIR": empty}
        texts = [subprocess.run(command, capture_output=True, text=True, check=True, env=cold).stdout for _ in range(runs)]
    return [json.loads(text) for text in texts]
