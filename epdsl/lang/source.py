"""The syntax tree of a Python function, with the file's own line and column numbers, and what its names are used for."""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import textwrap
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from .errors import CompileError, Place


@dataclass(frozen=True, eq=False)
class Source:
    """A function as written.

    indent  what was taken off the front of its lines
    lines   the file's, with their ends
    """

    file: str
    name: str
    node: ast.FunctionDef
    indent: int
    lines: list[str] = field(repr=False)

    def place(self, node: ast.AST) -> Place:
        line: int = getattr(node, "lineno", self.node.lineno)
        text = _line(self.lines, line)
        start = self._column(text, getattr(node, "col_offset", 0))
        end_line: int = getattr(node, "end_lineno", None) or line
        end = self._column(text, getattr(node, "end_col_offset", None) or 0) if end_line == line else len(text)
        return Place(self.file, line, start, end, self.name, text)

    def _column(self, text: str, offset: int) -> int:
        """The character a byte offset of the syntax tree stands for."""
        return len(text.encode()[: offset + self.indent].decode(errors="ignore"))

    @functools.cached_property
    def loads(self) -> dict[str, list[int]]:
        """The lines on which each name is read."""
        found: dict[str, list[int]] = {}
        for name in _reads(self.node):
            found.setdefault(name.id, []).append(name.lineno)
        return found

    @functools.cached_property
    def captured(self) -> frozenset[str]:
        """Names read by lambdas and nested functions, which run wherever they are called."""
        inner = [n for n in ast.walk(self.node) if isinstance(n, ast.Lambda | ast.FunctionDef) and n is not self.node]
        return frozenset(loaded_names(inner))


@dataclass(frozen=True)
class LoopNames:
    """What a loop's body does with names.

    assigned  names it may bind, each with the first node that does
    changed   names of which it may assign a field or an element
    exposed   names it may read before it has bound them in the same iteration
    """

    assigned: dict[str, ast.AST]
    changed: dict[str, ast.AST]
    exposed: frozenset[str]


@functools.cache
def loop_names(node: ast.For | ast.While) -> LoopNames:
    exposed = exposed_names(node.body)
    assigned = assigned_names(node.body)
    if isinstance(node, ast.While):
        exposed |= loaded_names([node.test])
        # What the condition binds has a value whenever the loop is left.
        assigned = {name: where for name, where in assigned.items() if name not in assigned_names([node.test])}
    return LoopNames(assigned, changed_names(node.body), frozenset(exposed))


@functools.cache
def local_names(node: ast.FunctionDef | ast.Lambda) -> frozenset[str]:
    """Names that belong to a function itself."""
    return frozenset(parameter_nodes(node)) | frozenset(assigned_names(node.body if isinstance(node, ast.FunctionDef) else [node.body]))


# The lines of a function's file as they were when the function was made, and the latest ones of each file.
_kept: weakref.WeakKeyDictionary[Callable[..., Any], list[str]] = weakref.WeakKeyDictionary()
_latest: dict[str, list[str]] = {}


def keep_source(function: Callable[..., Any]) -> list[str]:
    """Reads the file of a function that has just been made, so that what is compiled later is what Python runs now.

    A file may be edited while a program that was started from it runs. Returns its lines, none where Python has no source.
    """
    lines = _kept.get(function)
    if lines is None:
        file = function.__code__.co_filename
        linecache.checkcache(file)
        lines = _kept[function] = _latest[file] = linecache.getlines(file, function.__globals__)
    return lines


def line_of(file: str, number: int) -> str:
    """A line of a source file, as of the functions made from it last; "" where there is none."""
    return _line(_latest.get(file) or linecache.getlines(file), number)


def _line(lines: list[str], number: int) -> str:
    return lines[number - 1].rstrip("\n") if 0 < number <= len(lines) else ""


