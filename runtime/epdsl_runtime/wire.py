"""What ranks' processes say to each other over TCP: length-prefixed frames, after both ends have proved that they know the job's token.

A frame is a header (kind, rank, sequence number, length) and a payload. Nothing is read as a pickle before the proof.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import struct
import time

from .bootstrap import BootstrapTimeout

HEADER = struct.Struct("!BIQQ")
HELLO, GATHER, ABORT, BYE, WHO, ACTIVITY, HEALTH = range(1, 8)
# A second connection of a rank, over which it says what it does, adds this to its number.
SIDE = 1 << 31
_NONCE_BYTES = 32
HANDSHAKE_SECONDS = 10.0
SEND_SECONDS = 30.0
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
    kind, rank, sequence, length = HEADER.unpack(receive_exactly(connection, HEADER.size, deadline))
    if length > MAX_FRAME_BYTES:
        raise ConnectionError(f"a frame of {length} bytes; at most {MAX_FRAME_BYTES} are accepted")
    return kind, rank, sequence, receive_exactly(connection, length, deadline)


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


def greet(connection: socket.socket, number: int, token: bytes, deadline: float) -> None:
    """The other side of `admit`, until that has said hello. Raises OSError when it does not."""
    theirs = receive_exactly(connection, _NONCE_BYTES, deadline)
    nonce = secrets.token_bytes(_NONCE_BYTES)
    connection.sendall(_digest(token, b"rank", theirs) + nonce + struct.pack("!I", number))
    proof = receive_exactly(connection, 32, deadline)
    if not hmac.compare_digest(proof, _digest(token, b"hub", nonce)):
        raise ConnectionError("it does not know this job's token")
    kind, _, _, payload = receive(connection, deadline)
    if kind != HELLO:
        raise ConnectionError(payload.decode(errors="replace"))


def connect(index: int, address: tuple[str, int], token: bytes, timeout: float, side: bool = False) -> socket.socket:
    """A rank's connection to the hub, once both have proved that they know the token.

    Raises BootstrapTimeout when there is no hub within `timeout` seconds, ConnectionError when it refuses.
    """
    deadline = time.monotonic() + timeout
    pause = 0.02
    while True:
        try:
            connection = tuned(socket.create_connection(address, timeout=max(deadline - time.monotonic(), 0.001)))
            break
        except OSError as error:
            if time.monotonic() + pause > deadline:
                raise BootstrapTimeout(
                    "EP311", f"rank {index} could not reach the rendezvous at {address[0]}:{address[1]} in {timeout:g} s: {error}"
                ) from error
            time.sleep(pause)
            pause = min(pause * 2, 0.5)
    try:
        greet(connection, index | (SIDE if side else 0), token, deadline)
    except OSError as error:
        connection.close()
        reason = str(error) or "no answer"
        where = f"the rendezvous at {address[0]}:{address[1]}"
        hint = "another job may be using the port (EPDSL_PORT chooses it)"
        raise ConnectionError(f"rank {index} was refused by {where}: {reason}; {hint}") from error
    return connection
