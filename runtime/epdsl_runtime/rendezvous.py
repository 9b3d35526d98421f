"""The bootstrap of ranks that are processes: a hub in one of them, length-prefixed frames over TCP, standard library alone.

A frame is a header (kind, rank, sequence number, length) and a payload. Both ends prove that they know the job's token before anything
is read as a pickle. The hub never unpickles: it only hands payloads on.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import pickle
import secrets
import socket
import struct
import threading
import time
from typing import Any

from .bootstrap import DEFAULT_TIMEOUT, BootstrapTimeout, RankFailed
from .health import Activity, Health, Source, State, first_line

_HEADER = struct.Struct("!BIQQ")
_HELLO, _GATHER, _ABORT, _BYE, _WHO, _ACTIVITY, _HEALTH = range(1, 8)
# A second connection of a rank, over which it says what it does, adds this to its number.
_SIDE = 1 << 31
_NONCE_BYTES = 32
_HANDSHAKE_SECONDS = 10.0
_SEND_SECONDS = 30.0
_WHO_SECONDS = 2.0
_TELL_SECONDS = 0.5
MAX_FRAME_BYTES = 1 << 34

Frame = tuple[int, int, int, bytes]


def _digest(token: bytes, role: bytes, nonce: bytes) -> bytes:
    return hmac.new(token, role + nonce, hashlib.sha256).digest()


def _receive_exactly(connection: socket.socket, count: int, deadline: float | None) -> bytes:
    """Raises TimeoutError at the deadline (None: never), ConnectionError at the end of the stream."""
    parts: list[bytes] = []
    while count:
        remaining = None if deadline is None else deadline - time.monotonic()
        if remaining is not None and remaining <= 0:
            raise TimeoutError
        connection.settimeout(remaining)
        part = connection.recv(min(count, 1 << 20))
        if not part:
            raise ConnectionError("the connection was closed")
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def _receive(connection: socket.socket, deadline: float | None) -> Frame:
    kind, rank, sequence, length = _HEADER.unpack(_receive_exactly(connection, _HEADER.size, deadline))
    if length > MAX_FRAME_BYTES:
        raise ConnectionError(f"a frame of {length} bytes; at most {MAX_FRAME_BYTES} are accepted")
    return kind, rank, sequence, _receive_exactly(connection, length, deadline)


def _send(connection: socket.socket, kind: int, rank: int, sequence: int, payload: bytes = b"") -> None:
    connection.settimeout(_SEND_SECONDS)
    connection.sendall(_HEADER.pack(kind, rank, sequence, len(payload)) + payload)


class Hub:
    """Accepts every rank's connection and hands on what they say. Lives in rank 0's process, or in the one that spawned the ranks.

    address  (host, port) to listen on; port 0 takes a free one
    """

    def __init__(self, size: int, token: bytes, address: tuple[str, int] = ("127.0.0.1", 0)) -> None:
        self.size = size
        self._token = token
        self._lock = threading.Lock()
        self._connections: dict[int, socket.socket] = {}
        self._send_locks: dict[int, threading.Lock] = {}
        self._gathered: dict[int, dict[int, bytes]] = {}
        self._left: set[int] = set()
        self._all_left = threading.Event()
        self.failure: tuple[int, str] | None = None
        self._closing = False
        self._activities: dict[int, tuple[float, bytes]] = {}
        self._sides: set[socket.socket] = set()
        self._listener = socket.create_server(address, backlog=max(size, 16))
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        threading.Thread(target=self._accept, name="epdsl-hub", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), name="epdsl-hub-rank", daemon=True).start()

    def _handshake(self, connection: socket.socket) -> int | None:
        deadline = time.monotonic() + _HANDSHAKE_SECONDS
        nonce = secrets.token_bytes(_NONCE_BYTES)
        connection.sendall(nonce)
        answer = _receive_exactly(connection, 32 + _NONCE_BYTES + 4, deadline)
        if not hmac.compare_digest(answer[:32], _digest(self._token, b"rank", nonce)):
            return None
        connection.sendall(_digest(self._token, b"hub", answer[32 : 32 + _NONCE_BYTES]))
        return struct.unpack("!I", answer[-4:])[0]

    def _serve(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        try:
            rank = self._handshake(connection)
        except (OSError, struct.error):
            rank = None
        if rank is not None and rank & _SIDE:
            self._serve_side(rank - _SIDE, connection)
            return
        if rank is None or not self._join(rank, connection):
            connection.close()
            return
        problem = "its process ended without closing the rank"
        try:
            while True:
                kind, _, sequence, payload = _receive(connection, None)
                if kind == _BYE:
                    problem = ""
                    break
                self._handle(rank, kind, sequence, payload)
        except OSError as error:
            problem = f"{problem} ({error})" if str(error) else problem
        if problem and not self._closing:
            self.abort(rank, problem)
        with self._lock:
            self._left.add(rank)
            if len(self._left) == self.size:
                self._all_left.set()

    def _serve_side(self, rank: int, connection: socket.socket) -> None:
        with self._lock:
            self._sides.add(connection)
        with connection, contextlib.suppress(OSError):
            _send(connection, _HELLO, rank, 0)
            while True:
                kind, _, sequence, payload = _receive(connection, None)
                if kind == _ACTIVITY and 0 <= rank < self.size:
                    self._activities[rank] = (time.monotonic(), payload)
                elif kind == _HEALTH:
                    _send(connection, _HEALTH, rank, sequence, pickle.dumps(self.health()))
        with self._lock:
            self._sides.discard(connection)

    def health(self) -> list[Health]:
        """What every rank last said that it does."""
        now = time.monotonic()
        with self._lock:
            failure, left, came = self.failure, set(self._left), set(self._connections)
            said = dict(self._activities)
        found: list[Health] = []
        for rank in range(self.size):
            heard, data = said.get(rank, (now, b""))
            state: State = "running" if rank in came else "absent"
            if failure is not None and failure[0] == rank:
                found.append(Health(rank, "failed", why=first_line(failure[1])))
            elif rank in left:
                found.append(Health(rank, "left"))
            else:
                found.append(Health(rank, state, Activity.read(data) if data else None, now - heard))
        return found

    def _join(self, rank: int, connection: socket.socket) -> bool:
        with self._lock:
            if not 0 <= rank < self.size or rank in self._connections:
                reason = f"rank {rank} came twice" if rank in self._connections else f"rank {rank} is not one of {self.size}"
                with contextlib.suppress(OSError):
                    _send(connection, _ABORT, rank, 0, f"{reason}; check the launcher's rank and size".encode())
                return False
            self._connections[rank] = connection
            self._send_locks[rank] = threading.Lock()
            failure = self.failure
        self._to(rank, _HELLO, rank, 0)
        if failure is not None:
            self._to(rank, _ABORT, failure[0], 0, failure[1].encode())
        return True

    def _to(self, rank: int, kind: int, source: int, sequence: int, payload: bytes = b"") -> None:
        # A rank that cannot be reached is noticed by the thread that reads from it.
        with self._send_locks[rank], contextlib.suppress(OSError):
            connection = self._connections[rank]
            connection.sendall(_HEADER.pack(kind, source, sequence, len(payload)) + payload)

    def _handle(self, rank: int, kind: int, sequence: int, payload: bytes) -> None:
        if kind == _ABORT:
            self.abort(rank, payload.decode(errors="replace"))
        elif kind == _WHO:
            with self._lock:
                came = self._gathered.get(sequence, {})
                missing = [r for r in range(self.size) if r not in came]
            self._to(rank, _WHO, rank, sequence, ", ".join(map(str, missing)).encode())
        elif kind == _GATHER:
            with self._lock:
                values = self._gathered.setdefault(sequence, {})
                values[rank] = payload
                complete = len(values) == self.size
                if complete:
                    del self._gathered[sequence]
            if complete:
                bundle = pickle.dumps([values[r] for r in range(self.size)])
                for receiver in range(self.size):
                    self._to(receiver, _GATHER, receiver, sequence, bundle)

    def abort(self, rank: int, text: str) -> None:
        """Records the first failure and tells every rank, also those that connect later."""
        with self._lock:
            if self.failure is not None:
                return
            self.failure = (rank, text)
            receivers = [r for r in self._connections if r != rank]
        for receiver in receivers:
            self._to(receiver, _ABORT, rank, 0, text.encode())

    def close(self, linger: float = 0.0) -> None:
        """Stops. Waits up to `linger` seconds for ranks that are still connected."""
        if linger:
            self._all_left.wait(linger)
        self._closing = True
        # Shutting down first wakes the thread in accept; closing alone would not.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for connection in (*self._connections.values(), *self._sides):
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
                connection.close()


def connect(index: int, address: tuple[str, int], token: bytes, timeout: float, side: bool = False) -> socket.socket:
    """A rank's connection to the hub, once both have proved that they know the token.

    Raises BootstrapTimeout when there is no hub within `timeout` seconds, ConnectionError when it refuses.
    """
    deadline = time.monotonic() + timeout
    pause = 0.02
    while True:
        try:
            connection = socket.create_connection(address, timeout=max(deadline - time.monotonic(), 0.001))
            break
        except OSError as error:
            if time.monotonic() + pause > deadline:
                raise BootstrapTimeout(
                    f"rank {index} could not reach the rendezvous at {address[0]}:{address[1]} in {timeout:g} s: {error}"
                ) from error
            time.sleep(pause)
            pause = min(pause * 2, 0.5)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    try:
        theirs = _receive_exactly(connection, _NONCE_BYTES, deadline)
        nonce = secrets.token_bytes(_NONCE_BYTES)
        connection.sendall(_digest(token, b"rank", theirs) + nonce + struct.pack("!I", index | (_SIDE if side else 0)))
        proof = _receive_exactly(connection, 32, deadline)
        if not hmac.compare_digest(proof, _digest(token, b"hub", nonce)):
            raise ConnectionError("it does not know this job's token")
        kind, _, _, payload = _receive(connection, deadline)
        if kind != _HELLO:
            raise ConnectionError(payload.decode(errors="replace"))
    except OSError as error:
        connection.close()
        reason = str(error) or "no answer"
        where = f"the rendezvous at {address[0]}:{address[1]}"
        hint = "another job may be using the port (EPDSL_PORT chooses it)"
        raise ConnectionError(f"rank {index} was refused by {where}: {reason}; {hint}") from error
    return connection


class SocketBootstrap:
    """A rank that is a process. See Bootstrap.

    address  where the hub listens
    hub      the hub when it lives in this process; closed with this rank, after the others have left
    timeout  seconds any wait may take, the connection included
    """

    def __init__(
        self, index: int, size: int, address: tuple[str, int], token: bytes, hub: Hub | None = None, timeout: float = DEFAULT_TIMEOUT
    ) -> None:
        self._index = index
        self._size = size
        self._hub = hub
        self._timeout = timeout
        self._sequence = 0
        self._failure: RankFailed | None = None
        self._closed = False
        self._lock = threading.Lock()
        self._connection = connect(index, address, token, timeout)
        self._side = _Side(index, address, token)

    @property
    def index(self) -> int:
        return self._index

    @property
    def size(self) -> int:
        return self._size

    def allgather(self, value: Any) -> list[Any]:
        payload = pickle.dumps(value)
        with self._lock:
            self._raise_failure()
            sequence = self._sequence
            self._sequence += 1
            deadline = time.monotonic() + self._timeout
            # A hub that is gone may have told why before it went: what it sent is read in any case.
            with contextlib.suppress(OSError):
                _send(self._connection, _GATHER, self._index, sequence, payload)
            bundle = self._await(_GATHER, sequence, deadline)
        return [pickle.loads(part) for part in pickle.loads(bundle)]

    def _await(self, wanted: int, sequence: int, deadline: float) -> bytes:
        while True:
            try:
                kind, rank, number, payload = _receive(self._connection, deadline)
            except TimeoutError:
                raise BootstrapTimeout(
                    f"rank {self._index} waited {self._timeout:g} s for the other ranks; missing: {self._missing(sequence)}"
                ) from None
            except OSError as error:
                self._fail(0, f"the rendezvous is gone: its process ended ({error})")
                raise AssertionError from error
            if kind == _ABORT:
                self._fail(rank, payload.decode(errors="replace"))
            if kind == wanted and number == sequence:
                return payload

    def _missing(self, sequence: int) -> str:
        with contextlib.suppress(OSError):
            _send(self._connection, _WHO, self._index, sequence)
            deadline = time.monotonic() + _WHO_SECONDS
            while True:
                kind, _, number, payload = _receive(self._connection, deadline)
                if kind == _WHO and number == sequence:
                    return f"rank {payload.decode()}"
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
        """Whether another rank's failure has come in."""
        return self._failure is not None

    def barrier(self) -> None:
        self.allgather(None)

    def abort(self, text: str) -> None:
        with contextlib.suppress(OSError):
            _send(self._connection, _ABORT, self._index, 0, text.encode())

    def check(self) -> None:
        with self._lock:
            self._raise_failure()
            try:
                self._connection.settimeout(0)
                waiting = self._connection.recv(_HEADER.size, socket.MSG_PEEK)
            except BlockingIOError:
                return
            except OSError as error:
                self._fail(0, f"the rendezvous is gone: its process ended ({error})")
                raise AssertionError from error
            if len(waiting) in (0, _HEADER.size):
                self._await(_ABORT, 0, time.monotonic() + _SEND_SECONDS)

    def report(self, source: Source) -> None:
        self._side.begin(source)

    def health(self) -> list[Health]:
        return self._side.ask()

    def close(self) -> None:
        """Leaves the job in order. Rank 0's process waits a few seconds for the others to leave."""
        if self._closed:
            return
        self._closed = True
        self._side.close()
        with contextlib.suppress(OSError):
            _send(self._connection, _BYE, self._index, 0)
        if self._hub is not None:
            self._hub.close(linger=0.5 if self._failure else 10.0)
        self._connection.close()


