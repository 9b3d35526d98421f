"""The bootstrap of ranks that are processes: a hub in one of them, frames over TCP (see wire), standard library alone.

The hub never unpickles: it only hands payloads on.
"""

from __future__ import annotations

import contextlib
import pickle
import queue
import socket
import struct
import threading
import time
from typing import Any

from .bootstrap import DEFAULT_TIMEOUT, BootstrapTimeout, LauncherError, RankFailed, after, ranks_text
from .health import Activity, Health, Source, State, first_line
from .side import Side
from .standby import Answer, Standby, ask
from .wire import (
    ABORT,
    ACTIVITY,
    BYE,
    GATHER,
    HEADER,
    HEALTH,
    HELLO,
    SEND_SECONDS,
    SIDE,
    WHO,
    admit,
    connect,
    derived,
    listen,
    receive,
    send,
    tuned,
)

_WHO_SECONDS = 2.0
# How long what is to be told to ranks that do not read holds up the end of the hub.
_FLUSH_SECONDS = 1.0


class _Line:
    """The frames for one rank, sent in order by a thread of their own: a rank that does not read holds up nobody else."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.since = time.monotonic()
        self._frames: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="epdsl-hub-line", daemon=True)
        self._thread.start()

    def put(self, kind: int, source: int, sequence: int, payload: bytes = b"") -> None:
        self._frames.put(HEADER.pack(kind, source, sequence, len(payload)) + payload)

    def end(self) -> None:
        """No frame comes after those that were put."""
        self._frames.put(None)

    def join(self, seconds: float) -> None:
        self._thread.join(max(seconds, 0))

    def _write(self) -> None:
        while (frame := self._frames.get()) is not None:
            # A rank that cannot be reached is noticed by the thread that reads from it.
            with contextlib.suppress(OSError):
                self.connection.sendall(frame)


class Hub:
    """Accepts every rank's connection and hands on what they say. Lives in rank 0's process, or in the one that spawned the ranks.

    Every rank is told everything in one order: what is put on the lines is put on all of them under the lock. So a failure never overtakes
    a meeting that was complete before it.

    address  (host, port) to listen on; port 0 takes a free one
    """

    def __init__(self, size: int, token: bytes, address: tuple[str, int] = ("127.0.0.1", 0)) -> None:
        self.size = size
        self._token = token
        self._lock = threading.Lock()
        self._lines: dict[int, _Line] = {}
        self._gathered: dict[int, dict[int, bytes]] = {}
        # Ranks that no longer come to meetings, each with the reason where it is not that the job was done.
        self._left: dict[int, str] = {}
        self._leaves = threading.Condition(self._lock)
        self.failure: tuple[int, str] | None = None
        # What each rank said of its own failure.
        self._failures: dict[int, str] = {}
        self._refused: list[str] = []
        self._closing = False
        self._activities: dict[int, tuple[float, bytes]] = {}
        self._sides: set[socket.socket] = set()
        self._listener = listen(address, max(size, 16))
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        threading.Thread(target=self._accept, name="epdsl-hub", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), name="epdsl-hub-rank", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            rank = admit(tuned(connection), self._token)
        except (OSError, struct.error):
            rank = None
        if rank is not None and rank & SIDE:
            self._serve_side(rank - SIDE, connection)
            return
        if rank is None or not self._join(rank, connection):
            connection.close()
            return
        problem, why = "its process ended without closing the rank", ""
        try:
            while True:
                kind, _, sequence, payload = receive(connection, None)
                if kind == BYE:
                    problem, why = "", payload.decode(errors="replace")
                    break
                self._handle(rank, kind, sequence, payload)
        except OSError as error:
            problem = f"{problem} ({error})" if str(error) else problem
        if problem and not self._closing:
            self.abort(rank, problem, own=False)
        with self._lock:
            self._lines[rank].end()
            self._left[rank] = why or after(self.failure)
            self._leaves.notify_all()

    def _serve_side(self, rank: int, connection: socket.socket) -> None:
        with self._lock:
            self._sides.add(connection)
        with connection, contextlib.suppress(OSError):
            send(connection, HELLO, rank, 0)
            while True:
                kind, _, sequence, payload = receive(connection, None)
                if kind == ACTIVITY and 0 <= rank < self.size:
                    self._activities[rank] = (time.monotonic(), payload)
                elif kind == HEALTH:
                    send(connection, HEALTH, rank, sequence, pickle.dumps(self.health()))
        with self._lock:
            self._sides.discard(connection)

    def health(self) -> list[Health]:
        """What every rank last said that it does."""
        now = time.monotonic()
        with self._lock:
            failed, left = dict(self._failures), dict(self._left)
            came = {rank: line.since for rank, line in self._lines.items()}
            said = dict(self._activities)
        found: list[Health] = []
        for rank in range(self.size):
            heard, data = said.get(rank, (came.get(rank, now), b""))
            state: State = "running" if rank in came else "absent"
            if rank in failed:
                found.append(Health(rank, "failed", why=first_line(failed[rank])))
            elif rank in left:
                found.append(Health(rank, "left", why=left[rank]))
            else:
                found.append(Health(rank, state, Activity.read(data) if data else None, now - heard))
        return found

    def came(self, rank: int) -> bool:
        """Whether the rank has come."""
        with self._lock:
            return rank in self._lines

    def _join(self, rank: int, connection: socket.socket) -> bool:
        with self._lock:
            if not 0 <= rank < self.size or rank in self._lines:
                reason = f"rank {rank} came twice" if rank in self._lines else f"rank {rank} is not one of {self.size}"
                self._refused.append(reason)
                with contextlib.suppress(OSError):
                    send(connection, ABORT, rank, 0, f"{reason}; check the launcher's rank and size".encode())
                return False
            line = self._lines[rank] = _Line(connection)
            line.put(HELLO, rank, 0, str(self.size).encode())
            if self.failure is not None:
                line.put(ABORT, self.failure[0], 0, self.failure[1].encode())
        return True

    def _handle(self, rank: int, kind: int, sequence: int, payload: bytes) -> None:
        if kind == ABORT:
            self.abort(rank, payload.decode(errors="replace"))
        elif kind == WHO:
            with self._lock:
                came = self._gathered.get(sequence, {})
                missing = [r for r in range(self.size) if r not in came]
                text = "; ".join((f"rank {', '.join(map(str, missing))}", *(f"{reason}, and was refused" for reason in self._refused[:4])))
                self._lines[rank].put(WHO, rank, sequence, text.encode())
        elif kind == GATHER:
            with self._lock:
                values = self._gathered.setdefault(sequence, {})
                values[rank] = payload
                if len(values) == self.size:
                    del self._gathered[sequence]
                    bundle = pickle.dumps([values[r] for r in range(self.size)])
                    for receiver, line in self._lines.items():
                        line.put(GATHER, receiver, sequence, bundle)

    def abort(self, rank: int, text: str, own: bool = True) -> None:
        """Records the first failure and tells every rank, also those that connect later.

        own  whether the rank says so itself; else only its end was seen, which after another's failure is no failure of its own
        """
        with self._lock:
            if own or self.failure is None:
                self._failures.setdefault(rank, text)
            if self.failure is not None:
                return
            self.failure = (rank, text)
            for receiver, line in self._lines.items():
                if receiver != rank:
                    line.put(ABORT, rank, 0, text.encode())

    def close(self, linger: float = 0.0) -> None:
        """Stops. Waits up to `linger` seconds for ranks that are still connected, or have not come."""
        with self._leaves:
            self._leaves.wait_for(lambda: len(self._left) == self.size, linger)
        self._closing = True
        # Shutting down first wakes the thread in accept; closing alone would not.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            lines, sides = list(self._lines.values()), list(self._sides)
        deadline = time.monotonic() + _FLUSH_SECONDS
        for line in lines:
            line.end()
        for line in lines:
            line.join(deadline - time.monotonic())
        with self._lock:
            for connection in (*(line.connection for line in lines), *sides):
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
                connection.close()


class SocketBootstrap:
    """A rank that is a process. See Bootstrap.

    address  where the hub listens
    hub      the hub when it lives in this process; closed with this rank, after the others have left
    timeout  seconds any wait may take, the connection included

    Raises LauncherError when the hub is one of another number of ranks, and what `wire.connect` raises.
    """

    def __init__(
        self, index: int, size: int, address: tuple[str, int], token: bytes, hub: Hub | None = None, timeout: float = DEFAULT_TIMEOUT
    ) -> None:
        self._index = index
        self._size = size
        self._token = token
        self._hub = hub
        self._timeout = timeout
        self._successor: SocketBootstrap | None = None
        self._sequence = 0
        self._failure: RankFailed | None = None
        self._closed = False
        self._lock = threading.Lock()
        self._gave_up = False
        self._connection, told = connect(index, address, token, timeout)
        if int(told) != size:
            text = f"rank {index} was started as one of {size} ranks, and rank 0 as one of {int(told)}; start all with the same number"
            self.abort(text)
            self._connection.close()
            raise LauncherError("EP316", text)
        self._side = Side(index, address, token)
        self._standby = Standby(self._connection.getsockname()[0], token)
        # Where each rank is to be asked, as it says in the first meeting.
        self._standbys: list[tuple[str, int]] = []

    @property
    def index(self) -> int:
        return self._index

    @property
    def size(self) -> int:
        return self._size

    def allgather(self, value: Any) -> list[Any]:
        with self._lock:
            self._raise_failure()
            payload = pickle.dumps(value if self._standbys else (self._standby.address, value))
            sequence = self._sequence
            self._sequence += 1
            deadline = time.monotonic() + self._timeout
            # A hub that is gone may have told why before it went: what it sent is read in any case.
            with contextlib.suppress(OSError):
                send(self._connection, GATHER, self._index, sequence, payload)
            bundle = self._await(GATHER, sequence, deadline)
            values = [pickle.loads(part) for part in pickle.loads(bundle)]
            if not self._standbys:
                self._standbys = [address for address, _ in values]
                values = [value for _, value in values]
        return values

    def _await(self, wanted: int, sequence: int, deadline: float) -> bytes:
        while True:
            try:
                kind, rank, number, payload = receive(self._connection, deadline)
            except TimeoutError:
                self._gave_up = True
                raise BootstrapTimeout(
                    "EP311", f"rank {self._index} waited {self._timeout:g} s for the other ranks; missing: {self._missing(sequence)}"
                ) from None
            except OSError as error:
                self._fail(0, f"the rendezvous is gone: its process ended ({error})")
                raise AssertionError from error
            if kind == ABORT:
                self._fail(rank, payload.decode(errors="replace"))
            if kind == wanted and number == sequence:
                return payload

    def _missing(self, sequence: int) -> str:
        with contextlib.suppress(OSError):
            send(self._connection, WHO, self._index, sequence)
            deadline = time.monotonic() + _WHO_SECONDS
            while True:
                kind, rank, number, payload = receive(self._connection, deadline)
                if kind == ABORT:
                    self._fail(rank, payload.decode(errors="replace"))
                if kind == WHO and number == sequence:
                    return payload.decode()
        return "unknown, the rendezvous does not answer"

    def _fail(self, rank: int, text: str) -> None:
        self._failure = RankFailed(rank, text)
        raise self._failure

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise RankFailed(self._failure.rank, self._failure.text)
        if self._closed:
            raise RuntimeError(f"rank {self._index} is closed; it can no longer meet the others")

    @property
    def failed(self) -> bool:
        """Whether another rank's failure has been raised here."""
        return self._failure is not None if self._successor is None else self._successor.failed

    def barrier(self) -> None:
        self.allgather(None)

    def without(self, gone: tuple[int, ...], timeout: float | None = None) -> SocketBootstrap:
        if not self._standbys:
            raise RuntimeError(f"rank {self._index}: the ranks have not met yet, so nobody knows where to find the others")
        deadline = time.monotonic() + (self._timeout if timeout is None else timeout)
        left = [rank for rank in range(self._size) if rank not in gone]
        token = derived(self._token, f"{self._standby.attempts} {gone}")
        hub = Hub(len(left), token, (self._standby.address[0], 0)) if left[0] == self._index else None
        try:
            where = None if hub is None else hub.address
            attempt = self._standby.answer(Answer(gone, where))
            for rank in left:
                if rank != self._index:
                    where = ask(self._index, rank, self._standbys[rank], self._token, attempt, deadline, gone).hub or where
            assert where is not None
            made = SocketBootstrap(left.index(self._index), len(left), where, token, hub, max(deadline - time.monotonic(), 0.001))
            made.barrier()
        except BaseException:
            if hub is not None:
                hub.close()
            raise
        made._timeout = self._timeout
        self._leave(0.0, f"goes on without {ranks_text(gone)}")
        self._successor = made
        return made

    def abort(self, text: str) -> None:
        if self._successor is not None:
            self._successor.abort(text)
            return
        with contextlib.suppress(OSError):
            send(self._connection, ABORT, self._index, 0, text.encode())

    def check(self) -> None:
        with self._lock:
            self._raise_failure()
            try:
                waiting = self._waiting()
            except OSError as error:
                self._fail(0, f"the rendezvous is gone: its process ended ({error})")
                raise AssertionError from error
            if waiting is not None and len(waiting) in (0, HEADER.size):
                self._await(ABORT, 0, time.monotonic() + SEND_SECONDS)

    def _waiting(self) -> bytes | None:
        """What has come and was not read, up to a header; None for nothing, empty at the end. Raises OSError when it broke."""
        try:
            self._connection.settimeout(0)
            return self._connection.recv(HEADER.size, socket.MSG_PEEK)
        except BlockingIOError:
            return None

    def report(self, source: Source) -> None:
        self._side.begin(source)

    def health(self) -> list[Health]:
        if self._successor is not None:
            return self._successor.health()
        # In a meeting, another thread holds it and hears of the end by itself.
        if self._lock.acquire(blocking=False):
            try:
                gone = not self._closed and self._waiting() == b""
            except OSError:
                gone = True
            finally:
                self._lock.release()
            if gone:
                raise RankFailed(0, "the rendezvous is gone: its process ended")
        return self._side.ask()

    def close(self) -> None:
        """Leaves the job in order, or the one that it has become. Rank 0's process waits a few seconds for the others to leave."""
        if self._successor is not None:
            self._successor.close()
        if not self._closed:
            self._leave(0.5 if self._failure else 1.0 if self._gave_up else 10.0)

    def _leave(self, linger: float, why: str = "") -> None:
        self._closed = True
        self._standby.close()
        self._side.close()
        with contextlib.suppress(OSError):
            send(self._connection, BYE, self._index, 0, why.encode())
        if self._hub is not None:
            self._hub.close(linger)
        self._connection.close()
