"""The sending end of a connection of a cluster: nobody waits for a slow reader, and signs of life are never late."""

import errno
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import closing, suppress

from weft.cluster.cluster_messages import Message
from weft.net.wire import ENDED, Head, SealedConnection


def ending_of(error: OSError) -> str:
    """Return why a connection has ended, in words for the user. ``error``: the error that reading or sending has
    raised.
    """
    reset = (errno.EBADF, errno.ECONNRESET, errno.EPIPE)
    return ENDED if error.errno in reset else str(error)


class Outbox:
    """Sends messages over ``connection`` in the order in which they are put, in a thread of its own. ``beat``: function
    that gets a number, from 1 on, and returns the sign of life with it; one is sent every ``every`` seconds. If a
    message cannot be sent, the connection is closed, and reads that wait on it end.
    """

    def __init__(
        self, connection: SealedConnection, beat: Callable[[], Head], every: float
    ) -> None:
        self.connection, self._beat, self._every = connection, beat, every
        self._queue: deque[Message] = deque()
        self._wake, self._ended = threading.Condition(), False
        self.sent = 0  # bytes
        self.beats = 0  # signs of life that were sent
        self._thread = threading.Thread(
            target=self._send, name="weft-outbox", daemon=True
        )

    def start(self) -> None:
        """Start the thread that sends. If no message waits, it first sends a sign of life."""
        self._thread.start()

    def put(self, head: Head, payload: list[memoryview] | None = None) -> None:
        """Queue a message to be sent: the JSON object ``head`` and the bytes ``payload``."""
        with self._wake:
            self._queue.append((head, payload or []))
            self._wake.notify()

    def close(self, limit: float = 0.0) -> None:
        """Close the connection as soon as the queued messages are sent, but after ``limit`` seconds at the latest."""
        with self._wake:
            self._ended = True
            self._wake.notify()
        if limit and threading.current_thread() is not self._thread:
            self._thread.join(limit)
        self.connection.close()

    def _send(self) -> None:
        # whatever ends this, the other end is to notice it
        with closing(self.connection), suppress(OSError):
            self._send_all()

    def _send_all(self) -> None:
        due = time.monotonic()
        while True:
            with self._wake:
                if not (self._queue or self._ended):
                    self._wake.wait(max(0.0, due - time.monotonic()))
                ready, self._queue = self._queue, deque()
                ended = self._ended
            for head, payload in ready:
                self.sent += self.connection.send(head, payload)
            if ended and not ready:
                break
            if time.monotonic() >= due:
                self.beats += 1
                number = {"number": self.beats}
                self.connection.send({"kind": "beat", **number, **self._beat()})
                due = time.monotonic() + self._every