class _Side:
    """A rank's second connection: it says what it does, and asks what the others do, whatever its other threads wait for."""

    def __init__(self, index: int, address: tuple[str, int], token: bytes) -> None:
        self._index, self._address, self._token = index, address, token
        self._connection: socket.socket | None = None
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._source: Source | None = None
        self._asked = 0

    def begin(self, source: Source) -> None:
        self._source = source
        threading.Thread(target=self._tell, name="epdsl-health", daemon=True).start()

    def _tell(self) -> None:
        with contextlib.suppress(OSError):
            while not self._ended.wait(_TELL_SECONDS):
                with self._lock:
                    if not self._ended.is_set():
                        self._say()

    def _say(self) -> None:
        if self._connection is None:
            self._connection = connect(self._index, self._address, self._token, _HANDSHAKE_SECONDS, side=True)
        if self._source is not None:
            _send(self._connection, _ACTIVITY, self._index, 0, bytes(self._source()))

    def ask(self) -> list[Health]:
        with self._lock:
            try:
                self._say()
                assert self._connection is not None
                self._asked += 1
                _send(self._connection, _HEALTH, self._index, self._asked)
                deadline = time.monotonic() + _WHO_SECONDS
                while True:
                    kind, _, number, payload = _receive(self._connection, deadline)
                    if kind == _HEALTH and number == self._asked:
                        return pickle.loads(payload)
            except OSError as error:
                raise RankFailed(0, f"the rendezvous does not answer ({str(error) or 'timeout'}); its process may have ended") from error

    def close(self) -> None:
        self._ended.set()
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None
