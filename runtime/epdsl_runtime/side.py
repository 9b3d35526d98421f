"""A rank's second connection to the rendezvous: it says what the rank does, and asks what the others do."""

from __future__ import annotations

import contextlib
import pickle
import socket
import threading
import time

from .bootstrap import RankFailed
from .health import Health, Source
from .wire import ACTIVITY, HEALTH, connect, receive, send

_TELL_SECONDS = 0.5
_ANSWER_SECONDS = 2.0
_REACH_SECONDS = 1.0


class Side:
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
        while not self._ended.wait(_TELL_SECONDS):
            with self._lock, contextlib.suppress(OSError):
                if not self._ended.is_set():
                    self._say()

    def _say(self) -> None:
        if self._connection is None:
            self._connection, _ = connect(self._index, self._address, self._token, _REACH_SECONDS, side=True)
        if self._source is not None:
            try:
                send(self._connection, ACTIVITY, self._index, 0, bytes(self._source()))
            except OSError:
                self._hang_up()
                raise

    def _hang_up(self) -> None:
        """The next use connects anew: what would come on this connection can no longer be told apart."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def ask(self) -> list[Health]:
        # Whoever holds it may be waiting for the same rendezvous.
        if not self._lock.acquire(timeout=_REACH_SECONDS):
            raise RankFailed(0, "the rendezvous does not answer; its process may have ended or be stopped")
        try:
            return self._ask()
        except OSError as error:
            self._hang_up()
            text = f"the rendezvous does not answer ({str(error) or 'timeout'}); its process may have ended or be stopped"
            raise RankFailed(0, text) from error
        finally:
            self._lock.release()

    def _ask(self) -> list[Health]:
        self._say()
        assert self._connection is not None
        self._asked += 1
        send(self._connection, HEALTH, self._index, self._asked)
        deadline = time.monotonic() + _ANSWER_SECONDS
        while True:
            kind, _, number, payload = receive(self._connection, deadline)
            if kind == HEALTH and number == self._asked:
                return pickle.loads(payload)

    def close(self) -> None:
        self._ended.set()
        with self._lock:
            self._hang_up()
