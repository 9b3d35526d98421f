"""Compiled code kept between runs, keyed by everything that determines it.

An entry is a file that is published whole or not at all, and carries a checksum of itself: what is damaged is reported and made again.
Processes that want the same entry at the same time make it once.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import logging
import os
import shutil
import struct
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from epdsl.env import CACHE_DIR

log = logging.getLogger("epdsl")

_MAGIC = b"epdsl-cache-2\n"
_LENGTH = struct.Struct("<I")
_SUFFIX = ".entry"
LOCK_SECONDS = 120.0
"""How long a process waits for another one that makes the same entry; then it makes its own."""
_TELL_SECONDS = 10.0


@dataclass(frozen=True)
class Entry:
    """A file of the cache.

    what     what it holds, in words; empty for a damaged one
    nbytes   size of the file
    written  seconds since the epoch
    """

    key: str
    what: str
    nbytes: int
    written: float
    path: Path


def directory() -> Path:
    return Path(CACHE_DIR.get()) / "entries"


def key_of(*parts: str | bytes) -> str:
    """A name for what `parts` determine."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def cached(key: str, what: str, make: Callable[[], bytes]) -> bytes:
    """The bytes kept under `key`, made now when there are none or they are damaged. A directory that cannot be written is no error.

    what  names the entry in lists and messages
    """
    found = read(key)
    if found is not None:
        return found
    with locked(key):
        found = read(key)
        if found is None:
            found = make()
            write(key, what, found)
        return found


def _path(key: str) -> Path:
    return directory() / key[:2] / (key + _SUFFIX)


def read(key: str) -> bytes | None:
    """The bytes kept under `key`. None where there are none, or damaged ones, which are reported and removed."""
    path = _path(key)
    try:
        data = path.read_bytes()
    except OSError:
        return None
    opened = _open(data)
    if opened is None:
        log.warning("cache entry %s is damaged (%d bytes); it is made again", path, len(data))
        path.unlink(missing_ok=True)
        return None
    return opened[1]


def _open(data: bytes) -> tuple[str, bytes] | None:
    """What an entry holds, in words, and its bytes. None when it is not what was written."""
    start = len(_MAGIC) + _LENGTH.size
    if not data.startswith(_MAGIC) or len(data) < start + _LENGTH.size or _sealed(data[start:]) != data[:start]:
        return None
    (size,) = _LENGTH.unpack_from(data, start)
    start += _LENGTH.size
    return data[start : start + size].decode(), data[start + size :]


def _sealed(body: bytes) -> bytes:
    """What stands before a body: a checksum, which finds damage and is no protection against malice."""
    return _MAGIC + _LENGTH.pack(zlib.crc32(body))


def write(key: str, what: str, body: bytes) -> None:
    """Publishes atomically: a reader sees the whole entry or none."""
    path, label = _path(key), what.encode()
    data = _LENGTH.pack(len(label)) + label + body
    name = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(_sealed(data) + data)
        os.replace(name, path)
    except OSError as error:
        if name:
            with suppress(OSError):
                os.unlink(name)
        _tell_of_no_room(str(directory()), error.strerror)


@functools.cache
def _tell_of_no_room(where: str, why: str) -> None:
    """Once a process: without the cache every run compiles again."""
    log.warning("compiled code is not kept between runs: %s cannot be written (%s); EPDSL_CACHE_DIR names another directory", where, why)


@contextmanager
def locked(key: str) -> Iterator[None]:
    """Holds the lock of an entry, which its file system keeps and the end of the process frees. Goes on without after LOCK_SECONDS."""
    path = _path(key).with_suffix(".lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("ab")
    except OSError:
        yield
        return
    with file:
        start = time.monotonic()
        pause, told = 0.001, False
        while not _try_lock(file.fileno()):
            waited = time.monotonic() - start
            if waited > LOCK_SECONDS:
                log.warning("%s has been locked for %g s; going on without it", path, LOCK_SECONDS)
                break
            if waited > _TELL_SECONDS and not told:
                told = True
                log.warning("another process compiles the same and holds %s; waiting for it, %g s at most", path, LOCK_SECONDS)
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        yield


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        # A file system without locks: two processes may make the same entry, and the later one stays.
        return True
    return True


def pack(parts: Mapping[str, bytes]) -> bytes:
    """Named bytes in one piece."""
    head = json.dumps({name: len(data) for name, data in parts.items()}).encode()
    return b"".join((_LENGTH.pack(len(head)), head, *parts.values()))


def unpack(body: bytes) -> dict[str, bytes]:
    """What `pack` was given."""
    (size,) = _LENGTH.unpack_from(body)
    position = _LENGTH.size + size
    found: dict[str, bytes] = {}
    for name, length in json.loads(body[_LENGTH.size : position]).items():
        found[name] = body[position : position + length]
        position += length
    return found


def entries() -> list[Entry]:
    """Every entry, the latest first."""
    found: list[Entry] = []
    for path in directory().glob("??/*" + _SUFFIX):
        try:
            data, status = path.read_bytes(), path.stat()
        except OSError:
            continue
        opened = _open(data)
        found.append(Entry(path.stem, opened[0] if opened else "", status.st_size, status.st_mtime, path))
    return sorted(found, key=lambda entry: -entry.written)


def clear() -> tuple[int, int]:
    """Removes every entry. Returns how many there were and their bytes."""
    found = entries()
    shutil.rmtree(directory(), ignore_errors=True)
    return len(found), sum(entry.nbytes for entry in found)
