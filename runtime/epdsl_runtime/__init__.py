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
    from .bootstrap import BootstrapTimeout, CollectiveError, Disagreement, LauncherError, OutOfStep, RankFailed, Refused
    from .devices import list_devices, open_device
    from .driver_device import DeviceUnavailable, DriverError
    from .faults import DeviceAssertionError, KernelFault, PeerTimeout
    from .graph import CaptureError, Graph
    from .health import Health, JobTimeout
    from .launch import Launcher, LaunchError, Prepared, launcher
    from .peer_memory import SharingError
    from .rank import Rank, Symmetric
    from .sharing import NoSharing, Sharing
    from .spawn import init
    from .spawn_processes import SpawnError

_HOMES: dict[str, str] = {
    "Address": "binding",
    "Artifact": "artifact",
    "BootstrapTimeout": "bootstrap",
    "CaptureError": "graph",
    "CollectiveError": "bootstrap",
    "DeviceArray": "array",
    "DeviceAssertionError": "faults",
    "DeviceUnavailable": "driver_device",
    "Disagreement": "bootstrap",
    "DriverError": "driver_device",
    "Graph": "graph",
    "Health": "health",
    "JobTimeout": "health",
    "KernelFault": "faults",
    "LaunchError": "launch",
    "LauncherError": "bootstrap",
    "Launcher": "launch",
    "NoSharing": "sharing",
    "OutOfStep": "bootstrap",
    "Param": "artifact",
    "PeerTable": "array",
    "PeerTimeout": "faults",
    "Prepared": "launch",
    "Rank": "rank",
    "RankFailed": "bootstrap",
    "Refused": "bootstrap",
    "Sharing": "sharing",
    "SharingError": "peer_memory",
    "Site": "artifact",
    "Slot": "artifact",
    "SpawnError": "spawn_processes",
    "Symmetric": "rank",
    "init": "spawn",
    "launcher": "launch",
    "list_devices": "devices",
    "open_device": "devices",
}

VERSION = "0.1.0"
"""Ranks of one job run the same."""

__all__ = [
    "Address",
    "Artifact",
    "BootstrapTimeout",
    "CaptureError",
    "CollectiveError",
    "DeviceArray",
    "DeviceAssertionError",
    "DeviceUnavailable",
    "Disagreement",
    "DriverError",
    "Graph",
    "Health",
    "JobTimeout",
    "KernelFault",
    "LaunchError",
    "Launcher",
    "LauncherError",
    "NoSharing",
    "OutOfStep",
    "Param",
    "PeerTable",
    "PeerTimeout",
    "Prepared",
    "Rank",
    "RankFailed",
    "Refused",
    "Sharing",
    "SharingError",
    "Site",
    "Slot",
    "SpawnError",
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
