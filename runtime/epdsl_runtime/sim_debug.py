"""`breakpoint()` in a simulated kernel: opens the debugger at a thread's line, with its variables, while everything else stands still.

The compiler says in a site's `scope` which variables there are and how they are put together (`epdsl.lang.stops`). Where Python's hook is
its own, the prompt is pdb's, and `next`, `step`, `until`, `return` and `break` follow the simulated thread; another hook
(`sys.breakpointhook`, PYTHONBREAKPOINT) is called from a frame that stands at the kernel's line.
"""

from __future__ import annotations

import bdb
import ctypes
import functools
import json
import os
import pdb
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import CodeType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from . import sim_layout as layout
from .dtypes import NBYTES, numpy_dtype

if TYPE_CHECKING:
    from .sim_engine import Engine, Launch

KINDS = ("breakpoint", "line")
_Hook = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_void_p, ctypes.c_uint64)
_CALLED = "__called__"
_OWN_HOOK = ("", "pdb.set_trace")


class Pointer:
    """A pointer of a kernel: `int(p)` is its address, `p[i]` an element as it is in memory now, `p[a:b]` some of them.

    element  name of what it points to
    nbytes   size of an element
    """

    def __init__(self, address: int, element: str, nbytes: int, where: Callable[[int], tuple[str, int] | None]) -> None:
        self.address, self.element, self.nbytes = address, element, nbytes
        self._where = where

    def __int__(self) -> int:
        return self.address

    __index__ = __int__

    def __repr__(self) -> str:
        found = self._where(self.address)
        return f"<Ptr[{self.element}] {self.address:#x}{f' {found[0]}' if found else ''}>"

    def __getitem__(self, index: int | slice) -> Any:
        """Raises IndexError outside of the memory the pointer leads to, TypeError for elements that are no scalars."""
        if isinstance(index, slice):
            if index.stop is None:
                raise IndexError("a pointer knows no end; write p[a:b]")
            return np.array([self[i] for i in range(index.start or 0, index.stop, index.step or 1)])
        address = self.address + int(index) * self.nbytes
        if self.element not in NBYTES:
            raise TypeError(f"an element of Ptr[{self.element}] is no scalar; its address is {address:#x}")
        found = self._where(address)
        if found is None or found[1] < self.nbytes:
            raise IndexError(f"element {index} at {address:#x} is outside of the simulator's memory")
        return _read(address, self.element)


class Peers:
    """A table of pointers, one a rank: `p[rank]`, `p.size`."""

    def __init__(self, table: Pointer, size: int, element: str, nbytes: int) -> None:
        self.table, self.size, self._element, self._nbytes = table, size, element, nbytes

    def __getitem__(self, rank: int) -> Pointer:
        if not 0 <= int(rank) < self.size:
            raise IndexError(f"rank {rank} of {self.size}")
        return Pointer(int(self.table[int(rank)]), self._element, self._nbytes, self.table._where)

    def __repr__(self) -> str:
        return f"<Peers[{self._element}] of {self.size} ranks>"


@functools.cache
def _named(name: str) -> type[SimpleNamespace]:
    """A type whose objects show as NAME(field=value, ...)."""

    def shown(self: SimpleNamespace) -> str:
        return f"{name}({', '.join(f'{field}={value!r}' for field, value in vars(self).items())})"

    return type(name, (SimpleNamespace,), {"__repr__": shown})


def _read(address: int, dtype: str, count: int = 0) -> Any:
    """A value of memory; `count` of them as an array."""
    kind = numpy_dtype(dtype)
    held = (ctypes.c_uint8 * (kind.itemsize * max(1, count))).from_address(address)
    found = np.frombuffer(bytes(held), kind)
    return found if count else found[0]


@functools.lru_cache(maxsize=4096)
def _scope(text: str) -> dict[str, Any]:
    return json.loads(text)


@dataclass(frozen=True)
class Stop:
    """A thread at a place: its launch, its words, and the frames (file, line, function, variables), the kernel's own first."""

    launch: Launch
    words: NDArray[np.uint64]
    address: int
    kind: str
    frames: tuple[dict[str, Any], ...]

    @property
    def number(self) -> int:
        return int(self.words[layout.T_WARP]) * self.launch.artifact.warp_size + int(self.words[layout.T_LANE])

    @property
    def block(self) -> NDArray[np.uint64]:
        return _words(int(self.words[layout.T_BLOCK]), layout.BLOCK_WORDS)

    @property
    def block_number(self) -> int:
        x, y, z = (int(w) for w in self.block[layout.B_X : layout.B_Z + 1])
        return x + self.launch.grid[0] * (y + self.launch.grid[1] * z)

    @property
    def identity(self) -> dict[str, int]:
        """What the debugger knows beside the variables."""
        rank = self.launch.device.info.index
        lane, warp = int(self.words[layout.T_LANE]), int(self.words[layout.T_WARP])
        return {"rank": rank, "block": self.block_number, "thread": self.number, "warp": warp, "lane": lane}

    def describe(self, seed: int) -> str:
        i = self.identity
        return (
            f"{self.launch.artifact.name} on {self.launch.artifact.target}: rank {i['rank']}, block {i['block']}, thread {i['thread']} "
            f"(warp {i['warp']}, lane {i['lane']}); seed {seed}"
        )


