"""The `ep` stage as people read it: operations of the dialect in a short form, each line with its place in the kernel's source.

The form does not parse back; the `ep` stage's does.
"""

from __future__ import annotations

import re
from pathlib import Path

_LOCATION = re.compile(r" loc\((?P<where>.*)\)$")
_ARGUMENT_LOCATION = re.compile(r' loc\((?:"[^"]*"\()*(?:callsite\()?(?:"[^"]*"(?::\d+:\d+)?(?: at )?)*\)*(?=[,)])')
_FILE = re.compile(r'"([^"]*)":(\d+):(\d+)')
_EP = re.compile(
    r'^(?P<lead>\s*(?:%\S+ = )?)"ep\.(?P<name>\w+)"\((?P<operands>[^)]*)\)(?: \{(?P<attributes>.*?)\})?'
    r" : \((?P<types>.*)\) -> (?P<result>\S.*)$"
)
_ATTRIBUTE = re.compile(r'(\w+) = (?:"([^"]*)"|(-?\d+)(?: : i\d+)?)')
# Said in words behind the operation's name, in this order; the others as name = value.
_WORDS = ("name", "op", "kind", "space", "order", "scope", "cache")
# What goes without saying.
_SILENT = {("order", "plain"), ("scope", "none"), ("cache", "default")}
_NOTE_COLUMN = 96


def pretty(text: str) -> str:
    """`text` is a module's MLIR with locations in their places (`use_local_scope`)."""
    lines = [_line(line) for line in text.splitlines()]
    return "\n".join(lines) + "\n"


def _line(line: str) -> str:
    note = ""
    found = _LOCATION.search(line)
    if found:
        line = line[: found.start()]
        note = " < ".join(f"{Path(file).name}:{row}:{column}" for file, row, column in _FILE.findall(found["where"]) if file != "-")
    line = _ARGUMENT_LOCATION.sub("", line)
    line = _operation(line)
    return f"{line:{_NOTE_COLUMN}}  // {note}" if note else line


def _operation(line: str) -> str:
    found = _EP.match(line)
    if not found:
        return line
    attributes = {name: text or number for name, text, number in _ATTRIBUTE.findall(found["attributes"] or "")}
    words = [attributes[k] for k in _WORDS if k in attributes and (k, attributes[k]) not in _SILENT]
    rest = [f"{k}={v}" for k, v in attributes.items() if k not in _WORDS]
    operands = [found["operands"]] if found["operands"] else []
    types = [t for t in (found["types"], "" if found["result"] == "()" else f"-> {found['result']}") if t]
    parts = [found["lead"] + f"ep.{found['name']}", *words, *operands, *([f"{{{', '.join(rest)}}}"] if rest else [])]
    return " ".join(parts) + (f" : {' '.join(types)}" if types else "")
