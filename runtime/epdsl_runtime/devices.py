"""Which devices this machine has, and opening one by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .driver_device import DeviceUnavailable, DriverError
from .env import DEVICE
from .sharing import try_here

if TYPE_CHECKING:
    from .protocol import Device, DeviceInfo

KINDS = ("cuda", "hip", "sim")
VENDORS = ("nvidia", "amd")
Factory = Callable[[int], Any]
FORMS = "sim, sim:nvidia, sim:amd, cuda, cuda:N, hip, hip:N or auto"


@dataclass(frozen=True)
class Spec:
    """A device named in text. `index` is None when any will do; `vendor` is what a simulated device models."""

    kind: str
    index: int | None = None
    vendor: str = "nvidia"

    def __str__(self) -> str:
        if self.kind == "sim":
            return f"sim:{self.vendor}"
        return self.kind if self.index is None else f"{self.kind}:{self.index}"


@dataclass(frozen=True)
class Listed:
    """A device that can be opened by `spec`, or the reason why there is none of its kind.

    peer_memory  kinds of memory other ranks can reach, best first, each with the reason when it cannot be made here
    """

    spec: str
    info: DeviceInfo | None
    reason: str | None = None
    peer_memory: tuple[tuple[str, str | None], ...] = ()


def parse_spec(spec: str) -> Spec:
    """Reads a device's name; "auto" picks what works, or what EPDSL_DEVICE names.

    Raises TypeError or ValueError listing the forms.
    """
    if not isinstance(spec, str):
        raise TypeError(f"a device is named in text, {FORMS}, not by {spec!r}")
    if spec == "auto":
        chosen = DEVICE.get()
        return Spec(working_kind()) if chosen == "auto" else _parsed(chosen, f"{DEVICE.name}=")
    return _parsed(spec)


def _parsed(spec: str, by: str = "") -> Spec:
    kind, _, rest = spec.partition(":")
    if kind == "sim" and rest in ("", *VENDORS):
        return Spec("sim", vendor=rest or "nvidia")
    if kind in ("cuda", "hip") and (not rest or rest.isdecimal()):
        return Spec(kind, int(rest) if rest else None)
    raise ValueError(f"{by}{spec!r} names no device; it is {FORMS}")


def device_count(kind: str) -> int:
    """GPUs of a kind that this process sees. Raises DeviceUnavailable when its driver is missing."""
    if kind == "cuda":
        from . import cuda

        return cuda.device_count()
    from . import hip

    return hip.device_count()


def most_ranks(spec: Spec) -> int | None:
    """Ranks of one process tree that a device can have: one a GPU; None (any number) on the simulator and on one GPU that was named.

    Raises DeviceUnavailable when the driver is missing, or has no such device.
    """
    if spec.kind == "sim":
        return None
    count = device_count(spec.kind)
    if spec.index is not None and spec.index >= count:
        raise DeviceUnavailable("EP221", f"{spec} does not exist: this process sees {count} GPUs of kind {spec.kind}")
    return None if spec.index is not None else count


def working_kind() -> str:
    """The first kind of GPU that has a device here, else "sim"."""
    for kind in ("cuda", "hip"):
        try:
            if device_count(kind):
                return kind
        except DeviceUnavailable:
            continue
    return "sim"


def open_device(spec: str = "auto") -> Device:
    """Opens a device: "sim", "sim:nvidia", "sim:amd", "cuda", "cuda:0", "hip:0", or "auto" for a working GPU and else the simulator.

    Raises ValueError for another name, DeviceUnavailable when there is no such device.
    """
    return open_spec(parse_spec(spec))


def open_spec(spec: Spec) -> Device:
    if spec.kind == "cuda":
        from .cuda import CudaDevice

        return CudaDevice(spec.index or 0)
    if spec.kind == "hip":
        from .hip import HipDevice

        return HipDevice(spec.index or 0)
    from .sim import SimDevice

    return SimDevice(vendor=spec.vendor)


def list_devices() -> list[Listed]:
    """Every device of this machine, and for a kind without one the reason. Opens each GPU for a moment."""
    found: list[Listed] = []
    for kind in ("cuda", "hip"):
        try:
            count = device_count(kind)
            if not count:
                found.append(Listed(kind, None, f"the {kind} driver works, but this process sees no device"))
            found += [_listed(f"{kind}:{index}") for index in range(count)]
        except DeviceUnavailable as error:
            found.append(Listed(kind, None, str(error)))
    return found + [_listed(f"sim:{vendor}") for vendor in VENDORS]


def _listed(spec: str) -> Listed:
    opened: Device | None = None
    try:
        opened = open_device(spec)
        return Listed(spec, opened.info, None, tuple(try_here(opened)))
    except (DeviceUnavailable, DriverError, ImportError) as error:
        return Listed(spec, None, str(error))
    finally:
        if opened is not None:
            opened.close()
