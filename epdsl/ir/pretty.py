"""The `ep` stage as people read it: a short form of every operation, constants where they are used, each line with its place in the source.

The form does not parse back; the `ep` stage's does.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mlir import ir

from .locations import places_of

# Said in words behind the operation's name, in this order; the other attributes as name=value.
_WORDS = ("name", "op", "kind", "space", "order", "scope", "cache")
# What goes without saying, or is said by how operands are written.
_SILENT = {
    ("order", "plain"),
    ("scope", "none"),
    ("cache", "default"),
    ("overflowFlags", "#arith.overflow<none>"),
    ("fastmath", "#arith.fastmath<none>"),
}
_UNSAID = ("operandSegmentSizes", "op_bundle_sizes", "rawConstantIndices", "elem_type", "predicate", "function_type", "sym_name")
_PREDICATES = {
    "arith.cmpi": ("eq", "ne", "slt", "sle", "sgt", "sge", "ult", "ule", "ugt", "uge"),
    "arith.cmpf": (
        *("false", "oeq", "ogt", "oge", "olt", "ole", "one", "ord"),
        *("ueq", "ugt", "uge", "ult", "ule", "une", "uno", "true"),
    ),
}
_NOTE_COLUMN = 96


def pretty(function: Any) -> str:
    """A `gpu.func` as text. Values are named after the name in their location, the others numbered in their order."""
    return "".join(f"{line}\n" for line in _Printer(function).lines())


class _Printer:
    def __init__(self, function: Any) -> None:
        self._function = function
        self._blocks = list(function.regions[0].blocks)
        self._numbers = {hash(block): number for number, block in enumerate(self._blocks)}
        self._names: dict[Any, str] = {}
        self._taken: dict[str, int] = {}
        self._unnamed = 0
        for block in self._blocks:
            for argument in block.arguments:
                self._name(argument, argument.location)
            for view in block.operations:
                operation = view.operation
                literal = _literal(operation)
                for result in operation.results:
                    if literal is not None:
                        self._names[result] = literal
                    else:
                        self._name(result, operation.location)

    def _name(self, value: Any, location: Any) -> None:
        if location.is_a_name():
            name = location.name_str
            used = self._taken.get(name, 0)
            self._taken[name] = used + 1
            self._names[value] = f"%{name}" if used == 0 else f"%{name}_{used - 1}"
        else:
            self._names[value] = f"%{self._unnamed}"
            self._unnamed += 1

    def lines(self) -> Iterator[str]:
        name = self._function.attributes["sym_name"].value
        rest = _attributes(self._function, lambda key: key not in _UNSAID and key != "gpu.kernel")
        yield _noted(f"kernel @{name}({self._arguments(self._blocks[0])}){rest}", self._function.location)
        sources = self._predecessors()
        for number, block in enumerate(self._blocks):
            if number:
                arguments = self._arguments(block)
                origin = ", ".join(f"^bb{i}" for i in sources[number]) or "nowhere"
                yield f"{_call(f'^bb{number}', [arguments] if arguments else [])}:  // from {origin}"
            shown: list[Any] = []
            for view in block.operations:
                operation = view.operation
                if operation.name == "ep.debug_value":
                    shown.append(operation.operands[0])
                elif _literal(operation) is None:
                    yield _noted(f"  {self._operation(operation, shown)}", operation.location)
                    shown = []

    def _arguments(self, block: Any) -> str:
        return ", ".join(f"{self._names[a]}: {a.type}" for a in block.arguments)

    def _predecessors(self) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in self._blocks]
        for number, block in enumerate(self._blocks):
            for follower in dict.fromkeys(self._successors(block.operations[len(block.operations) - 1].operation)):
                found[follower].append(number)
        return found

    def _successors(self, operation: Any) -> list[int]:
        return [self._numbers[hash(block)] for block in operation.successors]

    def _operation(self, operation: Any, more: list[Any]) -> str:
        """One operation; `more`: values that belong to it beside its operands."""
        results = ", ".join(self._names[result] for result in operation.results)
        words = [operation.name, *_words(operation)]
        operands = [self._names[operand] for operand in [*operation.operands, *more]]
        followers = self._successors(operation)
        types = _types(operation)
        if followers:
            own, passed = _passed(operation, operands, len(followers))
            operands, types = [*own, *(_call(f"^bb{b}", given) for b, given in zip(followers, passed, strict=True))], ""
        rest = _attributes(operation, lambda key: key not in _UNSAID and key not in _WORDS)
        text = " ".join([*words, *([", ".join(operands)] if operands else [])]) + rest + types
        return f"{results} = {text}" if results else text


def _call(name: str, arguments: list[str]) -> str:
    return f"{name}({', '.join(arguments)})" if arguments else name


def _literal(operation: Any) -> str | None:
    """A constant as it is written where it is used. None for what is none, or has many elements."""
    if operation.name != "arith.constant":
        return None
    match operation.attributes["value"]:
        case ir.BoolAttr() as found:
            return "true" if found.value else "false"
        case ir.IntegerAttr() as found:
            # i1 is a kind of integer to MLIR; BoolAttr comes first.
            return str(found.value)
        case ir.FloatAttr() as found:
            return repr(found.value)
        case _:
            return None


def _words(operation: Any) -> list[str]:
    attributes = operation.attributes
    predicates = _PREDICATES.get(operation.name)
    if predicates is not None:
        return [predicates[attributes["predicate"].value]]
    found = [(key, attributes[key].value) for key in _WORDS if key in attributes and isinstance(attributes[key], ir.StringAttr)]
    return [value for key, value in found if (key, value) not in _SILENT]


def _attributes(operation: Any, shown: Any) -> str:
    """The attributes that `shown` takes, as " {name=value}"."""
    found: list[str] = []
    for key in operation.attributes:
        attribute = operation.attributes[key]
        if shown(key) and (key, str(attribute)) not in _SILENT:
            found.append(key if isinstance(attribute, ir.UnitAttr) else f"{key}={_value(attribute)}")
    return f" {{{', '.join(found)}}}" if found else ""


def _value(attribute: Any) -> str:
    return str(attribute.value) if isinstance(attribute, ir.IntegerAttr | ir.StringAttr) else str(attribute)


def _types(operation: Any) -> str:
    """ " : T" where all types are the same, else those of the operands and of the results."""
    given = [str(operand.type) for operand in operation.operands]
    made = [str(result.type) for result in operation.results]
    if not given and not made:
        return ""
    if len({*given, *made}) == 1:
        return f" : {(made or given)[0]}"
    if len(set(given)) == 1:
        given = given[:1]
    return f" : {', '.join(given)}" + (f"{' ' if given else ''}-> {', '.join(made)}" if made else "")


def _passed(operation: Any, operands: list[str], followers: int) -> tuple[list[str], list[list[str]]]:
    """A terminator's own operands, and what it passes to each block that may follow."""
    if "operandSegmentSizes" not in operation.attributes:
        return [], [operands] * followers
    own, *sizes = list(operation.attributes["operandSegmentSizes"])
    rest = iter(operands[own:])
    return operands[:own], [[next(rest) for _ in range(size)] for size in sizes]


def _noted(line: str, location: Any) -> str:
    note = " < ".join(f"{Path(file).name}:{row}:{column}" for file, row, column in places_of(location) if file != "-")
    return f"{line:{_NOTE_COLUMN}}  // {note}" if note else line
