"""Using an edited file of a dump in place of what the compiler made of that stage, from there on.

A file is taken for what its first line says. It counts as edited when the text below that line is no longer the one that was dumped, and
is refused when the kernel has become another one since.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from epdsl.env import DUMP, OVERRIDE_DIR
from epdsl.ir.steps import PASSES
from epdsl.lang.errors import CompileError

if TYPE_CHECKING:
    from epdsl.build import Built
    from epdsl.compiler import CompileRequest

log = logging.getLogger("epdsl")

_FINAL = ("source", "ep-pretty", "sass", "resources")


class Overrides:
    """The edited files below a directory, for one compilation."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._texts: dict[str, tuple[Path, str]] = {}
        self._what = ""

    def opened(self, request: CompileRequest, built: Built) -> None:
        """Finds the files for a kernel that has been built. Raises CompileError for a directory, or a file, that cannot be used."""
        from epdsl.artifact_cache import exact_key
        from epdsl.dump import digest, read_header

        if not self._directory.is_dir():
            raise CompileError(
                "EP111", f"{OVERRIDE_DIR.name}={self._directory} is no directory", f"a directory with edited files of {DUMP.name}"
            )
        self._texts.clear()
        self._what = f"{request.name} for {request.target.name}"
        key = exact_key(request, built)[:16]
        for path in sorted(p for p in self._directory.rglob("*") if p.is_file() and not p.name.startswith(".")):
            first, _, text = path.read_text(errors="replace").partition("\n")
            said = read_header(first)
            if said is None:
                raise CompileError(
                    "EP111",
                    f"override {path}: the first line does not say which stage of which kernel it is",
                    f"the file as {DUMP.name} wrote it, edited below its first line",
                )
            if not _is_of(said, request) or said["text"] == digest(text):
                continue
            if said["hash"] != key:
                raise CompileError(
                    "EP112",
                    f"override {path} was made from {self._what} as of {said['hash']}, which is now {key}",
                    f"{DUMP.name} again, and the edit again in the new file",
                )
            self._check(said["stage"], path, request)
            self._texts[said["stage"]] = (path, text)

    def _check(self, stage: str, path: Path, request: CompileRequest) -> None:
        if stage in _FINAL or (stage == "asm" and request.target.simulated):
            raise CompileError(
                "EP113",
                f"override {path}: nothing is made of the {stage} stage of {request.target.name}",
                f"an edited file of ep, {PASSES}, llvm, llvm-opt{'' if request.target.simulated else ' or asm'}",
            )
        if stage in self._texts:
            raise CompileError(
                "EP113",
                f"override: {path} and {self._texts[stage][0]} are both the {stage} stage of {self._what}",
                "one of them in the directory",
            )

    def of(self, stage: str) -> str | None:
        """The text to use for a stage, if there is one."""
        found = self._texts.get(stage)
        if found is None:
            return None
        log.warning("override: %s is used as the %s stage of %s", found[0], stage, self._what)
        return found[1]


def _is_of(said: dict[str, Any], request: CompileRequest) -> bool:
    return (said["kernel"], said["target"], said["constants"]) == (request.name, request.target.name, request.constant_texts)
