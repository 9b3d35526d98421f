"""The state of building one kernel, and what every part of the front end may ask of it."""

from __future__ import annotations

import ast
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from epdsl_runtime.artifact import Site

from epdsl.targets import Target

from .errors import CompileError, Place
from .source import Source
from .values import PeersValue, StructValue, Value

if TYPE_CHECKING:
    from epdsl.ir.builder import Builder
    from epdsl.ir.types import Type


@dataclass(frozen=True, eq=False, slots=True)
class Binding:
    """A variable's value and the node that bound it."""

    value: Any
    node: ast.AST | None


Env = dict[str, Binding]


@dataclass(eq=False, slots=True)
class Edge:
    """Control that leaves `block` (still open) for a place to be decided, with the variables it carries."""

    block: Any
    env: Env
    node: ast.AST | None
    value: Any = None


@dataclass(eq=False, slots=True)
class Loop:
    """A loop being interpreted. `exposed`: names its body may read before it has bound them; None where the body is repeated."""

    exposed: frozenset[str] | None
    continues: list[Edge] = field(default_factory=list[Edge])
    breaks: list[Edge] = field(default_factory=list[Edge])


@dataclass(eq=False)
class Frame:
    """One function being interpreted.

    lookup     finds names the function does not bind itself
    locals     names it does
    call_node  where it was called, in `parent`
    code       what tells it from other functions
    result     the type it declares to return, if any
    copied     name of the parameter that holds a copy of the struct whose method it is
    returns    what its return statements gave
    """

    source: Source
    lookup: Callable[[str], Any]
    env: Env
    locals: frozenset[str]
    parent: Frame | None
    call_node: ast.AST | None
    code: Any
    result: Type | None = None
    copied: str | None = None
    loops: list[Loop] = field(default_factory=list[Loop])
    returns: list[Edge] = field(default_factory=list[Edge])


Origin = tuple[Frame, ast.AST | None]
SHARED_PLACE_ALIGN = 128
"""Bytes: where the placed part of shared memory begins."""


