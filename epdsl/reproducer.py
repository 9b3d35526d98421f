"""What is left behind when a pass or the code generator fails: enough to fail again without the program that failed.

    python -m epdsl.reproducer DIR

runs what failed on the module as it was before, and what would have followed.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from epdsl_runtime.errors import CodedError

from epdsl.env import DUMP_DIR
from epdsl.ir.errors import FAULT_OF_OURS, Place
from epdsl.ir.locations import shown_places
from epdsl.ir.steps import PASSES, Step, Watch, module_text, pass_stage, run_steps
from epdsl.lang.errors import CompileError
from epdsl.targets import Target, parse_target

if TYPE_CHECKING:
    from epdsl.build import Built
    from epdsl.compiler import CompileRequest

# The code of a failure behind a file that the user edited.
EDITED_FILE = "EP114"
# The stage whose text the code generator was given, by the stage it was making.
_INPUT = {"llvm": "before.mlir", "llvm-opt": "before.ll", "asm": "before.ll", "binary": "before.s"}


def steps_of(target: Target, name: str) -> tuple[Step, ...]:
    """The passes of a kernel called `name`, in order."""
    if target.simulated:
        from epdsl import lower_sim

        if not target.checked:
            return lower_sim.steps(target, name)
        from epdsl.check.instrument import CheckedLowering

        return lower_sim.steps(target, name, lower=CheckedLowering)
    from epdsl import lower_nvvm, lower_rocdl

    return (lower_nvvm if target.vendor == "nvidia" else lower_rocdl).steps(target)


def failed(request: CompileRequest, watch: Watch, built: Built, change: Callable[[Any], None] | None, error: Exception) -> CompileError:
    """The error of a stage that failed, with its place in the kernel; writes what reproduces it."""
    stage, target = watch.current, request.target
    message, places = _told(error, request.name)
    if not places:
        source = built.sources[0]
        places = (source.place(source.node),)
    code = error.code if isinstance(error, CodedError) else EDITED_FILE if watch.edited else FAULT_OF_OURS
    what = f"pass {stage.removeprefix(f'{PASSES}/')}" if stage.startswith(PASSES) else f"the {stage} stage"
    try:
        directory = _write(request, watch, built, change, f"{type(error).__name__}: {error}")
        fix = f"to see it fail again: python -m epdsl.reproducer {shlex.quote(str(directory))}"
    except OSError as problem:
        fix = f"a directory that can be written in {DUMP_DIR.name}, for what reproduces this ({problem})"
    return CompileError(code, f"{request.name} for {target.name}: {what} failed: {message}", fix).at(places)


def _told(error: Exception, function: str) -> tuple[str, tuple[Place, ...]]:
    """What an error says, and where in the kernel."""
    diagnostics = getattr(error, "error_diagnostics", None)
    if diagnostics:
        return "; ".join(d.message for d in diagnostics), shown_places(diagnostics[0].location, function)
    location, text = getattr(error, "location", None), error.message if isinstance(error, CodedError) else str(error)
    if location is not None:
        return text.removeprefix(f"{location}: "), shown_places(location, function)
    return text, ()


class _Reached(Exception):
    """The stage that failed has come again."""


class _Until(Watch):
    """Stops at the beginning of a stage, having done everything before it as another watch would."""

    def __init__(self, stage: str, other: Watch) -> None:
        self._stage, self._other = stage, other

    def begin(self, stage: str) -> None:
        if stage == self._stage:
            raise _Reached
        super().begin(stage)

    def opened(self, request: CompileRequest, built: Built) -> None:
        self._other.opened(request, built)

    def seen(self, stage: str, text: Callable[[], str]) -> str | None:
        return self._other.seen(stage, text)


def _before(request: CompileRequest, watch: Watch, built: Built, again: Built) -> str:
    """The text that the failed stage was given, locations included where it is MLIR.

    again  the kernel as built: a pass that failed has left its module half changed
    """
    stage = watch.current
    if stage == "llvm":
        return module_text(built.module, locations=True)
    if not stage.startswith(PASSES) and watch.previous is not None:
        return watch.previous()
    from epdsl.compiler import emit

    try:
        emit(request, again, _Until(stage, watch))
    except _Reached:
        pass
    return module_text(again.module, locations=True)


def _write(request: CompileRequest, watch: Watch, built: Built, change: Callable[[Any], None] | None, error: str) -> Path:
    from epdsl import fingerprint
    from epdsl.artifact_cache import exact_key
    from epdsl.build import build
    from epdsl.dump import place

    stage, again = watch.current, build(request)
    directory = place(Path(DUMP_DIR.get()), request, exact_key(request, again)) / "reproducer"
    if change is not None:
        change(again.module)
    before = _before(request, watch, built, again)
    name = "before.mlir" if stage.startswith(PASSES) else _INPUT.get(stage, "before.mlir")
    passes = [pass_stage(number, step) for number, step in enumerate(steps_of(request.target, request.name), 1)]
    stages = [*passes, *_INPUT]
    described = {
        "kernel": request.name,
        "target": request.target.name,
        "constants": request.constant_texts,
        "stage": stage,
        "input": name,
        "pipeline": stages[stages.index(stage) :] if stage in stages else [],
        "versions": fingerprint.versions(),
        "error": error,
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / name).write_text(before)
    (directory / "reproducer.json").write_text(json.dumps(described, indent=1) + "\n")
    (directory / "command.sh").write_text(f"#!/bin/sh\n{shlex.quote(sys.executable)} -m epdsl.reproducer {shlex.quote(str(directory))}\n")
    return directory


def run(directory: Path) -> None:
    """Does again what failed. Raises what it raises, ValueError for a directory that holds no reproducer."""
    try:
        described = json.loads((directory / "reproducer.json").read_text())
    except OSError as error:
        raise ValueError(f"{directory} holds no reproducer: {error}") from None
    target, stage = parse_target(described["target"]), described["stage"]
    text = (directory / described["input"]).read_text()
    from epdsl import codegen, lower_sim

    if described["input"] == "before.mlir":
        from mlir import ir

        from epdsl.ir import dialect

        context = ir.Context()
        dialect.register(context)
        module = ir.Module.parse(text, context)
        steps = steps_of(target, described["kernel"])
        numbers = [pass_stage(number, step) for number, step in enumerate(steps, 1)]
        first = numbers.index(stage) if stage in numbers else len(steps)
        run_steps(module, steps[first:], _Progress(), first + 1)
        text = lower_sim.translate(module) if target.simulated else codegen.translate(module)
    if described["input"] == "before.s":
        codegen.link(codegen.assemble(text, target))
    elif target.simulated:
        lower_sim.emit_host(text, _Progress())
    else:
        codegen.emit_llvm(text, target, watch=_Progress())


class _Progress(Watch):
    def begin(self, stage: str) -> None:
        super().begin(stage)
        print(stage, flush=True)


def main(arguments: list[str]) -> int:
    """Exit status 0 when nothing fails any more, 1 when it does, 2 for a directory that holds no reproducer."""
    if len(arguments) != 1:
        print("usage: python -m epdsl.reproducer DIR", file=sys.stderr)
        return 2
    try:
        run(Path(arguments[0]))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    except Exception as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    print("nothing fails")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
