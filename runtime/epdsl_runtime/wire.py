"""What ranks' processes say to each other over TCP: length-prefixed frames, after both ends have proved that they know the job's token.

A frame is a header (kind, rank, sequence number, length) and a payload. Nothing is read as a pickle before the proof.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import os
import secrets
import socket
import struct
import time

from .bootstrap import BootstrapTimeout, LauncherError, Refused

HEADER = struct.Struct("!BIQQ")
HELLO, GATHER, ABORT, BYE, WHO, ACTIVITY, HEALTH = range(1, 8)
# A second connection of a rank, over which it says what it does, adds this to its number.
SIDE = 1 << 31
_NONCE_BYTES = 32
HANDSHAKE_SECONDS = 10.0
SEND_SECONDS = 30.0
# A rendezvous that accepts a connection answers at once, unless its process is kept from running.
_ANSWER_SECONDS = 60.0
MAX_FRAME_BYTES = 1 << 34

Frame = tuple[int, int, int, bytes]


def _digest(token: bytes, role: bytes, nonce: bytes) -> bytes:
    return hmac.new(token, role + nonce, hashlib.sha256).digest()


def derived(token: bytes, text: str) -> bytes:
    """The token of a job that this one has become."""
    return _digest(token, b"derived", text.encode())


def receive_exactly(connection: socket.socket, count: int, deadline: float | None) -> bytes:
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


def receive(connection: socket.socket, deadline: float | None) -> Frame:
    """The next frame. Raises TimeoutError when none has begun by the deadline (None: waits for ever), ConnectionError at the end."""
    first = receive_exactly(connection, 1, deadline)
    # Given up in its middle, the rest would be read as the next frame.
    whole = None if deadline is None else max(deadline, time.monotonic() + SEND_SECONDS)
    kind, rank, sequence, length = HEADER.unpack(first + receive_exactly(connection, HEADER.size - 1, whole))
    if length > MAX_FRAME_BYTES:
        raise ConnectionError(f"a frame of {length} bytes; at most {MAX_FRAME_BYTES} are accepted")
    return kind, rank, sequence, receive_exactly(connection, length, whole)


def send(connection: socket.socket, kind: int, rank: int, sequence: int, payload: bytes = b"") -> None:
    connection.settimeout(SEND_SECONDS)
    connection.sendall(HEADER.pack(kind, rank, sequence, len(payload)) + payload)


def admit(connection: socket.socket, token: bytes) -> int | None:
    """The number of the rank that came, None when it does not know the token. Raises OSError or struct.error for what is no rank."""
    deadline = time.monotonic() + HANDSHAKE_SECONDS
    nonce = secrets.token_bytes(_NONCE_BYTES)
    connection.sendall(nonce)
    answer = receive_exactly(connection, 32 + _NONCE_BYTES + 4, deadline)
    if not hmac.compare_digest(answer[:32], _digest(token, b"rank", nonce)):
        return None
    connection.sendall(_digest(token, b"hub", answer[32 : 32 + _NONCE_BYTES]))
    return struct.unpack("!I", answer[-4:])[0]


def tuned(connection: socket.socket) -> socket.socket:
    """The connection, set for short messages and to notice a machine that is gone."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return connection


def place(address: tuple[str, int]) -> str:
    """An address as it is written: host:port, an IPv6 one in brackets."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listen(address: tuple[str, int], backlog: int) -> socket.socket:
    """A listener at (host, port); an empty host is every address of this machine, IPv6 ones too; port 0 takes a free one.

    Raises LauncherError saying where and why.
    """
    host, port = address
    try:
        if not host and socket.has_dualstack_ipv6():
            # An IPv6 that is switched off can be seen by no other means.
            with contextlib.suppress(OSError):
                return socket.create_server(("", port), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server(address, family=family, backlog=backlog)
    except OSError as error:
        text = f"this process cannot listen for the other ranks at {place((host or '*', port))}: {os.strerror(error.errno or 0)}"
        if error.errno == errno.EADDRINUSE:
            text += "; another program, another job or another rank 0 does. Set EPDSL_PORT to a free port, the same on every rank"
        raise LauncherError("EP316", text) from error


def greet(connection: socket.socket, number: int, token: bytes, deadline: float) -> bytes:
    """The other side of `admit`, until that has said hello, and what it says with it. Raises OSError when it does not, Refused with why."""
    theirs = receive_exactly(connection, _NONCE_BYTES, deadline)
    nonce = secrets.token_bytes(_NONCE_BYTES)
    connection.sendall(_digest(token, b"rank", theirs) + nonce + struct.pack("!I", number))
    proof = receive_exactly(connection, 32, deadline)
    if not hmac.compare_digest(proof, _digest(token, b"hub", nonce)):
        raise ConnectionError("it does not know this job's token")
    kind, _, _, payload = receive(connection, deadline)
    if kind != HELLO:
        raise Refused("EP316", payload.decode(errors="replace"))
    return payload


def connect(index: int, address: tuple[str, int], token: bytes, timeout: float, side: bool = False) -> tuple[socket.socket, bytes]:
    """A rank's connection to the hub, once both have proved that they know the token, and what the hub said with its hello.

    Raises BootstrapTimeout when no hub answers within `timeout` seconds, Refused when it is another job's or has no place for the rank.
    """
    deadline = time.monotonic() + timeout
    where = f"the rendezvous at {place(address)}"
    connection = _reach(index, address, deadline, timeout)
    try:
        answer = greet(connection, index | (SIDE if side else 0), token, min(deadline, time.monotonic() + _ANSWER_SECONDS))
    except OSError as error:
        connection.close()
        if isinstance(error, Refused):
            raise Refused("EP316", f"rank {index} was refused by {where}: {error.message}") from None
        if isinstance(error, TimeoutError):
            text = "accepts connections and does not answer; its process may be stopped, or be another program: EPDSL_PORT chooses the port"
            raise BootstrapTimeout("EP311", f"rank {index}: {where} {text}") from error
        hint = (
            "its process may have ended, another job may be using the port (EPDSL_PORT chooses it), or this rank has another EPDSL_TOKEN "
            "or job id than rank 0"
        )
        raise Refused("EP316", f"rank {index} was refused by {where}: {error}; {hint}") from error
    return connection, answer


def _reach(index: int, address: tuple[str, int], deadline: float, timeout: float) -> socket.socket:
    pause = 0.02
    while True:
        try:
            return tuned(socket.create_connection(address, timeout=max(deadline - time.monotonic(), 0.001)))
        except UnicodeError as error:
            raise LauncherError("EP316", f"rank {index} cannot reach {address[0]!r}: that is no host name; correct MASTER_ADDR") from error
        except OSError as error:
            if time.monotonic() + pause > deadline:
                hint = "rank 0 listens there once it runs; MASTER_ADDR and EPDSL_PORT, or MASTER_PORT + 1, must be equal on every rank"
                raise BootstrapTimeout(
                    "EP311", f"rank {index} could not reach the rendezvous at {place(address)} in {timeout:g} s: {error}; {hint}"
                ) from error
            time.sleep(pause)
            pause = min(pause * 2, 0.5)
