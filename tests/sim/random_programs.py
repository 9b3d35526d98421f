"""Random kernels: nested branches and loops over i32 variables, the same text run by Python itself on 32-bit wrapping integers."""

from __future__ import annotations

import ast
import random
from collections.abc import Callable
from typing import Any, ClassVar

HEADER = """import epdsl as ep

@ep.func
def helper(a: ep.i32, b: ep.i32) -> ep.i32:
{helper}
    return a - b

@ep.kernel
def program(inputs: ep.Ptr[ep.i32], out: ep.Ptr[ep.i32], trace: ep.Ptr[ep.i32]):
    t = ep.thread_idx.x
    a = inputs[t * 3]
    b = inputs[t * 3 + 1]
    c = inputs[t * 3 + 2]
    d = 0
    e = ep.i32(7)
    fuel = ep.i32(0)
    result = run(inputs, trace + t, a, b, c, d, e, fuel)
    out[t] = result

@ep.func
def run(inputs, trace, a, b, c, d, e, fuel):
{body}
"""

NAMES = ("a", "b", "c", "d", "e")


class Writer:
    """Writes one program. Every loop ends: `while` loops burn fuel, `for` loops are short."""

    def __init__(self, seed: int) -> None:
        self.r = random.Random(seed)
        self.lines: list[str] = []
        self.loops = 0
        self.level = 0
        self.counter = 0
        self.callable = True
        self.names: list[str] = list(NAMES)

    def line(self, text: str) -> None:
        self.lines.append("    " * (self.level + 1) + text)

    def expression(self, depth: int = 2) -> str:
        r = self.r
        if depth == 0 or r.random() < 0.25:
            return r.choice(self.names) if r.random() < 0.75 else str(r.randint(-5, 9))
        kind = r.random()
        if kind < 0.7:
            op = r.choice(["+", "-", "*", "&", "|", "^", "//", "%"])
            # On the device: a divisor that is 0 while building is refused.
            divisor = f"ep.i32({self.variable()})"
            return f"({self.expression(depth - 1)} {op} {divisor if op in ('//', '%') else self.expression(depth - 1)})"
        if kind < 0.8:
            return f"({self.expression(depth - 1)} if {self.condition(1)} else {self.variable()})"
        if kind < 0.9 and self.callable:
            return f"helper({self.expression(depth - 1)}, {self.variable()})"
        return f"{r.choice(['min', 'max'])}({self.variable()}, {self.expression(depth - 1)})"

    def variable(self) -> str:
        return self.r.choice(self.names)

    def condition(self, depth: int = 2) -> str:
        r = self.r
        kind = r.random()
        if depth and kind < 0.3:
            return f"({self.condition(depth - 1)} {r.choice(['and', 'or'])} {self.condition(depth - 1)})"
        if depth and kind < 0.4:
            return f"(not {self.condition(depth - 1)})"
        if kind < 0.5:
            return f"{self.expression(1)} {r.choice(['<', '<='])} {self.variable()} {r.choice(['<', '!='])} {self.expression(1)}"
        return f"{self.variable()} {r.choice(['<', '<=', '>', '>=', '==', '!='])} {self.expression(1)}"

    def block(self, depth: int) -> None:
        self.level += 1
        for _ in range(self.r.randint(1, 3)):
            if self.statement(depth):
                break
        self.level -= 1

    def statement(self, depth: int) -> bool:
        """Writes one statement; True when nothing after it is reached."""
        r = self.r
        kind = r.random()
        if depth == 0 or kind < 0.35:
            target = r.choice(NAMES)
            match r.randint(0, 4):
                case 0:
                    self.line(f"{target} {r.choice(['+=', '-=', '*=', '^='])} {self.expression()}")
                case 1:
                    other = r.choice(NAMES)
                    self.line(f"{target}, {other} = {self.expression(1)}, {self.expression(1)}")
                case 2:
                    self.line(f"trace[0] = trace[0] * 31 + {self.expression(1)}")
                case _:
                    self.line(f"{target} = {self.expression()}")
            return False
        if kind < 0.6:
            self.line(f"if {self.condition()}:")
            self.block(depth - 1)
            if r.random() < 0.3:
                self.line(f"elif {self.condition()}:")
                self.block(depth - 1)
            if r.random() < 0.5:
                self.line("else:")
                self.block(depth - 1)
            return False
        if kind < 0.75:
            self.loop_for(depth)
            return False
        if kind < 0.85:
            self.loop_while(depth)
            return False
        if self.loops and kind < 0.95:
            self.line(r.choice(["break", "continue"]))
            return True
        if kind < 0.97:
            self.line(f"return {self.expression()}")
            return True
        self.line("pass")
        return False

    def loop_for(self, depth: int) -> None:
        r = self.r
        name = f"i{self.counter}"
        self.counter += 1
        low, high = r.randint(-3, 3), r.randint(-3, 6)
        step = r.choice([1, 1, 1, 2, 3, -1, -2])
        spans = [
            f"range({high})",
            f"range({low}, {high}, {step})",
            f"range({low}, {self.variable()} & 7)",
            f"range({self.variable()} & 3, {low}, -1)",
        ]
        span = r.choice([*spans, f"ep.unroll(range({low}, {high}, {step}))"])
        self.line(f"for {name} in {span}:")
        self.loops += 1
        self.names.append(name)
        self.block(depth - 1)
        self.names.remove(name)
        self.loops -= 1

    def loop_while(self, depth: int) -> None:
        self.line(f"while fuel < 40 and {self.condition(1)}:")
        self.level += 1
        self.line("fuel += 1")
        self.level -= 1
        self.loops += 1
        self.block(depth - 1)
        self.loops -= 1


