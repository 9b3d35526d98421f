"""Compiled code kept between runs, keyed by everything that determines it."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from epdsl.env import CACHE_DIR

_MAGIC = b"epdsl-cache-1\n"


def key_of(*parts: str | bytes) -> str:
    """A name for what `parts` determine."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def cached(key: str, make: Callable[[], bytes]) -> bytes:
    """The bytes kept under `key`, made now when there are none or they are damaged. A directory that cannot be written is no error."""
    path = Path(CACHE_DIR.get()) / key[:2] / key
    found = _read(path)
    if found is None:
        found = make()
        _write(path, found)
    return found


def _read(path: Path) -> bytes | None:
    try:
        data = path.read_bytes()
    except OSError:
        return None
    head, digest, body = data[: len(_MAGIC)], data[len(_MAGIC) : len(_MAGIC) + 32], data[len(_MAGIC) + 32 :]
    return body if head == _MAGIC and hashlib.sha256(body).digest() == digest else None


def _write(path: Path, body: bytes) -> None:
    """Publishes atomically: a reader sees the whole entry or none."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(_MAGIC + hashlib.sha256(body).digest() + body)
        os.replace(name, path)
    except OSError:
        return
