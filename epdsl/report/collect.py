"""Gathers what the page shows: the source, every stage for every target, and which line comes from which."""

from __future__ import annotations

import html
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from epdsl.compiler import CompileRequest, compile_kernel
from epdsl.dump import of_machine_code
from epdsl.fingerprint import ROOT, versions
from epdsl.ir.steps import PASSES, Watch
from epdsl.stages import exists

from . import lines

log = logging.getLogger("epdsl")

PAGE = Path(__file__).with_name("page.html")


class _Keys:
    """Numbers for (file, line), shared by everything on the page."""

    def __init__(self) -> None:
        self.files: dict[str, int] = {}

    def of(self, places: Sequence[lines.Place]) -> list[str]:
        return [f"{self.files.setdefault(file, len(self.files))}:{line}" for file, line in places]


@dataclass
class _Collector(Watch):
    """Keeps every stage with the places of its lines."""

    keys: _Keys
    stages: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    names = True
    locations = True
    through: lines.Chains = field(default_factory=dict[lines.Place, tuple[lines.Place, ...]])
    last: list[lines.Line] = field(default_factory=list[lines.Line])

    def opened(self, request: CompileRequest, built: Any) -> None:
        self.sources = built.sources

    def seen(self, stage: str, text: Callable[[], str]) -> str | None:
        kind = PASSES if stage.startswith(PASSES) else stage
        if kind == "asm":
            self.add(stage, lines.assembly(text(), self.through))
        elif kind in lines.READERS:
            found = lines.READERS[kind](text())
            if kind != PASSES or [x.text for x in found] != [x.text for x in self.last]:
                self.add(stage.removeprefix(f"{PASSES}/"), found)
            self.last = found
            if kind == "llvm-opt":
                self.through = lines.chains("\n".join(line.text for line in found))
        return None

    def add(self, stage: str, found: list[lines.Line]) -> None:
        self.stages.append({"name": stage, "lines": [[line.text, *self.keys.of(line.places)] for line in found]})


def collect(requests: Sequence[CompileRequest]) -> dict[str, Any]:
    """The page's data: the same kernel compiled for one or more targets. Raises CompileError."""
    keys = _Keys()
    targets: list[dict[str, Any]] = []
    sources: dict[str, dict[int, str]] = {}
    names: dict[str, dict[int, str]] = {}
    for request in requests:
        watch = _Collector(keys)
        artifact = compile_kernel(request, watch=watch)
        for source in watch.sources:
            first = min([source.node.lineno, *(d.lineno for d in source.node.decorator_list)])
            last = source.node.end_lineno or first
            sources.setdefault(source.file, {}).update({n: source.lines[n - 1].rstrip("\n") for n in range(first, last + 1)})
            names.setdefault(source.file, {})[first] = source.name
        if exists("sass", request.target):
            try:
                watch.add("sass", lines.disassembly(of_machine_code("sass", request, artifact), watch.through))
            except LookupError as error:
                log.warning("the report has no sass: %s", error)
        rows = [row.split("  ", 1) for row in of_machine_code("resources", request, artifact).splitlines()]
        targets.append({"name": request.target.name, "stages": watch.stages, "resources": {name: value.strip() for name, value in rows}})
    return {
        "kernel": requests[0].name,
        "constants": requests[0].constant_texts,
        "versions": {name: value for name, value in versions().items() if name != "source"},
        "sources": [_source(file, keys.of([(file, 0)])[0].partition(":")[0], found, names[file]) for file, found in sources.items()],
        "targets": targets,
    }


def _source(file: str, number: str, found: dict[int, str], names: dict[int, str]) -> dict[str, Any]:
    rows = [[line, found[line], f"{number}:{line}"] for line in sorted(found)]
    bases = [base for base in (ROOT.parent, Path.cwd()) if Path(file).is_relative_to(base)]
    shown = str(Path(file).relative_to(bases[0])) if bases else file
    return {"file": shown, "functions": {str(line): name for line, name in names.items()}, "lines": rows}


def page(data: dict[str, Any]) -> str:
    """The data as one page that needs nothing else."""
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return PAGE.read_text().replace("{{title}}", html.escape(data["kernel"])).replace("{{data}}", text)
