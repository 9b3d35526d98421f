"""Writing the stages of a compilation to files, and making those that the compiler does not keep.

Files lie in `DIR/KERNEL-HASH/RANK/`. Each begins with a line that says what it is, by which an edited one is recognised
(`epdsl.override`), and is written when its stage has been made, so that a crash later leaves it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import multiprocessing
import os
import re
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from epdsl_runtime.launchers import rank_in

from epdsl.env import DUMP, DUMP_DIR, OVERRIDE_DIR
from epdsl.ir.steps import PASSES, Watch
from epdsl.lang.errors import CompileError
from epdsl.stages import MEANING, exists

if TYPE_CHECKING:
    from epdsl_runtime.artifact import Artifact

    from epdsl.build import Built
    from epdsl.compiler import CompileRequest
    from epdsl.override import Overrides

log = logging.getLogger("epdsl")

HASH_LENGTH = 8
_SUFFIX = {"source": ".py", "ep": ".mlir", "ep-pretty": ".txt", "llvm": ".ll", "llvm-opt": ".ll", "sass": ".sass", "resources": ".txt"}
_ASSEMBLY = {"ptx": ".ptx", "gcn": ".s", "host": ".s"}
_COMMENT = {".py": "#", ".txt": "#", ".ll": ";", ".s": ";"}
_HEADER = "epdsl: "
_RANK = re.compile(r"epdsl-rank-(\d+)$")


def wanted(names: tuple[str, ...]) -> frozenset[str]:
    """The stages a list names. Raises ValueError for one that does not exist."""
    unknown = [name for name in names if name not in (*MEANING, "all")]
    if unknown:
        raise ValueError(f"no stage {', '.join(unknown)}; stages are all, {', '.join(MEANING)}")
    return frozenset(MEANING if "all" in names else names)


def rank() -> int:
    """The rank that compiles: a simulated one is a thread, another a process, or what a launcher says. 0 outside a job."""
    for name in (threading.current_thread().name, multiprocessing.current_process().name):
        if found := _RANK.search(name):
            return int(found[1])
    return rank_in(os.environ) or 0


def file_name(stage: str, assembly: str) -> str:
    """The file a stage is written to; `assembly` as of `Target.assembly`."""
    if stage.startswith(f"{PASSES}/"):
        return f"{stage.removeprefix(f'{PASSES}/')}.mlir"
    return f"asm{_ASSEMBLY[assembly]}" if stage == "asm" else f"{stage}{_SUFFIX[stage]}"


def header(name: str, request: CompileRequest, stage: str, key: str, text: str) -> str:
    """The first line of a file: which stage of what it is, and digests of what the kernel was and of the text below."""
    said = {
        "stage": stage,
        "kernel": request.name,
        "target": request.target.name,
        "constants": request.constant_texts,
        "hash": key[:16],
        "text": digest(text),
    }
    return f"{_COMMENT.get(Path(name).suffix, '//')} {_HEADER}{json.dumps(said)}\n"


def read_header(line: str) -> dict[str, Any] | None:
    """What `header` said; None for another line."""
    _, found, said = line.partition(_HEADER)
    try:
        return json.loads(said) if found else None
    except ValueError:
        return None


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Dumper(Watch):
    """Gives stages to `take(stage, text)` as they are made; a pass that changed nothing gives None for its text.

    overrides  edited files that are used in place of stages
    """

    names = True

    def __init__(self, stages: frozenset[str], take: Callable[[str, str | None], None], overrides: Overrides | None = None) -> None:
        self.stages = stages
        self.take = take
        self.overrides = overrides
        self._module = ""

    def opened(self, request: CompileRequest, built: Built) -> None:
        if self.overrides is not None:
            self.overrides.opened(request, built)

    def seen(self, stage: str, text: Callable[[], str]) -> str | None:
        other = self.overrides.of(stage) if self.overrides is not None else None
        is_pass = stage.startswith(f"{PASSES}/")
        if (PASSES if is_pass else stage) in self.stages or (stage == "ep" and PASSES in self.stages):
            made = text() if other is None else other
            unchanged = is_pass and made == self._module
            if is_pass or stage == "ep":
                self._module = made
            if is_pass or stage in self.stages:
                self.take(stage, None if unchanged else made)
        return other


class Files(Dumper):
    """Writes stages to files."""

    def __init__(self, stages: frozenset[str], directory: Path, overrides: Overrides | None = None) -> None:
        super().__init__(stages, self._write, overrides)
        self._root = directory
        self._request: Any = None
        self._key = ""
        self._last = ""
        self.directory = directory

    def opened(self, request: CompileRequest, built: Built) -> None:
        super().opened(request, built)
        from epdsl.artifact_cache import exact_key

        self._request, self._key = request, exact_key(request, built)
        self.directory = place(self._root, request, self._key)
        if self.stages:
            self.directory.mkdir(parents=True, exist_ok=True)

    def _write(self, stage: str, text: str | None) -> None:
        name = file_name(stage, self._request.target.assembly)
        if text is None:
            text = f"// unchanged: as after {self._last}\n"
        elif stage == "ep" or stage.startswith(PASSES):
            self._last = Path(name).stem
        path, head = self.directory / name, header(name, self._request, stage, self._key, text)
        temporary = path.with_name(f".{name}.{os.getpid()}.{threading.get_ident()}")
        temporary.write_text(head + text)
        temporary.replace(path)

    def finish(self, artifact: Artifact, strict: bool = False) -> None:
        """Writes the stages that are made of an artifact, and says where everything is.

        strict  raise LookupError where a tool is absent, instead of saying so
        """
        for stage in ("sass", "resources"):
            if stage in self.stages and exists(stage, self._request.target):
                try:
                    self._write(stage, of_machine_code(stage, self._request, artifact))
                except LookupError as error:
                    if strict:
                        raise
                    log.warning("%s", error)
        if self.stages:
            log.warning("stages of %s for %s are in %s", artifact.name, artifact.target, self.directory)


def place(root: Path, request: CompileRequest, key: str) -> Path:
    """The directory of a kernel's files."""
    return root / f"{request.name}-{key[:HASH_LENGTH]}" / str(rank())


