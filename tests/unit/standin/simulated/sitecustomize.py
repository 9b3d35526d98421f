"""Has the stand-in for HIP run kernels, for the tests of tests/sim: Python imports this at its start when the folder is on its path.

The device says that it is the simulator's AMD device, so kernels are compiled for that, as code of the host. All of launching goes through
the bindings and the stand-in (driver.c), which hands a launch to the functions here; they give it to the simulator's machine of a process.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
from dataclasses import replace
from typing import Any

from epdsl_runtime.artifact import Artifact, Slot
from epdsl_runtime.driver_device import DriverDevice
from epdsl_runtime.hip import HipDriver
from epdsl_runtime.protocol import DeviceInfo

Start = ctypes.CFUNCTYPE(
    None, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_uint), ctypes.POINTER(ctypes.c_void_p)
)
Replay = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_int)
Busy = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)


class Machine:
    """What runs the kernels of this process: a simulated device for each of the stand-in's, a stream for each of its streams."""

    def __init__(self) -> None:
        self._kernels: list[Artifact] = []
        self._devices: dict[int, Any] = {}
        self._streams: dict[int, Any] = {}
        self._recorded: dict[int, list[tuple[int, Any]]] = {}
        self._held = (Start(self.start), Replay(self.replay), Busy(self.busy))

    def connect(self) -> None:
        library = ctypes.CDLL("libamdhip64.so")
        library.standin_simulate(*self._held)
        # The process ends after Python has.
        atexit.register(library.standin_simulate, None, None, None)

    def image(self, artifact: Artifact) -> bytes:
        """What stands for the kernel's code."""
        self._kernels.append(artifact)
        return f"SIMULATED {len(self._kernels)} {artifact.name} \n".encode()

    def device(self, number: int) -> Any:
        from epdsl_runtime.sim_process import ProcessDevice

        if number not in self._devices:
            self._devices[number] = ProcessDevice("amd", number, job=os.environ["STANDIN_DIR"])
        return self._devices[number]

    def start(self, kernel: int, number: int, place: int, recording: int, dims: Any, values: Any) -> None:
        from epdsl_runtime.parameters import ParameterBlock
        from epdsl_runtime.sim import SimFunction
        from epdsl_runtime.sim_engine import Launch

        artifact, device = self._kernels[kernel - 1], self.device(number)
        parameters = ParameterBlock((*artifact.slots, Slot("context", "u64", 8)))
        for index, (slot, offset) in enumerate(zip(parameters.slots, parameters.offsets, strict=True)):
            ctypes.memmove(parameters.base + offset, values[index], slot.nbytes)
        x, y, z, bx, by, bz, shared = dims[:7]
        per_sm = SimFunction(device, artifact).blocks_per_sm(bx * by * bz, shared - artifact.shared_bytes)
        made = Launch(device, artifact, (x, y, z), (bx, by, bz), shared, parameters, device.info.num_sms * per_sm, per_sm)
        if recording:
            self._recorded.setdefault(recording, []).append((number, made))
        else:
            self._enqueue(device, place, made)

    def replay(self, recording: int, place: int) -> None:
        for number, made in self._recorded.get(recording, ()):
            self._enqueue(self.device(number), place, made.again())

    def _enqueue(self, device: Any, place: int, made: Any) -> None:
        device.diagnostics.register(made.artifact)
        if place not in self._streams:
            self._streams[place] = device.stream()
        device.enqueue(self._streams[place], made)

    def busy(self, place: int) -> int:
        stream = self._streams.get(place)
        return int(stream is not None and bool(stream.queue))


machine = Machine()
connect = functools.cache(machine.connect)
_init, _info, _load = HipDriver.__init__, HipDriver.info, DriverDevice.load


def init(self: HipDriver, index: int = 0) -> None:
    _init(self, index)
    connect()


def info(self: HipDriver) -> DeviceInfo:
    return replace(_info(self), target="sim:amd")


def load(self: DriverDevice, artifact: Artifact) -> Any:
    plain = self.driver.module_load
    self.driver.module_load = lambda _, name: plain(machine.image(artifact), name)
    try:
        return _load(self, artifact)
    finally:
        self.driver.module_load = plain


HipDriver.__init__, HipDriver.info, DriverDevice.load = init, info, load
