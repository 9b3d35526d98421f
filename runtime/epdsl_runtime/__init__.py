"""Runs compiled epdsl kernels: devices, memory shared between ranks, launches and what kernels report. Needs no compiler.

Names load on first use, so that importing the package loads neither NumPy nor a driver. `spawn` is `epdsl_runtime.spawn.spawn`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .array import DeviceArray, PeerTable
    from .artifact import Artifact, Param, Site, Slot
    from .binding import Address
    from .bootstrap import BootstrapTimeout, RankFailed
    from .devices import list_devices, open_device
    from .driver_device import DeviceUnavailable, DriverError
    from .faults import DeviceAssertionError, KernelFault, PeerTimeout
    from .launch import Launcher, LaunchError, Prepared, launcher
    from .rank import Rank, Symmetric
    from .spawn import init

_HOMES: dict[str, str] = {
    "Address": "binding",
    "Artifact": "artifact",
    "BootstrapTimeout": "bootstrap",
    "DeviceArray": "array",
    "DeviceAssertionError": "faults",
    "DeviceUnavailable": "driver_device",
    "DriverError": "driver_device",
    "KernelFault": "faults",
    "LaunchError": "launch",
    "Launcher": "launch",
    "Param": "artifact",
    "PeerTable": "array",
    "PeerTimeout": "faults",
    "Prepared": "launch",
    "Rank": "rank",
    "RankFailed": "bootstrap",
    "Site": "artifact",
    "Slot": "artifact",
    "Symmetric": "rank",
    "init": "spawn",
    "launcher": "launch",
    "list_devices": "devices",
    "open_device": "devices",
}

__all__ = [
    "Address",
    "Artifact",
    "BootstrapTimeout",
    "DeviceArray",
    "DeviceAssertionError",
    "DeviceUnavailable",
    "DriverError",
    "KernelFault",
    "LaunchError",
    "Launcher",
    "Param",
    "PeerTable",
    "PeerTimeout",
    "Prepared",
    "Rank",
    "RankFailed",
    "Site",
    "Slot",
    "Symmetric",
    "init",
    "launcher",
    "list_devices",
    "open_device",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f".{home}", __name__), name)
    return value
