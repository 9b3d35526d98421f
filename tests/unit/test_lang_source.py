"""What the front end reads off a function's text: which names a loop binds, changes and may read first; places; captures."""

from __future__ import annotations

import ast
import textwrap

import pytest

from epdsl.lang.errors import CompileError, Place
from epdsl.lang.source import assigned_names, changed_names, local_names, loop_names, source_of


def loop_in(text: str) -> ast.For | ast.While:
    node = ast.parse(textwrap.dedent(text)).body[0]
    assert isinstance(node, ast.For | ast.While)
    return node


@pytest.mark.parametrize(
    ("body", "exposed"),
    [
        ("x = 1\n    y = x", {"range", "n"} - {"range", "n"}),
        ("y = x\n    x = 1", {"x"}),
        ("x += 1", {"x"}),
        ("if c:\n        x = 1\n    y = x", {"c", "x"}),
        ("if c:\n        x = 1\n    else:\n        x = 2\n    y = x", {"c"}),
        ("if c:\n        continue\n    else:\n        x = 2\n    y = x", {"c", "x"}),
        ("for j in range(x):\n        y = j", {"range", "x"}),
        ("for j in z:\n        y = 1\n    w = y", {"z", "y"}),
        ("while x:\n        x = 0", {"x"}),
        ("p[i] = v\n    v = 1", {"p", "v"}),
        ("s.f = 1\n    y = s", {"s"}),
        ("x, y = y, x", {"x", "y"}),
        ("f = lambda a: a + b\n    b = 1", {"a", "b"}),
    ],
)
def test_names_a_loop_may_read_before_it_binds_them(body: str, exposed: set[str]) -> None:
    names = loop_names(loop_in(f"for i in range(n):\n    {body}\n"))
    assert names.exposed - {"i"} == exposed


def test_names_a_loop_binds_and_changes() -> None:
    names = loop_names(
        loop_in(
            """
            while (n := f(n)) < 10:
                a, (b, *c) = 1, (2, 3)
                d: int = 4
                e.x.y = 5
                g[h] += 6
                for k in m:
                    pass
                def inner(z):
                    hidden = z
                total = [q for q in r]
                if (w := 7):
                    pass
            """
        )
    )
    assert set(names.assigned) == {"a", "b", "c", "d", "k", "inner", "total", "w"}
    assert set(names.changed) == {"e", "g"}
    # The condition binds n before every turn, so n has a value when the loop is left.
    assert "n" in names.exposed


def test_the_first_binding_of_a_name_is_kept() -> None:
    body = ast.parse("x = 1\nif c:\n    x = 2\ny.z = 3\ny.w = 4\n").body
    assert {n: node.lineno for n, node in assigned_names(body).items()} == {"x": 1}  # pyright: ignore[reportAttributeAccessIssue]
    assert {n: node.lineno for n, node in changed_names(body).items()} == {"y": 4}  # pyright: ignore[reportAttributeAccessIssue]


def sample(first, *rest, option=1):
    def inner(a):
        return a + first

    grow = lambda v: v + option  # noqa: E731
    total = inner(1)
    total += grow(2)
    return total


def test_what_a_function_binds_reads_and_lets_its_closures_read() -> None:
    source = source_of(sample)
    assert local_names(source.node) == {"first", "rest", "option", "inner", "grow", "total"}
    assert source.captured == {"a", "first", "v", "option"}
    # `total += ...` reads total too.
    assert source.loads["total"] == [source.node.lineno + 6, source.node.lineno + 7]


def test_a_place_counts_characters_not_bytes() -> None:
    place = Place("f.py", 3, 17, 18, "kernel", '    s = "größer"; x = y')
    assert place.render() == '  File "f.py", line 3, in kernel\n    s = "größer"; x = y\n                 ^'


def test_an_error_is_one_text() -> None:
    here, there = Place("a.py", 1, 0, 4, "k", "f(x)"), Place("b.py", 2, 8, 13, "f", "        return y")
    error = CompileError("EP001", "no y", "y = 1", (("y is read here", there),)).at((here,))
    assert str(error) == textwrap.dedent(
        """\
        EP001: no y
          File "a.py", line 1, in k
            f(x)
            ^^^^
          y is read here:
          File "b.py", line 2, in f
            return y
            ^^^^^
          write: y = 1"""
    )
    assert error.at((there,)).places == (here,)


def test_functions_without_a_source_are_refused() -> None:
    scope: dict[str, object] = {}
    exec("def made(): pass", scope)
    with pytest.raises(CompileError, match="the source of made is not available"):
        source_of(scope["made"])  # pyright: ignore[reportArgumentType]
    with pytest.raises(CompileError, match="is not a plain function definition"):
        source_of(lambda: 1)
