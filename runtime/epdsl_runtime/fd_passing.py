"""Handing file descriptors to other processes of this machine, over a Unix socket.

A process that has descriptors to give listens on a socket in Linux's abstract namespace, which has no file and is gone with the process.
Who has a ticket (it comes over the ranks' rendezvous) connects, shows it and receives a copy of the descriptor.
"""

from __future__ import annotations

import contextlib
import os
import resource
import secrets
import socket
import struct
import threading
from dataclasses import dataclass

_TOKEN_BYTES = 32
_SECONDS = 10.0
_CREDENTIALS = struct.Struct("3i")


@dataclass(frozen=True)
class Ticket:
    """By which another process fetches a descriptor."""

    name: bytes
    token: bytes


class _Server:
    def __init__(self) -> None:
        self.name = b"\0epdsl-" + secrets.token_hex(16).encode()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.name)
        self._listener.listen(128)
        self._lock = threading.Lock()
        self._offers: dict[bytes, int] = {}
        threading.Thread(target=self._accept, name="epdsl-descriptors", daemon=True).start()

    def offer(self, descriptor: int) -> Ticket:
        token = secrets.token_bytes(_TOKEN_BYTES)
        with self._lock:
            self._offers[token] = descriptor
        return Ticket(self.name, token)

    def withdraw(self, ticket: Ticket) -> None:
        with self._lock:
            self._offers.pop(ticket.token, None)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(connection,), name="epdsl-descriptor", daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.settimeout(_SECONDS)
            _, user, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
            token = connection.recv(_TOKEN_BYTES, socket.MSG_WAITALL)
            # Under the lock, so that the descriptor is not closed, and its number given to another file, meanwhile.
            with self._lock:
                descriptor = self._offers.get(token)
                if descriptor is None or user not in (os.getuid(), 0):
                    connection.sendall(b"N")
                else:
                    socket.send_fds(connection, [b"Y"], [descriptor])


_server: _Server | None = None
_lock = threading.Lock()


def offer(descriptor: int) -> Ticket:
    """Lets others fetch copies of a descriptor until `withdraw`. It stays the caller's; close it after that."""
    global _server
    with _lock:
        if _server is None:
            _server = _Server()
        return _server.offer(descriptor)


def withdraw(ticket: Ticket) -> None:
    """Ends an offer of this process."""
    if _server is not None:
        _server.withdraw(ticket)


def fetch(ticket: Ticket, timeout: float = _SECONDS) -> int:
    """A copy of the descriptor, which the caller closes.

    Raises ConnectionError when the other process cannot be reached, does not answer within `timeout` seconds or no longer offers it.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout)
            connection.connect(ticket.name)
            connection.sendall(ticket.token)
            answer, descriptors, flags, _ = socket.recv_fds(connection, 1, 1)
    except OSError as error:
        hint = "ranks exchange them when they share a network namespace (one container, or --network=host)"
        raise ConnectionError(f"a file descriptor of another rank could not be fetched: {error}; {hint}") from error
    if flags & socket.MSG_CTRUNC:
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        raise ConnectionError(
            f"a file descriptor of another rank came and there is no room for it: this process may have {most} (ulimit -n)"
        )
    if answer != b"Y" or len(descriptors) != 1:
        raise ConnectionError("a file descriptor of another rank could not be fetched: that process no longer offers it")
    os.set_inheritable(descriptors[0], False)
    return descriptors[0]
