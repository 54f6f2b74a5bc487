"""A thread that waits for many connections at once."""

import os
import selectors
import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from weft.net.wire import (
    ENDED,
    LONGEST_HEAD,
    Frame,
    Head,
    Incoming,
    Session,
    Steps,
    WireBroken,
)


class Poller:
    """Waits for many sockets at once, on behalf of one thread. Other threads can wake that thread.

    Each watched socket has an object that :meth:`wait` returns for it.
    """

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._poke, self._poked = socket.socketpair()
        for end in (self._poke, self._poked):
            end.setblocking(False)
        self._selector.register(self._poked, selectors.EVENT_READ)

    def watch(self, sock: socket.socket, means: Any, writing: bool = False) -> None:
        """Watch the socket ``sock`` for received data, until :meth:`forget`.

        ``means``: object that :meth:`wait` returns for the socket; ``writing``: also watch whether it can be written
        to.
        """
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if writing else 0)
        known = self._selector.get_map().get(sock)
        if known is None:
            self._selector.register(sock, events, means)
        elif known.events != events:
            self._selector.modify(sock, events, means)

    def forget(self, sock: socket.socket) -> None:
        with suppress(KeyError, ValueError):
            self._selector.unregister(sock)

    def wait(self, limit: float | None) -> list[tuple[Any, bool, bool]]:
        """Wait until a watched socket is ready, for at most ``limit`` seconds (None: without limit).

        Returns for each ready socket its object, whether it is readable, and whether it is writable.
        """
        ready = []
        for key, mask in self._selector.select(limit):
            if key.fileobj is self._poked:
                with suppress(BlockingIOError):
                    self._poked.recv(1 << 12)
            else:
                reads, writes = selectors.EVENT_READ, selectors.EVENT_WRITE
                ready.append((key.data, bool(mask & reads), bool(mask & writes)))
        return ready

    def wake(self) -> None:
        # full: it wakes anyway; closed: nobody is there to be woken
        with suppress(OSError):
            self._poke.send(b"!")

    def close(self) -> None:
        for end in (self._poke, self._poked, self._selector):
            end.close()


class PolledConnection:
    """Connection of a thread that waits for many connections with a :class:`Poller`.

    Frames sent before the handshake is over are queued. ``sock``: non-blocking socket; ``poller``: watches it;
    ``address``: endpoint of the process at the other end.
    """

    def __init__(
        self, sock: socket.socket, poller: Poller, address: tuple[str, int]
    ) -> None:
        self.socket, self._poller, self.address = sock, poller, address
        self.closed = False
        self._session: Session | None = None
        self._opening: Incoming[Session] | None = None
        self._reading: Incoming[Frame] | None = None
        self._out, self._early = bytearray(), list[Head]()

    def begin(self, opening: Session | Steps[Session]) -> None:
        """Let the poller watch this connection from now on.

        ``opening``: the session (keys) of the connection, or the handshake that will return a session.
        """
        if isinstance(opening, Session):
            self._session = opening
        else:
            self._opening = Incoming(opening)
        self._watch()

    @property
    def waiting(self) -> bool:
        """Whether queued bytes are still to be sent."""
        return bool(self._out or self._early)

    def put(self, data: bytes) -> None:
        """Queue ``data``, bytes of a handshake, to be sent without waiting."""
        self._out += data

    def send(self, head: Head) -> None:
        """Send a frame with the JSON values ``head`` and no payload, or queue it until the handshake is over.

        The frame is dropped if too many bytes are queued, because the other end does not read any more. Raises OSError
        if the connection was refused or lost.
        """
        if self._session is None:
            self._early.append(head)
        elif len(self._out) < LONGEST_HEAD:  # else the other end does not read any more
            self._out += b"".join(self._session.encode(head))
            self.flush()

    def flush(self) -> None:
        """Send as many queued bytes as the socket takes without waiting.

        Raises OSError if the connection was refused or lost.
        """
        if error := self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise OSError(error, os.strerror(error))
        with suppress(BlockingIOError, InterruptedError):
            while self._out:
                del self._out[: self.socket.send(self._out)]
        self._watch()

    def receive(self) -> Iterator[Head]:
        """Yield the heads of the frames that have been received, without waiting for more.

        Raises OSError after the last frame of a closed connection.
        """
        while True:
            if self._session is None:
                assert self._opening is not None
                if not self._opening.take(self.socket):
                    # the answer to a challenge
                    return self.flush() if self._out else None
                self._session = self._opening.result
                early, self._early = self._early, []
                for head in early:
                    self.send(head)
            assert self._session is not None
            self._reading = self._reading or Incoming(self._session.decode())
            if not self._reading.take(self.socket):
                return
            frame, self._reading = self._reading.result, None
            assert frame is not None
            if len(frame.payload):
                raise WireBroken(ENDED)
            yield frame.head

    def close(self) -> None:
        self.closed = True
        self._poller.forget(self.socket)
        self.socket.close()

    def _watch(self) -> None:
        self._poller.watch(self.socket, self, bool(self._out))
