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
from .values import Undefined, Value

if TYPE_CHECKING:
    from epdsl.ir.builder import Builder


@dataclass(frozen=True, eq=False, slots=True)
class Binding:
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
    exposed: set[str]
    continues: list[Edge] = field(default_factory=list[Edge])
    breaks: list[Edge] = field(default_factory=list[Edge])
    unrolled: bool = False


@dataclass(eq=False)
class Frame:
    """One function being interpreted."""

    source: Source
    lookup: Callable[[str], Any]
    env: Env
    parent: Frame | None
    call_node: ast.AST | None
    code: Any = None
    loads: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    loops: list[Loop] = field(default_factory=list[Loop])
    returns: list[Edge] = field(default_factory=list[Edge])
    divergent_return: bool = False


Origin = tuple[Frame | None, ast.AST | None]


class Tracer(ABC):
    """Builds one kernel. Subclassed by the interpreter, which knows the syntax."""

    def __init__(self, builder: Builder, target: Target, context: Value, block_threads: int | None) -> None:
        self.b = builder
        self.target = target
        self.context = context
        self.block_threads = block_threads
        self.frame: Frame = None  # pyright: ignore[reportAttributeAccessIssue]
        self.node: ast.AST | None = None
        self.sites: list[Site] = []
        self.shared_bytes = 0
        self.param_align: dict[str, int] = {}
        self.fault_exits: list[Any] = []
        self.looks_at_memory = 0
        self.site_tag = 0
        self._call_locations: dict[int, list[Any]] = {}

    # ---- places

    def places(self) -> tuple[Place, ...]:
        """From the kernel's own line to the current one, through the calls in between."""
        return self.places_of((self.frame, self.node))

    def places_of(self, origin: Origin) -> tuple[Place, ...]:
        """The same of an earlier place."""
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
        line = getattr(node, "lineno", None)
        if line is None:
            return
        frame = self.frame
        here = self.b.file_location(frame.source.file, line, node.col_offset + frame.source.indent + 1)  # pyright: ignore[reportAttributeAccessIssue]
        callers = self._callers(frame)
        self.b.location = self.b.call_location(here, callers)
        self.b.origin = (frame, node)

    def _callers(self, frame: Frame) -> list[Any]:
        found = self._call_locations.get(id(frame))
        if found is None:
            found = []
            node, outer = frame.call_node, frame.parent
            while outer is not None and node is not None:
                found.append(self.b.file_location(outer.source.file, node.lineno, node.col_offset + outer.source.indent + 1))  # pyright: ignore[reportAttributeAccessIssue]
                node, outer = outer.call_node, outer.parent
            self._call_locations[id(frame)] = found
        return found

    def forget(self, frame: Frame) -> None:
        self._call_locations.pop(id(frame), None)

    def site(self, kind: str, text: str, operand_dtypes: Sequence[str] = ()) -> int:
        """A number by which a run-time report names the current place."""
        place = self.place()
        made = Site(kind, place.file, place.line, place.column + 1, place.function, text, tuple(operand_dtypes))
        if made in self.sites:
            return self.sites.index(made)
        self.sites.append(made)
        return len(self.sites) - 1

    def error(self, message: str, fix: str = "", also: tuple[tuple[str, Place], ...] = ()) -> CompileError:
        return CompileError(message, fix, also).at(self.places())

    def undefined(self, name: str, value: Undefined) -> CompileError:
        return self.error(value.reason, f"a value for {name} on every path, before this line", value.also)

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
    def write_log(self, site: int, values: tuple[Any, ...]) -> None:
        """Emits the writing of a log record."""
        ...

    def take_shared(self, nbytes: int, align: int) -> int:
        """Reserves static shared memory; returns its offset."""
        offset = -(-self.shared_bytes // align) * align
        self.shared_bytes = offset + nbytes
        return offset
