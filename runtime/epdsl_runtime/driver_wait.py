"""How the host waits for a GPU: for a stream, an event or the whole device, never longer than a kernel that will not end."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from . import bounded_wait
from .faults import KernelFault
from .graph import refuse_in_capture

if TYPE_CHECKING:
    from .driver_device import DriverDevice
    from .protocol import Event, Stream


class DeviceWaits:
    """Waits for one device.

    Each returns when what it waits for is done, and raises what the kernels reported once that is not done `bounded_wait.GRACE_SECONDS`
    after the last record. From then on `ready` raises it again, until the kernel has ended after all.
    """

    def __init__(self, device: DriverDevice) -> None:
        self._device = device
        self._driver = device.driver
        self._streams = {0}
        # Streams with work since they were last waited for; those of prepared launches always count.
        self._active: set[int] = set()
        self._prepared: set[int] = set()
        self._foreign = False
        self._pending: Callable[[], bool] = lambda: True

    def add(self, stream: int) -> None:
        """A stream of ours, until `remove`."""
        self._streams.add(stream)

    def remove(self, stream: int) -> None:
        for known in (self._streams, self._active, self._prepared):
            known.discard(stream)

    def used(self, stream: int) -> None:
        """Work goes to a stream."""
        self._active.add(stream)

    def prepared(self, stream: int) -> None:
        """Work may go to a stream at any time from now on."""
        self._prepared.add(stream)

    def for_stream(self, stream: int) -> None:
        self._until(lambda: self._driver.stream_done(stream))

    def for_event(self, event: int) -> None:
        self._until(lambda: self._driver.event_done(event))

    def for_device(self) -> None:
        self.ready()
        active = self._active
        active |= self._prepared
        # A stream of another library may be gone when it would be asked about, and its graphs be replayed on yet another.
        self._foreign = self._foreign or not active <= self._streams
        if self._foreign:
            self._until(bounded_wait.on_a_thread(self._driver.synchronize))
            active.clear()
            return
        for stream in tuple(active):
            active.discard(stream)
            if not self._driver.stream_done(stream):
                active.add(stream)
                self.for_stream(stream)
                active.discard(stream)
        # Nothing of ours runs any more; other libraries' work may.
        self._driver.synchronize()

    def ready(self) -> None:
        """Raises what was reported while a kernel runs that does not end."""
        fault = self._device.given_up
        if fault is not None:
            if not self.ended():
                raise type(fault)(fault.report, fault.count, fault.detail)
            self._device.given_up = None

    def ended(self) -> bool:
        """Whether what was waited for in vain is done by now, if only by an error of the driver."""
        try:
            return self._pending()
        except RuntimeError:
            return True

    def _until(self, done: Callable[[], bool]) -> None:
        self.ready()
        device, diagnostics = self._device, self._device.diagnostics
        while not bounded_wait.wait(done, lambda: diagnostics.reported(device.context_words)):
            detail = _still_runs(device, diagnostics.reporters(device.context_words))
            try:
                diagnostics.check(device.context_words, idle=False, detail=detail)
                fault = diagnostics.last
            except KernelFault as new:
                fault = new
            # None: the only record is not complete yet.
            if fault is not None:
                self._pending = done
                device.given_up = type(fault)(fault.report, fault.count, detail)
                bounded_wait.remember(self)
                raise device.given_up

    def __repr__(self) -> str:
        return repr(self._device)


def _still_runs(device: DriverDevice, threads: list[tuple[int, int]]) -> str:
    if threads:
        shown = ", ".join(f"block {block} thread {thread}" for block, thread in threads[:4])
        more = f" and {len(threads) - 4} more" if len(threads) > 4 else ""
        after = f"{bounded_wait.GRACE_SECONDS:g} s after the last record (of {shown}{more})"
    else:
        after = f"{bounded_wait.OLD_GRACE_SECONDS:g} s after this was raised before"
    return (
        f"it, or a kernel queued behind it, still runs {after}:\n"
        "  its other threads wait for their own deadlines, or at a barrier for a thread that gave up, which no deadline ends.\n"
        f"  Until it ends, calls on {device!r} are refused with this error; if it never does, only the end of this process frees the device"
    )


class DriverStream:
    """A stream that does not wait for the default stream."""

    def __init__(self, device: DriverDevice) -> None:
        self._device = device
        self._handle = device.driver.stream_create()
        device.waits.add(self._handle)

    @property
    def handle(self) -> int:
        if not self._handle:
            # Work for it would go to the default stream.
            raise ValueError(f"a stream of {self._device!r} was closed; make another with device.stream()")
        return self._handle

    def synchronize(self) -> None:
        self._device.waits.for_stream(self._handle)

    def close(self) -> None:
        if self._handle:
            self._device.waits.remove(self._handle)
            self._device.driver.stream_destroy(self._handle)
            self._handle = 0


class DriverEvent:
    """A point in a stream, with a time."""

    def __init__(self, device: DriverDevice) -> None:
        self._device = device
        self._handle = device.driver.event_create()

    def record(self, stream: Stream | None = None) -> None:
        self._device.driver.event_record(self._handle, self._device.stream_handle(stream))

    def synchronize(self) -> None:
        refuse_in_capture(self._device, "a wait for an event")
        self._device.waits.for_event(self._handle)

    def elapsed_ms(self, earlier: Event) -> float:
        """Milliseconds from `earlier` to this event. Waits until both have happened."""
        driver = self._device.driver
        if not isinstance(earlier, DriverEvent):
            raise TypeError(f"{earlier!r} is no event of a {driver.kind} device")
        earlier.synchronize()
        self.synchronize()
        return driver.event_elapsed_ms(earlier._handle, self._handle)

    def close(self) -> None:
        if self._handle:
            self._device.driver.event_destroy(self._handle)
            self._handle = 0
