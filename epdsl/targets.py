"""The machines a kernel can be compiled for, and what differs between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Vendor = Literal["nvidia", "amd"]

# PTX version each chip is emitted with: old enough for the drivers it is found with, new enough for what the lowering uses.
_PTX_VERSION = {"sm_80": 80, "sm_89": 80, "sm_90": 83, "sm_90a": 83, "sm_100": 86, "sm_120": 87}
# EF_AMDGPU_MACH of the ELF header's e_flags (LLVM, AMDGPU usage, "AMDGPU EF_AMDGPU_MACH Values").
_AMD_MACH = {"gfx90a": 0x3F, "gfx942": 0x4C, "gfx950": 0x4F, "gfx1100": 0x41, "gfx1200": 0x48, "gfx1201": 0x4E}
_SIMULATED: dict[str, Vendor] = {"sim:nvidia": "nvidia", "sim:amd": "amd"}
_ALIASES = {"sim": "sim:nvidia"}
# A simulated target with this suffix reports what it does to the checker.
CHECKED = ":checked"

KNOWN = (*_ALIASES, *_SIMULATED, *_PTX_VERSION, *_AMD_MACH)


@dataclass(frozen=True)
class Target:
    """One machine.

    name       as `parse_target` takes it, aliases resolved ("sm_90", "gfx942", "sim:nvidia")
    vendor     whose programming model it follows; of a simulated target, the one it models
    arch       the chip for the code generator ("sm_90", "gfx942"), "sim" when simulated
    warp_size  threads a warp (NVIDIA) or wave (AMD)
    simulated  whether the code runs on the host
    checked    simulated with every access and every ordering operation reported to the checker (`epdsl.check`)
    """

    name: str
    vendor: Vendor
    arch: str
    warp_size: int
    simulated: bool = False
    checked: bool = False

    @property
    def has_named_barriers(self) -> bool:
        """Whether the hardware has barriers for part of a block. Where not, the lowering counts in block-shared memory."""
        return self.vendor == "nvidia"

    @property
    def has_bulk_copy(self) -> bool:
        """Whether an engine copies in the background; elsewhere the calling thread copies (AMD) or it is refused (NVIDIA before sm_90)."""
        return self.vendor == "nvidia" and (self.simulated or self.generation >= 90)

    @property
    def has_elect(self) -> bool:
        """Whether `elect.sync` exists."""
        return self.vendor == "nvidia" and not self.simulated and self.generation >= 90

    @property
    def generation(self) -> int:
        """90 of sm_90 and sm_90a, 0x942 of gfx942, 0x1100 of gfx1100; 0 when simulated."""
        if self.simulated:
            return 0
        if self.vendor == "nvidia":
            return int(self.arch.removeprefix("sm_").rstrip("af"))
        return int(self.arch.removeprefix("gfx"), 16)

    @property
    def assembly(self) -> str:
        """What the text of its machine code is called: "ptx", "gcn", or "host" when simulated."""
        return "host" if self.simulated else "ptx" if self.vendor == "nvidia" else "gcn"

    @property
    def triple(self) -> str:
        """LLVM target triple; empty when simulated (the host's own)."""
        if self.simulated:
            return ""
        return "nvptx64-nvidia-cuda" if self.vendor == "nvidia" else "amdgcn-amd-amdhsa"

    @property
    def features(self) -> str:
        """LLVM feature string."""
        if self.simulated or self.vendor == "amd":
            return ""
        return f"+ptx{_PTX_VERSION[self.arch]}"

    @property
    def ptx_version(self) -> str:
        """Of an NVIDIA chip, the `.version` of its PTX ("8.3"); else empty."""
        return "{}.{}".format(*divmod(_PTX_VERSION[self.arch], 10)) if self.arch in _PTX_VERSION else ""

    @property
    def elf_mach(self) -> int:
        """Of an AMD chip, EF_AMDGPU_MACH of its code objects; else 0."""
        return _AMD_MACH.get(self.arch, 0)


def parse_target(text: str) -> Target:
    """The target called `text`. Raises ValueError that lists what is known."""
    name = _ALIASES.get(text, text)
    base = name.removesuffix(CHECKED)
    if base in _SIMULATED:
        vendor = _SIMULATED[base]
        return Target(name, vendor, "sim", 32 if vendor == "nvidia" else 64, simulated=True, checked=base != name)
    if name in _PTX_VERSION:
        return Target(name, "nvidia", name, 32)
    if name in _AMD_MACH:
        return Target(name, "amd", name, 64 if name.startswith("gfx9") else 32)
    # As ROCm's tools write it: amdgcn-amd-amdhsa--gfx942:sramecc+:xnack-.
    chip, *features = text.rpartition("--")[2].split(":")
    if chip in _AMD_MACH:
        made = f", with every setting of {' and '.join(sorted(one.rstrip('+-') for one in features))}" if features else ""
        raise ValueError(f"unknown target {text!r}: write {chip!r}, whose code runs on every {chip}{made}")
    raise ValueError(f"unknown target {text!r}: known are {', '.join(KNOWN)}")