def of_environment() -> Files:
    """What EPDSL_DUMP and EPDSL_OVERRIDE_DIR ask for. Raises CompileError for a stage that does not exist."""
    from epdsl.override import Overrides

    try:
        stages = wanted(DUMP.get())
    except ValueError as error:
        raise CompileError("EP110", f"{DUMP.name}: {error}") from None
    return Files(stages, Path(DUMP_DIR.get()), Overrides(Path(OVERRIDE_DIR.get())) if OVERRIDE_DIR.get() else None)


def write_stages(kernel: Any, target: str, constants: Mapping[str, Any], stages: str, root: Path) -> Path:
    """Compiles a kernel and writes stages (a comma list, or "all") to files below `root`. Returns their directory.

    Raises ValueError for a stage that does not exist, LookupError for a tool that a stage asked for by name needs.
    """
    from epdsl.compiler import compile_kernel

    named = tuple(stages.split(","))
    files = Files(wanted(named), root)
    files.finish(compile_kernel(kernel.request(target, **constants), watch=files), strict="all" not in named)
    return files.directory


def stages_of(request: CompileRequest, known: Mapping[str, str]) -> dict[str, str]:
    """Every stage's text that compiling makes; "passes" has all of its files in one. Raises CompileError."""
    from epdsl.compiler import compile_kernel

    if "source" in known:
        return dict(known)
    found: dict[str, str] = dict(known)
    parts: list[str] = []

    def take(stage: str, text: str | None) -> None:
        if stage.startswith(f"{PASSES}/"):
            name = stage.removeprefix(f"{PASSES}/")
            found[stage] = found[name] = text or f"// {name}: unchanged\n"
            parts.append(f"// ---- {name}{': unchanged' if text is None else ''}\n{text or ''}")
        elif text is not None:
            found[stage] = text

    compile_kernel(request, watch=Dumper(frozenset(MEANING), take))
    found[PASSES] = "\n".join(parts)
    return found


def disassembled(stage: str, request: CompileRequest) -> str:
    """The text of "sass" or "resources". Raises LookupError where a tool is absent."""
    from epdsl.artifact_cache import compiled

    return of_machine_code(stage, request, compiled(request))


def of_machine_code(stage: str, request: CompileRequest, artifact: Artifact) -> str:
    from epdsl import machine_code

    if stage == "sass":
        return machine_code.disassemble(request.target, artifact.binary)
    texts = artifact.texts
    return machine_code.table(machine_code.resources(request.target, artifact.binary, texts, artifact.shared_bytes, artifact.max_threads))