def _words(address: int, count: int) -> NDArray[np.uint64]:
    return np.ctypeslib.as_array((ctypes.c_uint64 * count).from_address(address))


class Debugger:
    """Stops the threads of an engine's launches.

    failure  what ended the kernels from a prompt: bdb.BdbQuit after `quit`
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._prompt: Prompt | None = None
        self._room = np.zeros(0, np.uint8)
        self._hook = _Hook(self._arrived)
        self.failure: BaseException | None = None
        engine.words[layout.E_HOOK] = ctypes.cast(self._hook, ctypes.c_void_p).value or 0

    def prepare(self, launch: Launch) -> None:
        """Makes room for the variables of a launch's stops."""
        most = max(_scope(site.scope)["slots"] for site in launch.artifact.sites if site.kind in KINDS)
        if most * layout.SLOT_BYTES >= self._room.nbytes:
            self._room = np.zeros((most + 1) * layout.SLOT_BYTES, np.uint8)
            self._engine.words[layout.E_SHOWN] = self._room.ctypes.data

    def _arrived(self, thread: int, site: int) -> int:
        """A thread is at a stop. 1: it is to end, and everything else too."""
        try:
            self._stop(thread, site)
        except BaseException as error:
            self.failure = error.with_traceback(None) if isinstance(error, bdb.BdbQuit) else error
            return 1
        return 0

    def _stop(self, thread: int, site: int) -> None:
        words = _words(thread, layout.THREAD_WORDS)
        launch = self._launch(int(words[layout.T_LAUNCH]))
        place = launch.artifact.sites[site]
        frames = _scope(place.scope)["frames"]
        if place.kind == "line" and not (self._prompt and self._prompt.may_stop(thread, [(f["file"], f["line"]) for f in frames])):
            return
        stop = Stop(launch, words, thread, place.kind, tuple({**f, "variables": dict(self._variables(f, words, launch))} for f in frames))
        own = sys.breakpointhook is sys.__breakpointhook__ and os.environ.get("PYTHONBREAKPOINT", "") in _OWN_HOOK
        if not own:
            _run(stop, breakpoint)
            return
        self._prompt = self._prompt or Prompt()
        _run(stop, functools.partial(self._prompt.open, stop, self._engine.seed))
        self._engine.words[layout.E_STEPPED] = self._prompt.stepped

    def _launch(self, address: int) -> Launch:
        for device in self._engine.devices:
            for stream in device.streams:
                head: Any = stream.queue[0] if stream.queue else None
                if hasattr(head, "words") and head.words.ctypes.data == address:
                    return head
        raise LookupError(f"no launch is at {address:#x}")

    # ---- variables

    def _variables(self, frame: dict[str, Any], words: NDArray[np.uint64], launch: Launch) -> Iterator[tuple[str, Any]]:
        block = _words(int(words[layout.T_BLOCK]), layout.BLOCK_WORDS)
        shared = (int(block[layout.B_SHARED]), launch.shared_bytes)

        def where(address: int) -> tuple[str, int] | None:
            """What an address lies in, and how many bytes of it follow."""
            if shared[0] <= address < shared[0] + shared[1]:
                return f"(byte {address - shared[0]} of the block's shared memory)", shared[0] + shared[1] - address
            for device in self._engine.devices:
                found = device.memory.find(address)
                if found is not None:
                    return self._engine.owner(address).strip(), found[0] + found[1] - address
            return None

        for name, shape in frame["variables"].items():
            yield name, self._value(shape, where)

    def _value(self, shape: Sequence[Any], where: Any) -> Any:
        def at(slot: int) -> int:
            return self._room.ctypes.data + slot * layout.SLOT_BYTES

        def pointer(element: str, slot: int, nbytes: int) -> Pointer:
            return Pointer(int(_read(at(slot), "u64")), element, nbytes, where)

        match shape:
            case ["constant", value]:
                return value
            case ["scalar", dtype, slot]:
                return _read(at(slot), dtype)
            case ["vec", dtype, slot, n]:
                return _read(at(slot), dtype, n)
            case ["ptr", element, slot, nbytes]:
                return pointer(element, slot, nbytes)
            case ["peers", element, slot, nbytes, size]:
                return Peers(pointer("u64", slot, 8), int(_read(at(size), "i32")), element, nbytes)
            case ["struct", name, fields]:
                return _named(name)(**{field: self._value(each, where) for field, each in fields.items()})
            case ["list", shapes]:
                return [self._value(each, where) for each in shapes]
            case _:
                raise ValueError(f"a variable of shape {shape}")


