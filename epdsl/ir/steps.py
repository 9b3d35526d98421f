"""A compilation as named stages: what watches them sees each one's text and may put another in its place."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

PASSES = "passes"
LINES = "ensure-debug-info-scope-on-llvm-func"


@dataclass(frozen=True)
class Step:
    """A pass: a name for files and messages, and what changes the module in place."""

    name: str
    run: Callable[[Any], None]


class Watch:
    """Is told of every stage. This one only remembers the last.

    current    the stage being made: "ep", "passes/03_convert-vector-to-llvm", "llvm", "llvm-opt", "asm", "binary"
    previous   prints what the stage before it made
    edited     whether a text has been put in the place of a stage
    names      whether values are to keep their variables' names through the passes
    locations  whether the text of a module is to have locations, in the lines they belong to
    """

    current = ""
    previous: Callable[[], str] | None = None
    edited = False
    names = False
    locations = False

    def begin(self, stage: str) -> None:
        self.current = stage

    def end(self, stage: str, text: Callable[[], str]) -> str | None:
        """`text` prints what was made. A text that is returned takes its place."""
        other = self.seen(stage, text)
        self.edited = self.edited or other is not None
        self.previous = text if other is None else lambda: other
        return other

    def opened(self, request: Any, built: Any) -> None:
        """A kernel has been built (`compiler.CompileRequest`, `build.Built`) and its stages follow."""

    def seen(self, stage: str, text: Callable[[], str]) -> str | None:
        return None


def upstream(pipeline: str) -> Step:
    """A pass of MLIR by its textual form, nested in what it runs on: "gpu.module(convert-arith-to-llvm)"."""

    def run(module: Any) -> None:
        from mlir.passmanager import PassManager

        with module.context:
            PassManager.parse(f"builtin.module({pipeline})").run(module.operation)

    return Step(pipeline.rpartition("(")[2].partition("{")[0].rstrip(")"), run)


def pass_stage(number: int, step: Step) -> str:
    return f"{PASSES}/{number:02}_{step.name}"


def run_steps(module: Any, steps: Iterable[Step], watch: Watch, first: int = 1) -> None:
    """Runs passes, the first of them being number `first`."""
    for number, step in enumerate(steps, first):
        stage = pass_stage(number, step)
        watch.begin(stage)
        if watch.names and step.name == LINES:
            # A variable's name around a location hides the calls in it from what makes line tables.
            drop_names(module)
        step.run(module)
        observe(module, stage, watch)


def drop_names(module: Any) -> None:
    """Takes variables' names out of the locations of a module's operations."""
    from mlir import ir

    def visit(operation: Any) -> Any:
        if operation.location.is_a_name():
            operation.location = operation.location.child_loc
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)


def observe(module: Any, stage: str, watch: Watch) -> None:
    """Shows a module to `watch`, and replaces what is in it by the text that comes back."""
    other = watch.end(stage, lambda: module_text(module, watch.locations, watch.locations))
    if other is not None:
        replace(module, other)


def module_text(module: Any, locations: bool = False, in_place: bool = False) -> str:
    """A module as MLIR text that parses back, values named after the variables they were assigned to.

    in_place  locations stand in the line they belong to, instead of being numbered
    """
    return module.operation.get_asm(enable_debug_info=locations, use_name_loc_as_prefix=True, use_local_scope=in_place)


def bytecode(module: Any) -> bytes:
    """A module as MLIR bytecode, locations included: a tenth of the time of its text."""
    made = io.BytesIO()
    module.operation.write_bytecode(made)
    return made.getvalue()


def bytecode_text(code: bytes) -> str:
    """The text of a module of which only the bytecode is left."""
    from mlir import ir

    from . import dialect

    return module_text(ir.Module.parse(code, dialect.context()))


def replace(module: Any, text: str) -> None:
    """Puts the content of MLIR `text` in the place of a module's. Raises MLIRError for a text that does not parse."""
    from mlir import ir

    made = ir.Module.parse(text, module.context)
    body = module.body
    for operation in list(body.operations):
        operation.operation.erase()
    for operation in list(made.body.operations):
        body.append(operation)
    for name in list(module.operation.attributes):
        del module.operation.attributes[name]
    for name in made.operation.attributes:
        module.operation.attributes[name] = made.operation.attributes[name]
