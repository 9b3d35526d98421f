"""The syntax tree of a Python function, with the file's own line and column numbers, and what its names are used for."""

from __future__ import annotations

import ast
import functools
import linecache
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from .errors import CompileError, Place


@dataclass(frozen=True, eq=False)
class Source:
    """A function as written.

    lines  the file's, with their ends
    """

    file: str
    name: str
    node: ast.FunctionDef
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
        return len(text.encode()[:offset].decode(errors="ignore"))

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
        inner = [node for node, _ in _mentions(self.node) if isinstance(node, _FUNCTIONS) and node is not self.node]
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
    try:
        node = _definitions(whole).get(first)
    except SyntaxError as error:
        raise CompileError(
            "EP006",
            f"the source of {function.__qualname__} is not available ({code.co_filename}: {error})",
            "the file as it was when it was imported",
        ) from error
    if node is None or node.name != code.co_name:
        raise CompileError("EP006", f"{function.__qualname__} is not a plain function definition", "def name(...): ...")
    return Source(code.co_filename, function.__qualname__.replace("<locals>.", ""), node, whole)


# The functions of files by the line they begin on, by the list that holds a file's lines; the list is kept so that its id stays its own.
_parsed: dict[int, tuple[list[str], dict[int, ast.FunctionDef]]] = {}


def _definitions(lines: list[str]) -> dict[int, ast.FunctionDef]:
    """A file's function definitions by the number of their first line, which is a decorator's where there is one. Raises SyntaxError."""
    found = _parsed.get(id(lines))
    if found is None:
        tree = ast.parse("".join(lines))
        made = {min([node.lineno, *(d.lineno for d in node.decorator_list)]): node for node in _functions(tree)}
        found = _parsed[id(lines)] = (lines, made)
    return found[1]


def _functions(node: ast.AST) -> Iterator[ast.FunctionDef]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _BLOCKS):
            if isinstance(child, ast.FunctionDef):
                yield child
            yield from _functions(child)


def parameter_nodes(node: ast.FunctionDef | ast.Lambda) -> dict[str, ast.arg]:
    """A function's parameters, in order."""
    every = [*node.args.posonlyargs, *node.args.args, node.args.vararg, *node.args.kwonlyargs, node.args.kwarg]
    return {a.arg: a for a in every if a is not None}


_SCOPES = (ast.FunctionDef, ast.Lambda, ast.ListComp, ast.GeneratorExp, ast.SetComp, ast.DictComp)
_HOLDERS = (ast.Attribute, ast.Subscript)
# What statements are in.
_BLOCKS = (ast.stmt, ast.excepthandler, ast.match_case)
_FUNCTIONS = (ast.FunctionDef, ast.Lambda)
# Nodes without a name in them.
_BARE = (ast.Constant, ast.expr_context, ast.operator, ast.unaryop, ast.boolop, ast.cmpop)

Mention = tuple[ast.AST, bool]


@functools.cache
def _mentions(node: ast.AST) -> tuple[Mention, ...]:
    """The nodes in `node` that say something of names (names, assigned fields and elements, `+=`, functions), in the order of the text.

    With each, whether it is outside nested functions and comprehensions. Kept, because every loop asks for what is in it.
    """
    found: list[Mention] = []
    _collect(node, True, found)
    return tuple(found)


def _collect(node: ast.AST, own: bool, found: list[Mention]) -> None:
    if isinstance(node, ast.Name):
        found.append((node, own))
        return
    if isinstance(node, _FUNCTIONS) or isinstance(node, ast.AugAssign) or (isinstance(node, _HOLDERS) and isinstance(node.ctx, ast.Store)):
        found.append((node, own))
    own = own and not isinstance(node, _SCOPES)
    for name in node._fields:
        value = getattr(node, name, None)
        for child in value if isinstance(value, list) else (value,):  # pyright: ignore[reportUnknownVariableType]
            if isinstance(child, ast.stmt):
                found += _mentions(child) if own else [(each, False) for each, _ in _mentions(child)]
            elif isinstance(child, ast.AST) and not isinstance(child, _BARE):
                _collect(child, own, found)


def _own(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    return (each for node in nodes for each, own in _mentions(node) if own)


def assigned_names(nodes: Iterable[ast.AST]) -> dict[str, ast.AST]:
    """Names that statements may bind, each with the first node that binds it."""
    found: dict[str, ast.AST] = {}
    for node in _own(nodes):
        if isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Store):
                found.setdefault(node.id, node)
        elif isinstance(node, ast.FunctionDef):
            found.setdefault(node.name, node)
    return found


def changed_names(nodes: Iterable[ast.AST]) -> dict[str, ast.AST]:
    """Names of which statements may assign a field or an element: a struct held in a variable becomes another one."""
    found: dict[str, ast.AST] = {}
    for node in _own(nodes):
        if isinstance(node, _HOLDERS):
            root: ast.expr = node
            while isinstance(root, _HOLDERS):
                root = root.value
            if isinstance(root, ast.Name):
                found.setdefault(root.id, node)
    return found


def _reads(root: ast.AST) -> Iterator[ast.Name]:
    """Where names are read: also the target of `name += value`."""
    for node, _ in _mentions(root):
        if isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Load):
                yield node
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            yield node.target


def loaded_names(nodes: Iterable[ast.AST]) -> set[str]:
    return {name.id for node in nodes for name in _reads(node)}


def exposed_names(body: list[ast.stmt]) -> set[str]:
    """Names a loop body may read before it has written them in the same iteration."""
    exposed: set[str] = set()

    def reads(node: ast.AST, done: set[str]) -> None:
        exposed.update(loaded_names([node]) - done)

    def names(target: ast.expr) -> set[str]:
        return {node.id for node, _ in _mentions(target) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}

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