# ---- frames that stand for a thread's


@functools.lru_cache(maxsize=1024)
def _code(file: str, line: int, function: str) -> CodeType:
    """Code that calls what _CALLED names, from a line of a file."""
    # A code's table of lines counts from its first one.
    found = compile(f"{_CALLED}()", file, "exec", dont_inherit=True)
    return found.replace(co_name=function.rpartition(".")[2], co_qualname=function, co_firstlineno=line)


def _run(stop: Stop, called: Any) -> None:
    """Calls `called` from a frame at the thread's line, inside frames at the lines that led there. No other frames are between them."""
    inner = called
    for frame in reversed(stop.frames):
        names = {**_module_of(frame["file"]), **stop.identity, _CALLED: inner}
        inner = functools.partial(exec, _code(frame["file"], frame["line"], frame["function"]), names, frame["variables"])
    inner()


def _module_of(file: str) -> dict[str, Any]:
    """The names of the module that a file is."""
    found = next((m for m in list(sys.modules.values()) if getattr(m, "__file__", None) == file), None)
    return dict(vars(found)) if found is not None else {"__builtins__": __builtins__, "__name__": "kernel"}


class Prompt(pdb.Pdb):
    """pdb over the frames of simulated threads. What ends a prompt says when the next one opens.

    stepped  the thread to be told of at every line, EVERY_THREAD where there are breakpoints, or 0
    """

    def __init__(self) -> None:
        super().__init__(nosigint=True)
        self.stepped = 0
        self._shown = 0
        self._here: list[tuple[str, int]] = []
        self._wish = "continue"
        self._until = 0
        self._thread = 0

    def open(self, stop: Stop, seed: int) -> None:
        """Reads commands until one lets the thread go on. Raises bdb.BdbQuit for `quit`."""
        frame: Any = sys._getframe(1)
        lines = [(f["file"], f["line"]) for f in stop.frames]
        if stop.kind == "line" and not self._stepped_to(stop.address, lines) and not self.break_here(frame):
            return
        self._here, self._thread, self._wish = lines, stop.address, "continue"
        self.reset()
        outermost = frame
        for _ in lines[1:]:
            outermost = outermost.f_back
        self.botframe = outermost
        if stop.kind == "breakpoint" or self._shown != stop.address:
            self.message(stop.describe(seed))
        self._shown = stop.address
        self.interaction(frame, None)
        if self._wish == "quit":
            raise bdb.BdbQuit
        self.stepped = layout.EVERY_THREAD if self.get_all_breaks() else 0 if self._wish == "continue" else stop.address

    def may_stop(self, thread: int, lines: list[tuple[str, int]]) -> bool:
        """Whether a prompt may open where a thread has come to: `lines` of its frames as (file, line), the kernel's own first."""
        return self._stepped_to(thread, lines) or lines[-1][1] in self.get_file_breaks(lines[-1][0])

    def _stepped_to(self, thread: int, lines: list[tuple[str, int]]) -> bool:
        if thread != self._thread:
            return False
        depth, before = len(lines), len(self._here)
        match self._wish:
            case "step":
                return True
            case "next":
                return depth <= before
            case "return":
                return depth < before
            case "until":
                return depth < before or (depth == before and lines[-1][1] > self._until)
            case _:
                return False

    def _go(self, wish: str) -> bool:
        self._wish = wish
        return True

    def do_continue(self, arg: str) -> bool:
        """c(ont(inue)): lets the thread run to the next breakpoint() of any thread."""
        return self._go("continue")

    def do_step(self, arg: str) -> bool:
        """s(tep): to this thread's next line, also inside the functions it calls."""
        return self._go("step")

    def do_next(self, arg: str) -> bool:
        """n(ext): to this thread's next line in this function or the one that called it."""
        return self._go("next")

    def do_return(self, arg: str) -> bool:
        """r(eturn): to this thread's next line in the function that called this one."""
        return self._go("return")

    def do_until(self, arg: str) -> bool:
        """unt(il) [line]: to this thread's next line below this one (or the given one), past the turns of a loop."""
        self._until = int(arg) - 1 if arg.strip().isdigit() else self._here[-1][1]
        return self._go("until")

    def do_quit(self, arg: str) -> bool:
        """q(uit): ends the kernels in flight; the host program gets bdb.BdbQuit."""
        return self._go("quit")

    def do_EOF(self, arg: str) -> bool:
        """End of the input: as quit."""
        self.message("")
        return self._go("quit")

    def _cannot(self, arg: str) -> None:
        """Not for a simulated thread."""
        self.error("a simulated thread cannot do this; it can continue, next, step, until, return, quit")

    do_c = do_cont = do_continue
    do_s = do_step
    do_n = do_next
    do_r = do_return
    do_unt = do_until
    do_q = do_exit = do_quit
    do_j = do_jump = do_run = do_restart = do_debug = _cannot