@functools.cache
def source_of(function: Callable[..., Any]) -> Source:
    """Reads and parses a function's source.

    Raises CompileError when Python has no source for it (a REPL, exec) or it is not a plain `def`.
    """
    code, whole = function.__code__, keep_source(function)
    first = code.co_firstlineno
    if not 0 < first <= len(whole):
        raise CompileError(
            "EP006",
            f"the source of {function.__qualname__} is not available (no line {first} in {code.co_filename})",
            "kernels must be defined in a file, not in exec or a bare REPL",
        )
    lines = inspect.getblock(whole[first - 1 :])
    text = "".join(lines)
    dedented = textwrap.dedent(text)
    indent = len(text) - len(text.lstrip(" \t")) if dedented != text else 0
    tree = ast.parse(dedented)
    ast.increment_lineno(tree, first - 1)
    node = tree.body[0]
    if not isinstance(node, ast.FunctionDef):
        raise CompileError("EP006", f"{function.__qualname__} is not a plain function definition", "def name(...): ...")
    return Source(code.co_filename, function.__qualname__.replace("<locals>.", ""), node, indent, whole)


def parameter_nodes(node: ast.FunctionDef | ast.Lambda) -> dict[str, ast.arg]:
    """A function's parameters, in order."""
    every = [*node.args.posonlyargs, *node.args.args, node.args.vararg, *node.args.kwonlyargs, node.args.kwarg]
    return {a.arg: a for a in every if a is not None}


_SCOPES = (ast.FunctionDef, ast.Lambda, ast.ListComp, ast.GeneratorExp, ast.SetComp, ast.DictComp)


def _own_nodes(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """All nodes in the order of the text, without the insides of nested functions and comprehensions."""
    for node in nodes:
        yield node
        if not isinstance(node, _SCOPES):
            yield from _own_nodes(ast.iter_child_nodes(node))


def assigned_names(nodes: Iterable[ast.AST]) -> dict[str, ast.AST]:
    """Names that statements may bind, each with the first node that binds it."""
    found: dict[str, ast.AST] = {}
    for node in _own_nodes(nodes):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.setdefault(node.id, node)
        elif isinstance(node, ast.FunctionDef):
            found.setdefault(node.name, node)
    return found


def changed_names(nodes: Iterable[ast.AST]) -> dict[str, ast.AST]:
    """Names of which statements may assign a field or an element: a struct held in a variable becomes another one."""
    found: dict[str, ast.AST] = {}
    for node in _own_nodes(nodes):
        if isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store):
            root: ast.expr = node
            while isinstance(root, ast.Attribute | ast.Subscript):
                root = root.value
            if isinstance(root, ast.Name):
                found.setdefault(root.id, node)
    return found


def _reads(root: ast.AST) -> Iterator[ast.Name]:
    """Where names are read: also the target of `name += value`."""
    for node in ast.walk(root):
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            yield node.target
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            yield node


def loaded_names(nodes: Iterable[ast.AST]) -> set[str]:
    return {name.id for node in nodes for name in _reads(node)}


def exposed_names(body: list[ast.stmt]) -> set[str]:
    """Names a loop body may read before it has written them in the same iteration."""
    exposed: set[str] = set()

    def reads(node: ast.AST, done: set[str]) -> None:
        exposed.update(loaded_names([node]) - done)

    def names(target: ast.expr) -> set[str]:
        return {n.id for n in ast.walk(target) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}

    def run(statements: list[ast.stmt], done: set[str]) -> set[str]:
        done = set(done)
        for statement in statements:
            match statement:
                case ast.Assign(targets=targets, value=value):
                    reads(value, done)
                    for each in targets:
                        reads(each, done)
                        done |= names(each)
                case ast.AnnAssign(target=each, value=value):
                    if value is not None:
                        reads(value, done)
                    reads(each, done)
                    done |= names(each)
                case ast.AugAssign(target=each, value=value):
                    reads(value, done)
                    reads(statement, done)
                    done |= names(each)
                case ast.If(test=test, body=then, orelse=other):
                    reads(test, done)
                    done = run(then, done) & run(other, done)
                case ast.For(target=each, iter=it, body=inner, orelse=other):
                    reads(it, done)
                    run(inner, done | names(each))
                    run(other, done)
                case ast.While(test=test, body=inner, orelse=other):
                    reads(test, done)
                    run(inner, done)
                    run(other, done)
                case _:
                    reads(statement, done)
        return done

    run(body, set())
    return exposed
