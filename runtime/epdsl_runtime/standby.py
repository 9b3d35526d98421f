"""How the ranks of a job that live go on without those that do not: each answers at an address of its own, whatever became of the hub.

In an attempt to go on every rank asks every other that it holds to live whom that one holds to be dead. Nobody waits for the dead, and who
disagrees hears it from the others. The first of the living makes a hub for all of them; its answer says where.
"""

from __future__ import annotations

import contextlib
import pickle
import socket
import struct
import threading
import time
from dataclasses import dataclass

from .bootstrap import BootstrapTimeout, RankFailed, check_gone
from .wire import GATHER, HANDSHAKE_SECONDS, HELLO, admit, greet, listen, receive, send, tuned

_BACKLOG = 128


@dataclass(frozen=True)
class Answer:
    """Whom a rank goes on without, and where its hub for the others is when it is the first of them."""

    gone: tuple[int, ...]
    hub: tuple[str, int] | None


class Standby:
    """A rank's own address, and its answers: one an attempt. Nothing is read before its first answer; who asks waits."""

    def __init__(self, host: str, token: bytes) -> None:
        self._token = token
        self._listener = listen((host, 0), _BACKLOG)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._answers: list[Answer] = []
        self._told = threading.Condition()
        self._closed = False

    @property
    def attempts(self) -> int:
        return len(self._answers)

    def answer(self, answer: Answer) -> int:
        """Gives the answer of a new attempt; returns the attempt's number."""
        with self._told:
            self._answers.append(answer)
            self._told.notify_all()
            if len(self._answers) == 1:
                threading.Thread(target=self._accept, name="epdsl-standby", daemon=True).start()
            return len(self._answers) - 1

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(tuned(connection),), name="epdsl-standby-rank", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, struct.error):
            rank = admit(connection, self._token)
            if rank is None:
                return
            send(connection, HELLO, rank, 0)
            _, _, attempt, _ = receive(connection, time.monotonic() + HANDSHAKE_SECONDS)
            with self._told:
                self._told.wait_for(lambda: self._closed or len(self._answers) > attempt)
                found = self._answers[attempt] if len(self._answers) > attempt else None
            if found is not None:
                send(connection, GATHER, rank, attempt, pickle.dumps(found))

    def close(self) -> None:
        """Answers no more."""
        with self._told:
            self._closed = True
            self._told.notify_all()
        # Shutting down first wakes the thread in accept; closing alone would not.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def ask(index: int, rank: int, address: tuple[str, int], token: bytes, attempt: int, deadline: float, gone: tuple[int, ...]) -> Answer:
    """What `rank` answers to `index` in an attempt.

    Raises BootstrapTimeout when it does not come to the attempt in time, RankFailed when its process has ended, Disagreement when it goes
    on without others than `gone`.
    """
    try:
        with tuned(socket.create_connection(address, timeout=max(deadline - time.monotonic(), 0.001))) as connection:
            greet(connection, index, token, deadline)
            send(connection, GATHER, index, attempt)
            _, _, _, payload = receive(connection, deadline)
    except TimeoutError as error:
        raise BootstrapTimeout("EP311", f"rank {index} waited for rank {rank} to go on without {gone}; it did not call shrink") from error
    except OSError as error:
        text = f"its process ended before it went on without {gone} ({error}); call shrink with it among the dead"
        raise RankFailed(rank, text) from error
    found: Answer = pickle.loads(payload)
    check_gone(index, gone, rank, found.gone)
    return found
