"""A library older than the bindings: python older.py cuda|hip. Prints what it saw."""

from __future__ import annotations

from conformance import KIND, PARAMS, WARP, artifact, log, opened, raised
from epdsl_runtime.array import allocate_array
from epdsl_runtime.devices import list_devices
from epdsl_runtime.driver_device import DeviceUnavailable
from epdsl_runtime.launch import launcher


def without_func_load() -> None:
    """Before CUDA 12.4 the code is loaded with the function, and there is no call for it."""
    device = opened(0)
    launcher(device, artifact("copy", PARAMS)).launch(grid=1, block=WARP, args=(allocate_array(device, (8,), "f32"), 0, 0, 0, 0))
    assert log()[-1].startswith("cuLaunchKernel copy ")
    device.close()
    print("launches")


def without_properties() -> None:
    """Before HIP 6 a device had other properties: no device, and the reason says so."""
    reasons = {entry.reason for entry in list_devices() if entry.spec.startswith("hip:")}
    assert len(reasons) == 2 and all(
        "libamdhip64.so is older than the bindings and has no hipGetDeviceProperties" in str(r) for r in reasons
    )
    print(raised(DeviceUnavailable, lambda: opened(0)))


if __name__ == "__main__":
    {"cuda": without_func_load, "hip": without_properties}[KIND]()
