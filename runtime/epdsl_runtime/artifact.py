"""A compiled kernel: everything a launch needs, and nothing of the compiler."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

FORMAT = 3

ParamKind = Literal["scalar", "pointer", "peers", "struct", "array"]


@dataclass(frozen=True)
class Slot:
    """One machine word of the kernel's parameter list. `nbytes` is also its alignment."""

    name: str
    dtype: str
    nbytes: int


@dataclass(frozen=True)
class Param:
    """One parameter as the author wrote it.

    kind     what a launch may pass
    dtype    element type of a pointer or peers, type of a scalar ("f32", "bf16", ...), name of a struct
    nbytes   size of one element of a pointer or peers, size of a scalar
    align    alignment in bytes a pointer's address must have
    peer     whether the pointer may lead to another rank's memory
    fields   members of a struct; the element, `count` times, of an array
    """

    name: str
    kind: ParamKind
    dtype: str
    nbytes: int = 0
    align: int = 1
    peer: bool = False
    fields: tuple[Param, ...] = ()
    count: int = 1

    def slots(self, prefix: str = "") -> Iterator[Slot]:
        """The machine words this parameter is passed as, in order."""
        name = prefix + self.name
        match self.kind:
            case "scalar":
                yield Slot(name, self.dtype, self.nbytes)
            case "pointer":
                yield Slot(name, "u64", 8)
            case "peers":
                yield Slot(f"{name}.table", "u64", 8)
                yield Slot(f"{name}.size", "i32", 4)
            case "struct":
                for member in self.fields:
                    yield from member.slots(f"{name}.")
            case "array":
                for index in range(self.count):
                    yield from self.fields[0].slots(f"{name}[{index}]")


@dataclass(frozen=True)
class Site:
    """A place in a kernel's source that a report can name: a wait, an assert, a printf, a barrier.

    scope  where a debugger stops, what it shows there (JSON; see `sim_debug`)
    """

    kind: str
    file: str
    line: int
    column: int
    function: str
    text: str
    operand_dtypes: tuple[str, ...] = ()
    scope: str = field(default="", repr=False)


def site_tag(name: str, target: str, constants: Mapping[str, str]) -> int:
    """The 31-bit number that stands for a kernel in fault and log records.

    A record's site word is `site_tag << 32 | site number`; the compiler bakes it into the kernel before the sites are known.
    """
    text = json.dumps([name, target, sorted(constants.items())])
    return zlib.crc32(text.encode()) & 0x7FFF_FFFF