class Tracer(ABC):
    """Builds one kernel. Subclassed by the interpreter, which knows the syntax."""

    def __init__(self, builder: Builder, target: Target, context: Value, block_threads: int | None) -> None:
        self.b = builder
        self.target = target
        self.context = context
        self.block_threads = block_threads
        self.frame: Frame = None  # pyright: ignore[reportAttributeAccessIssue]
        self.node: ast.AST | None = None
        self.shared_bytes = 0
        self._placed: list[tuple[Any, int, int]] = []
        self.param_align: dict[str, int] = {}
        self.fault_exits: list[Any] = []
        self.looks_at_memory = 0
        self.site_tag = 0
        # How many breakpoint() there were; whether every line is a place to stop at.
        self.breakpoints = 0
        self.stops_at_lines = False
        self._sites: dict[Site, int] = {}
        self._callers: dict[Frame, list[Any]] = {}
        # What was read: functions, and names in annotations inside them.
        self.sources: dict[Source, None] = {}
        self.annotated: set[str] = set()
        self._located: tuple[Any, Any, Any] = (None, None, None)
        builder.locate = self._location
        builder.origin = lambda: (self.frame, self.node)

    # ---- places

    def places(self) -> tuple[Place, ...]:
        """From the kernel's own line to the current one, through the calls in between."""
        return self.places_of((self.frame, self.node))

    def places_of(self, origin: Origin) -> tuple[Place, ...]:
        """The same of an earlier place."""
        frame: Frame | None
        frame, node = origin
        found: list[Place] = []
        while frame is not None:
            found.append(frame.source.place(node or frame.source.node))
            node, frame = frame.call_node, frame.parent
        return tuple(reversed(found))

    def place(self, node: ast.AST | None = None) -> Place:
        return self.frame.source.place(node or self.node or self.frame.source.node)

    def at(self, node: ast.AST) -> None:
        """Makes `node` the place of the next operations and errors."""
        self.node = node

    def _location(self) -> Any:
        """The MLIR location of the current place."""
        frame, node = self.frame, self.node
        if frame is self._located[0] and node is self._located[1]:
            return self._located[2]
        callers = self._callers.get(frame)
        if callers is None:
            callers = []
            at, outer = frame.call_node, frame.parent
            while outer is not None and at is not None:
                callers.append(self._point(outer, at))
                at, outer = outer.call_node, outer.parent
            self._callers[frame] = callers
        found = self.b.call_location(self._point(frame, node or frame.source.node), callers)
        self._located = (frame, node, found)
        return found

    def _point(self, frame: Frame, node: Any) -> Any:
        return self.b.file_location(frame.source.file, node.lineno, node.col_offset + 1)

    def at_argument(self, parameters: Sequence[str], name: str) -> None:
        """Makes the argument for a parameter of the current call the place of an error, where it is written in the call."""
        call = self.node
        if not isinstance(call, ast.Call):
            return
        for keyword in call.keywords:
            if keyword.arg == name:
                self.at(keyword.value)
                return
        position = list(parameters).index(name) if name in parameters else len(call.args)
        if position < len(call.args) and not any(isinstance(a, ast.Starred) for a in call.args[: position + 1]):
            self.at(call.args[position])

    def named(self, name: str, value: Any) -> None:
        """Notes that a variable holds a value, for the names of values in printed IR."""
        match value:
            case Value():
                self.b.names.append((value.ir, name))
            case StructValue(fields=fields):
                for field_name, each in fields.items():
                    self.named(f"{name}.{field_name}", each)
            case PeersValue(table=table, size=size):
                self.named(f"{name}.table", table)
                self.named(f"{name}.size", size)
            case _:
                pass

    def forget(self, frame: Frame) -> None:
        self._callers.pop(frame, None)

    # ---- reports

    @property
    def sites(self) -> tuple[Site, ...]:
        """The artifact's table of places."""
        return tuple(self._sites)

    def site(self, kind: str, text: str, operand_dtypes: Sequence[str] = (), scope: str = "") -> int:
        """A number by which a run-time report names the current place."""
        place = self.place()
        made = Site(kind, place.file, place.line, place.column + 1, place.function, text, tuple(operand_dtypes), scope)
        return self._sites.setdefault(made, len(self._sites))

    def error(self, code: str, message: str, fix: str = "", also: tuple[tuple[str, Place], ...] = ()) -> CompileError:
        return CompileError(code, message, fix, also).at(self.places())

    # ---- what the interpreter provides

    @abstractmethod
    def evaluate(self, node: ast.expr) -> Any: ...

    @abstractmethod
    def execute(self, statements: Sequence[ast.stmt]) -> None: ...

    @abstractmethod
    def call(self, function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Calls an @ep.func, a closure, an intrinsic or a compile-time Python callable."""
        ...

    @abstractmethod
    def write_fault(self, kind: int, site: int, address: Any, expected: Any, last: Any) -> None:
        """Emits the writing of a fault record."""
        ...

    @abstractmethod
    def write_wait(self, site: int, address: Any, expected: Any, last: Any, since: Any, now: Any) -> None:
        """Emits the writing of a record of a wait that goes on."""
        ...

    @abstractmethod
    def write_log(self, site: int, values: tuple[Any, ...]) -> None:
        """Emits the writing of a log record."""
        ...

    def take_shared(self, nbytes: int, align: int) -> int:
        """Reserves static shared memory; returns its offset."""
        offset = -(-self.shared_bytes // align) * align
        self.shared_bytes = offset + nbytes
        return offset

    def place_shared(self, operation: Any, at: int, nbytes: int) -> None:
        """Remembers that `operation` is the address of `nbytes` bytes at byte `at` of the placed part of shared memory.

        Raises CompileError where they are some of another's bytes and not just the same.
        """
        for _, start, size in self._placed:
            if (start, size) != (at, nbytes) and start < at + nbytes and at < start + size:
                raise self.error(
                    "EP050",
                    f"shared memory placed at bytes {at} to {at + nbytes} overlaps bytes {start} to {start + size}, placed before",
                    f"at={-(-(start + size) // 16) * 16}, or the very same bytes to share them",
                )
        self._placed.append((operation, at, nbytes))

    def settle_shared(self) -> None:
        """Lays the placed part behind everything `take_shared` gave. Called once, when nothing more is taken."""
        if self._placed:
            base = -(-self.shared_bytes // SHARED_PLACE_ALIGN) * SHARED_PLACE_ALIGN
            for operation, at, nbytes in self._placed:
                operation.attributes["offset"] = self.b.integer(base + at, 64)
                self.shared_bytes = max(self.shared_bytes, base + at + nbytes)
