"""Every environment variable of the project, in one table. Nothing else reads one of ours."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

T = TypeVar("T")
MOST_PORT = 65535


@dataclass(frozen=True)
class Variable(Generic[T]):
    """A variable, how its text is read, and its value when unset. What is `secret` is not shown."""

    name: str
    meaning: str
    parse: Callable[[str], T]
    default: T
    secret: bool = False

    def get(self, environment: Mapping[str, str] | None = None) -> T:
        """The value in force, by default in this process's environment. Raises ValueError naming the variable for a text that is none."""
        text = (os.environ if environment is None else environment).get(self.name)
        if text is None or text == "":
            return self.default
        try:
            return self.parse(text)
        except ValueError as error:
            raise ValueError(f"{self.name}={text!r}: {error}") from None


@dataclass(frozen=True)
class Row:
    """A variable as `epdsl env` prints it."""

    name: str
    value: Any
    default: Any
    meaning: str


def _switch(text: str) -> bool:
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("0", "false", "no", "off"):
        return False
    raise ValueError("1 or 0")


def _duration(text: str) -> int:
    value = _whole(text)
    if value < 1:
        raise ValueError("a positive number of nanoseconds")
    return value


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError("no whole number") from None


def _seed(text: str) -> int:
    value = _whole(text)
    if value < 0:
        raise ValueError("a seed of 0 or more")
    return value


def _port(text: str) -> int:
    value = _whole(text)
    if not 0 <= value <= MOST_PORT:
        raise ValueError(f"a port from 1 to {MOST_PORT}, or 0")
    return value


def _list(text: str) -> tuple[str, ...]:
    return tuple(word for part in text.split(",") if (word := part.strip()))


def _cache_home() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def _default_cache() -> str:
    return str(_cache_home() / "epdsl")


def _default_tables() -> str:
    return str(Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "epdsl" / "tuned")


def _default_dumps() -> str:
    return str(_cache_home() / "epdsl-dump")


DEVICE = Variable("EPDSL_DEVICE", 'what "auto" opens: sim, sim:amd, cuda, cuda:1, hip, ...', str, "auto")
SEED = Variable("EPDSL_SEED", "the simulator's schedule: one program and seed give one interleaving of all threads", _seed, 0)
ARCH = Variable("EPDSL_ARCH", "compile for this target instead of the device's own (sm_90, gfx942, ...)", str, "")
CACHE_DIR = Variable("EPDSL_CACHE_DIR", "where compiled code is kept between runs", str, _default_cache())
TIMEOUT_NS = Variable("EPDSL_TIMEOUT_NS", "how long a wait of the kernel family may take, in nanoseconds", _duration, 60 * 10**9)
PEER_MEMORY = Variable("EPDSL_PEER_MEMORY", "how ranks reach one another's memory: fabric, fd or ipc; auto: what works", str, "auto")
PORT = Variable("EPDSL_PORT", "port of the ranks' rendezvous; 0: MASTER_PORT + 1", _port, 0)
TOKEN = Variable("EPDSL_TOKEN", "what tells one job's ranks from another's; by default the job's id and the user", str, "", True)
TUNED_DIR = Variable("EPDSL_TUNED_DIR", "where `epdsl bench --tune` writes its tables and layers look for them", str, _default_tables())
DUMP = Variable("EPDSL_DUMP", "stages of every compilation to write to files: all, or some of ep, passes, asm, ...", _list, ())
DUMP_DIR = Variable("EPDSL_DUMP_DIR", "where they go, as DIR/KERNEL-HASH/RANK/, and what reproduces a failure", str, _default_dumps())
OVERRIDE_DIR = Variable("EPDSL_OVERRIDE_DIR", "edited files of EPDSL_DUMP, each to be used in place of its stage", str, "")
DEBUG = Variable("EPDSL_DEBUG", "1: tracebacks go on below your line, into epdsl itself", _switch, False)
VERIFY = Variable("EPDSL_VERIFY", "1: MLIR verifies each operation as it is built, and the module before it is lowered", _switch, False)

VARIABLES: tuple[Variable[Any], ...] = (
    DEVICE,
    SEED,
    ARCH,
    CACHE_DIR,
    TIMEOUT_NS,
    PEER_MEMORY,
    PORT,
    TOKEN,
    TUNED_DIR,
    DUMP,
    DUMP_DIR,
    OVERRIDE_DIR,
    DEBUG,
    VERIFY,
)


def describe() -> list[Row]:
    """Every variable with the value in force."""
    return [Row(v.name, "(set)" if v.secret and v.get() else v.get(), v.default, v.meaning) for v in VARIABLES]