def write_program(seed: int) -> str:
    """The source of a module with a kernel `program(inputs[3 * threads], out[threads], trace[threads])`."""
    helper = Writer(seed + 1_000_000)
    helper.callable = False
    helper.names = ["a", "b"]
    for _ in range(helper.r.randint(0, 2)):
        helper.line(f"if {helper.condition()}:")
        helper.level += 1
        helper.line(helper.r.choice([f"return {helper.expression()}", f"a = {helper.expression()}", f"b -= {helper.expression(1)}"]))
        helper.level -= 1
    w = Writer(seed)
    for _ in range(w.r.randint(3, 7)):
        if w.statement(4):
            break
    else:
        w.line("return a ^ (b * 3) ^ (c * 5) ^ (d * 7) ^ (e * 11) ^ fuel")
    return HEADER.format(helper="\n".join(helper.lines), body="\n".join(w.lines))


# ---- the same program in Python


class Int:
    """A 32-bit signed integer that wraps; division floors, and by zero gives 0."""

    __slots__ = ("v",)

    def __init__(self, v: Any) -> None:
        self.v = (int(v) + (1 << 31)) % (1 << 32) - (1 << 31)

    def __index__(self) -> int:
        return self.v

    def __bool__(self) -> bool:
        return self.v != 0

    def __hash__(self) -> int:
        return hash(self.v)

    def __neg__(self) -> Int:
        return Int(-self.v)


def _arithmetic(operation: Callable[[int, int], int]) -> Callable[[Any, Any], Int]:
    return lambda x, y: Int(operation(int(x), int(y)))


def _compare(operation: Callable[[int, int], bool]) -> Callable[[Any, Any], bool]:
    return lambda x, y: operation(int(x), int(y))


_ARITHMETIC: dict[str, Callable[[int, int], int]] = {
    "add": lambda x, y: x + y, "sub": lambda x, y: x - y, "mul": lambda x, y: x * y,
    "and": lambda x, y: x & y, "or": lambda x, y: x | y, "xor": lambda x, y: x ^ y,
    "floordiv": lambda x, y: x // y if y else 0, "mod": lambda x, y: x % y if y else 0,
}  # fmt: skip
_COMPARE: dict[str, Callable[[int, int], bool]] = {
    "lt": lambda x, y: x < y, "le": lambda x, y: x <= y, "gt": lambda x, y: x > y,
    "ge": lambda x, y: x >= y, "eq": lambda x, y: x == y, "ne": lambda x, y: x != y,
}  # fmt: skip
for _name, _operation in _ARITHMETIC.items():
    setattr(Int, f"__{_name}__", _arithmetic(_operation))
    setattr(Int, f"__r{_name}__", (lambda f: lambda y, x: f(x, y))(_arithmetic(_operation)))
for _name, _compares in _COMPARE.items():
    setattr(Int, f"__{_name}__", _compare(_compares))


class _Memory:
    def __init__(self, values: list[Any], base: int = 0) -> None:
        self.values, self.base = values, base

    def __getitem__(self, i: Any) -> Any:
        return self.values[self.base + int(i)]

    def __setitem__(self, i: Any, value: Any) -> None:
        self.values[self.base + int(i)] = Int(value)

    def __add__(self, n: Any) -> _Memory:
        return _Memory(self.values, self.base + int(n))


class _Stub:
    """What `ep` is to the program when Python runs it."""

    class thread_idx:
        x = 0

    i32 = Int
    Ptr: ClassVar[dict[Any, None]] = {Int: None}

    @staticmethod
    def kernel(function: Any) -> Any:
        return function

    func = kernel

    @staticmethod
    def unroll(items: Any) -> Any:
        return items


class _Literals(ast.NodeTransformer):
    """Makes the program's numbers 32-bit integers."""

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        if type(node.value) is not int:
            return node
        return ast.copy_location(ast.Call(ast.Attribute(ast.Name("ep", ast.Load()), "i32", ast.Load()), [node], []), node)


def run_in_python(source: str, inputs: list[int], threads: int) -> tuple[list[int], list[int]]:
    """What the program leaves in `out` and `trace`, by Python's own meaning of the text."""
    scope: dict[str, Any] = {"ep": _Stub, "range": _range}
    tree = _Literals().visit(ast.parse(source.replace("import epdsl as ep\n", "")))
    exec(compile(ast.fix_missing_locations(tree), "program", "exec"), scope)
    out, trace = [Int(0)] * threads, [Int(0)] * threads
    for t in range(threads):
        _Stub.thread_idx.x = t
        scope["program"](_Memory([Int(v) for v in inputs]), _Memory(out), _Memory(trace))
    return [int(v) for v in out], [int(v) for v in trace]


def _range(*bounds: Any) -> Any:
    return (Int(i) for i in range(*(int(b) for b in bounds)))