@dataclass(frozen=True)
class Artifact:
    """A kernel compiled for one target.

    name         the kernel's symbol in the binary
    target       "sm_90", "gfx942", "sim:nvidia", ...
    vendor       "nvidia" or "amd" (modelled, on the simulator)
    warp_size    lanes of a warp
    params       what a launch passes, in order; the hidden last slot is the address of the context (see context_layout)
    shared_bytes static shared memory of a block
    max_threads  largest block it may be launched with, None when any
    blocks       blocks every launch must have, None when any number
    sites        table that site numbers in fault and log records index
    binary       PTX text, HSACO, or a host object file
    texts        readable stages: "ep", "llvm", "llvm-opt", "ptx", "gcn", ...
    constants    the compile-time arguments, as text
    """

    name: str
    target: str
    vendor: str
    warp_size: int
    params: tuple[Param, ...]
    shared_bytes: int
    sites: tuple[Site, ...]
    binary: bytes
    max_threads: int | None = None
    blocks: int | None = None
    texts: Mapping[str, str] = field(default_factory=dict[str, str])
    constants: Mapping[str, str] = field(default_factory=dict[str, str])

    def __repr__(self) -> str:
        constants = "".join(f", {name}={value}" for name, value in self.constants.items())
        return f"<Artifact {self.name} for {self.target}{constants}: {len(self.binary)} bytes>"

    @property
    def simulated(self) -> bool:
        return self.target.startswith("sim:")

    @property
    def slots(self) -> tuple[Slot, ...]:
        return tuple(slot for param in self.params for slot in param.slots())

    @property
    def site_tag(self) -> int:
        """What the high half of this kernel's site words holds (see `site_tag`)."""
        return site_tag(self.name, self.target, self.constants)

    def text(self, stage: str) -> str:
        """The text of a stage: "ptx" or "gcn", for either "asm", or another that was kept.

        An artifact that the compiler made has every stage of its dumps; one that was loaded has those that were saved.
        Raises KeyError naming the stages that exist, LookupError where a tool that a stage needs is absent.
        """
        if stage == "asm" and not self.simulated:
            stage = "ptx" if self.vendor == "nvidia" else "gcn"
        try:
            return self.texts[stage]
        except KeyError:
            known = getattr(self.texts, "stages", sorted(self.texts))
            raise KeyError(f"{self.name} for {self.target} has no {stage!r} text; it has {', '.join(known) or 'none'}") from None

    def ir(self, stage: str) -> str:
        """The IR of a stage: "ep" (as built), "llvm", "llvm-opt" (optimised)."""
        return self.text(stage)

    def save(self, directory: str | Path) -> Path:
        """Writes `artifact.json`, `kernel.bin` and one file per text stage into `directory`, made if absent."""
        path = Path(directory)
        path.mkdir(parents=True, exist_ok=True)
        (path / "kernel.bin").write_bytes(self.binary)
        for stage, text in self.texts.items():
            (path / f"kernel.{stage}").write_text(text, encoding="utf-8")
        meta = self.meta()
        (path / "artifact.json").write_text(json.dumps({**meta, "digest": _digest(meta, self.binary)}, indent=1), encoding="utf-8")
        return path

    def meta(self) -> dict[str, Any]:
        """Everything but the binary and the texts, for JSON. Inverse of `of_meta`."""
        return {
            "format": FORMAT,
            "name": self.name,
            "target": self.target,
            "vendor": self.vendor,
            "warp_size": self.warp_size,
            "params": [asdict(p) for p in self.params],
            "shared_bytes": self.shared_bytes,
            "max_threads": self.max_threads,
            "blocks": self.blocks,
            "sites": [{name: value for name, value in asdict(s).items() if value or name != "scope"} for s in self.sites],
            "layout": self.layout(),
            "texts": sorted(self.texts),
            "constants": dict(self.constants),
        }

    @classmethod
    def load(cls, directory: str | Path) -> Artifact:
        """Reads what `save` wrote.

        Raises ValueError when the directory holds no artifact, one of another format, one whose files do not belong together, or one whose
        parameters this package would pass in another layout.
        """
        path = Path(directory)
        try:
            meta, binary = json.loads((path / "artifact.json").read_bytes()), (path / "kernel.bin").read_bytes()
            if not isinstance(meta, dict):
                raise ValueError(f"artifact.json holds a {type(meta).__name__}, no object")
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} holds no artifact that can be read ({error}); write one with epdsl build or Artifact.save") from error
        if meta.get("format") != FORMAT:
            raise ValueError(
                f"{path} holds an artifact of format {meta.get('format')!r}, this package reads format {FORMAT}; build it again"
            )
        found = _digest({name: value for name, value in meta.items() if name != "digest"}, binary)
        if found != meta.get("digest"):
            raise ValueError(
                f"{path}: its files have digest {found}, artifact.json says {meta.get('digest')}: one was changed or copied without the "
                "others; build it again"
            )
        try:
            names = {stage: path / f"kernel.{stage}" for stage in meta["texts"]}
            texts = {stage: text.read_text(encoding="utf-8", errors="replace") for stage, text in names.items() if text.exists()}
            made, layout = cls.of_meta(meta, binary, texts), meta["layout"]
        except (KeyError, TypeError) as error:
            what = f"lacks {error}" if isinstance(error, KeyError) else f"says what this package does not know ({error})"
            raise ValueError(
                f"{path}: its artifact.json {what}, though it is of format {FORMAT}; build it with the same version"
            ) from error
        for written, ours in zip_longest(layout, made.layout(), fillvalue=["nothing", 0, 0]):
            if written != ours:
                raise ValueError(
                    f"{path}: it takes {written[0]} ({written[1]} bytes) at byte {written[2]} of its parameters, where this package passes "
                    f"{ours[0]} ({ours[1]} bytes) at byte {ours[2]}; build it with the same version"
                )
        return made

    def layout(self) -> list[list[Any]]:
        """[name, bytes, offset in the parameter block] of every slot."""
        offset, found = 0, []
        for slot in self.slots:
            offset = -(-offset // slot.nbytes) * slot.nbytes
            found.append([slot.name, slot.nbytes, offset])
            offset += slot.nbytes
        return found

    @classmethod
    def of_meta(cls, meta: Mapping[str, Any], binary: bytes, texts: Mapping[str, str]) -> Artifact:
        """The artifact that `meta` described, of this format."""
        return cls(
            name=meta["name"],
            target=meta["target"],
            vendor=meta["vendor"],
            warp_size=meta["warp_size"],
            params=tuple(_param(p) for p in meta["params"]),
            shared_bytes=meta["shared_bytes"],
            sites=tuple(Site(**{**s, "operand_dtypes": tuple(s["operand_dtypes"])}) for s in meta["sites"]),
            binary=binary,
            max_threads=meta["max_threads"],
            blocks=meta["blocks"],
            texts=texts,
            constants=meta["constants"],
        )


def _param(data: dict[str, Any]) -> Param:
    return Param(**{**data, "fields": tuple(_param(f) for f in data["fields"])})


def _digest(meta: Mapping[str, Any], binary: bytes) -> str:
    """Of the binary and of all that says how it is to be launched."""
    digest = hashlib.sha256(binary)
    digest.update(json.dumps(meta, sort_keys=True).encode())
    return digest.hexdigest()[:32]
