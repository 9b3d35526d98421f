"""Where each line of a stage comes from: MLIR locations, LLVM debug metadata, `.loc` of assembly, the disassembler's notes."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

Place = tuple[str, int]
Chains = Mapping[Place, tuple[Place, ...]]
"""The calls around a line that was inlined, as far as known, by that line."""


@dataclass(frozen=True)
class Line:
    """A line of a stage. places: (file, line) in the source, the innermost first, then the calls it was inlined through."""

    text: str
    places: tuple[Place, ...] = ()


_MLIR_PLACE = re.compile(r'"([^"]*)":(\d+):\d+')


def mlir(text: str) -> list[Line]:
    """A module with locations in their places (`use_local_scope`); they are taken out of the text."""
    return [_mlir_line(line) for line in text.splitlines()]


def _mlir_line(line: str) -> Line:
    places: list[Place] = []
    kept, position = "", 0
    while (start := line.find(" loc(", position)) >= 0:
        end = _closing(line, start + len(" loc"))
        kept += line[position:start]
        # Those of a function's arguments come first; the operation's own is the last.
        places = [(file, int(number)) for file, number in _MLIR_PLACE.findall(line[start:end])]
        position = end
    return Line(kept + line[position:], _known(places))


def _closing(line: str, start: int) -> int:
    """The position after the bracket that closes the one at `start`, quotes left aside."""
    depth, quoted = 0, False
    for position in range(start, len(line)):
        character = line[position]
        if character == '"':
            quoted = not quoted
        elif not quoted and character in "()":
            depth += 1 if character == "(" else -1
            if depth == 0:
                return position + 1
    return len(line)


def _known(places: Iterable[Place]) -> tuple[Place, ...]:
    return tuple(dict.fromkeys(place for place in places if place[0] not in ("-", "") and place[1] > 0))


_METADATA = re.compile(r"^!(\d+) = (?:distinct )?!(DI\w+)\((.*)\)$")
_FIELD = re.compile(r"(\w+): (?:!(\d+)|\"([^\"]*)\"|(\d+))")
_DEBUG = re.compile(r"!dbg !(\d+)")


def llvm(text: str) -> list[Line]:
    """LLVM IR text."""
    nodes = _nodes(text)
    return [
        Line(line, _known(_chain(nodes, found[1])) if (found := _DEBUG.search(line)) and not line.startswith("!") else ())
        for line in text.splitlines()
    ]


def _nodes(text: str) -> dict[str, dict[str, str]]:
    """Debug metadata by number; a field that is another node holds its number."""
    found = filter(None, map(_METADATA.match, text.splitlines()))
    return {m[1]: {"": m[2]} | {name: node or string or number for name, node, string, number in _FIELD.findall(m[3])} for m in found}


def _chain(nodes: Mapping[str, Mapping[str, str]], number: str) -> list[Place]:
    """The places of a DILocation, or of a function, and of the calls around it."""
    places: list[Place] = []
    while number in nodes:
        node = nodes[number]
        scope = node.get("scope", "") if node[""] == "DILocation" else number
        while scope in nodes and "file" not in nodes[scope]:
            scope = nodes[scope].get("scope", "")
        file = nodes.get(nodes.get(scope, {}).get("file", ""), {})
        places.append((os.path.join(file.get("directory", ""), file.get("filename", "-")), int(node.get("line", "0"))))
        number = node.get("inlinedAt", "")
    return places


def chains(text: str) -> dict[Place, tuple[Place, ...]]:
    """What assembly does not say: through which calls each line was inlined, by all of its copies together.

    text  LLVM IR. A line of no file (a helper of the lowering) is there only where all of its copies were inlined in the same place
    """
    nodes = _nodes(text)
    found: dict[Place, dict[tuple[Place, ...], None]] = {}
    for number in dict.fromkeys(_DEBUG.findall(text)):
        first, *calls = _chain(nodes, number)
        if calls:
            found.setdefault(first, {})[_known(calls)] = None
    merged = {place: tuple(dict.fromkeys(call for each in ways for call in each)) for place, ways in found.items()}
    return {place: calls for place, calls in merged.items() if _known([place]) or len(found[place]) == 1}


_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]*)"(?:\s+"([^"]*)")?')
_LOC = re.compile(r"^\s*\.loc\s+(\d+)\s+(\d+)")


def assembly(text: str, through: Chains) -> list[Line]:
    """PTX, GCN or host assembly: what follows a `.loc` comes from its line."""
    files: dict[str, str] = {}
    for found in filter(None, map(_FILE.match, text.splitlines())):
        files[found[1]] = os.path.join(found[2], found[3]) if found[3] else found[2]
    lines: list[Line] = []
    here: tuple[Place, ...] = ()
    for line in text.splitlines():
        if found := _LOC.match(line):
            here = _full((files.get(found[1], "-"), int(found[2])), through)
            lines.append(Line(line, here))
        elif line.strip() in ("}",) or line.lstrip().startswith((".size", ".section", ".Lfunc_end")):
            here = ()
            lines.append(Line(line))
        else:
            is_code = line[:1].isspace() and not line.lstrip().startswith((".", ";", "//", "#"))
            lines.append(Line(line, here if is_code and line.strip() else ()))
    return lines


def _full(place: Place, through: Chains) -> tuple[Place, ...]:
    return _known((place, *through.get(place, ())))


_NOTE = re.compile(r'"([^"]*)", line (\d+)')
_OBJDUMP = re.compile(r"^; (/?[^:]+):(\d+)$")


def disassembly(text: str, through: Chains) -> list[Line]:
    """What `nvdisasm -g` or `llvm-objdump -l` wrote: what follows a note comes from its line."""
    lines: list[Line] = []
    here: tuple[Place, ...] = ()
    for line in text.splitlines():
        if "//## File" in line:
            noted = [(file, int(number)) for file, number in _NOTE.findall(line)]
            here = _known(noted) if len(noted) > 1 else _full(noted[0], through)
            lines.append(Line(line, here))
        elif found := _OBJDUMP.match(line):
            here = _full((found[1], int(found[2])), through)
            lines.append(Line(line, here))
        else:
            lines.append(Line(line, here if line[:1].isspace() and line.strip() else ()))
    return lines


READERS: dict[str, Callable[[str], list[Line]]] = {"ep": mlir, "passes": mlir, "llvm": llvm, "llvm-opt": llvm}
"""How the stages are read that tell everything themselves."""
