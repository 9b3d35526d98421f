"""The stages of a compilation by name, and an artifact's texts of them, made when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from epdsl.compiler import CompileRequest
    from epdsl.targets import Target

MEANING = {
    "source": "the functions that were interpreted, as in their files",
    "ep": "the dialect as built; parses back",
    "ep-pretty": "the same in a form for reading, each line with its place in the source",
    "passes": "after each pass, 01_NAME, 02_NAME, ...",
    "llvm": "LLVM IR",
    "llvm-opt": "LLVM IR, optimised",
    "asm": "PTX, GCN or the simulator's host assembly",
    "sass": "machine code, disassembled; needs a disassembler",
    "resources": "registers, spills, shared memory, occupancy, as far as the tools at hand tell",
}
"""Every stage, in order, with what it holds."""


class StageTexts(Mapping[str, str]):
    """Texts by stage: the compiler's own, and every other stage by compiling again on its first use.

    As a mapping it has the compiler's own alone, so that saving an artifact compiles nothing.

    names  the compiler's own stages
    own    gives their texts
    """

    def __init__(self, names: Iterable[str], own: Callable[[], Mapping[str, str]], request: CompileRequest) -> None:
        self._names = tuple(names)
        self._load = own
        self._request = request
        self._own: Mapping[str, str] | None = None
        self._made: dict[str, str] = {}

    @property
    def own(self) -> Mapping[str, str]:
        if self._own is None:
            self._own = self._load()
        return self._own

    @property
    def stages(self) -> tuple[str, ...]:
        """Every name that has a text."""
        return (*sorted(self._names), *(s for s in MEANING if s not in self._names and exists(s, self._request.target)))

    def __getitem__(self, stage: str) -> str:
        found = self.own.get(stage) or self._made.get(stage)
        if found is None:
            from epdsl.dump import stages_of

            self._made = stages_of(self._request, self._made)
            found = self._made.get(stage)
        if found is None and exists(stage, self._request.target):
            from epdsl.dump import disassembled

            found = self._made[stage] = disassembled(stage, self._request)
        if found is None:
            raise KeyError(stage)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, stage: object) -> bool:
        return stage in self._names

    def __reduce__(self) -> tuple[type, tuple[dict[str, str]]]:
        return dict, (dict(self.own),)


def exists(stage: str, target: Target) -> bool:
    """Whether a target has a stage at all."""
    return stage in MEANING and not (target.simulated and stage == "sass")
