"""The syntax tree of a Python function, with the file's own line and column numbers."""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .errors import CompileError, Place


@dataclass(frozen=True, eq=False)
class Source:
    file: str
    name: str
    node: ast.FunctionDef | ast.Lambda
    indent: int

    def place(self, node: ast.AST) -> Place:
        line: int = getattr(node, "lineno", self.node.lineno)
        column: int = getattr(node, "col_offset", 0) + self.indent
        end_line: int = getattr(node, "end_lineno", None) or line
        text = linecache.getline(self.file, line).rstrip("\n")
        end = (getattr(node, "end_col_offset", None) or 0) + self.indent if end_line == line else len(text)
        return Place(self.file, line, column, end, self.name, text)

    def segment(self, node: ast.AST) -> str:
        """The source text of a node, on one line."""
        return ast.unparse(node)


@functools.cache
def source_of(function: Callable[..., Any]) -> Source:
    """Reads and parses a function's source.

    Raises CompileError when Python has no source for it (a REPL, exec) or it is not a plain `def`.
    """
    code = function.__code__
    try:
        lines, first = inspect.getsourcelines(function)
    except (OSError, TypeError) as error:
        raise CompileError(
            f"the source of {function.__qualname__} is not available ({error})",
            "kernels must be defined in a file, not in exec or a bare REPL",
        ) from error
    text = "".join(lines)
    dedented = textwrap.dedent(text)
    indent = len(text) - len(text.lstrip(" \t")) if dedented != text else 0
    tree = ast.parse(dedented)
    ast.increment_lineno(tree, first - 1)
    node = tree.body[0]
    if not isinstance(node, ast.FunctionDef):
        raise CompileError(f"{function.__qualname__} is not a plain function definition", "def name(...): ...")
    return Source(code.co_filename, function.__qualname__.replace("<locals>.", ""), node, indent)


def assigned_names(nodes: list[ast.stmt]) -> dict[str, ast.AST]:
    """Names a block of statements may bind, in order of appearance, each with the first node that binds it."""
    found: dict[str, ast.AST] = {}

    def target(node: ast.expr) -> None:
        match node:
            case ast.Name(id=name):
                found.setdefault(name, node)
            case ast.Tuple(elts=elements) | ast.List(elts=elements):
                for element in elements:
                    target(element)
            case ast.Starred(value=value):
                target(value)
            case ast.Attribute(value=value) | ast.Subscript(value=value):
                root: ast.expr = value
                while isinstance(root, ast.Attribute | ast.Subscript):
                    root = root.value
                if isinstance(root, ast.Name):
                    found.setdefault(root.id, node)
            case _:
                pass

    class Visitor(ast.NodeVisitor):
        def visit_Assign(self, node: ast.Assign) -> None:
            for each in node.targets:
                target(each)
            self.generic_visit(node)

        def visit_AugAssign(self, node: ast.AugAssign) -> None:
            target(node.target)
            self.generic_visit(node)

        def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
            target(node.target)
            self.generic_visit(node)

        def visit_For(self, node: ast.For) -> None:
            target(node.target)
            self.generic_visit(node)

        def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
            target(node.target)
            self.generic_visit(node)

        def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
            found.setdefault(node.name, node)

        def visit_Lambda(self, node: ast.Lambda) -> None:
            pass

    visitor = Visitor()
    for node in nodes:
        visitor.visit(node)
    return found


def loaded_names(nodes: list[ast.AST]) -> set[str]:
    return {n.id for node in nodes for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}


def exposed_names(body: list[ast.stmt]) -> set[str]:
    """Names a loop body may read before it has written them in the same iteration."""
    exposed: set[str] = set()

    def reads(node: ast.AST, done: set[str]) -> None:
        for each in ast.walk(node):
            if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load) and each.id not in done:
                exposed.add(each.id)

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
                    exposed.update(n.id for n in ast.walk(each) if isinstance(n, ast.Name) and n.id not in done)
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
