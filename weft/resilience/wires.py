"""Messages between agents: JSON in frames that are signed with the run's token, over sockets that never block."""

import hashlib
import hmac
import json
import selectors
import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from weft.net.hangup import spare
from weft.net.sockets import family_of, send_at_once
from weft.resilience.members import Address

#: A frame is its length, a keyed hash as its seal, and the text; bytes of the first two.
LENGTH, SEAL = 4, 16
#: Most bytes of a text before and after the sender has said who it is; long ones carry facts about a whole view.
FIRST, LONGEST = 1 << 14, 1 << 26


class WireCut(Exception):
    """The connection has ended, or brought something that no agent of this run would send."""


def key_of(token: str) -> bytes:
    return hashlib.blake2b(token.encode()).digest()


def frame(message: dict[str, Any], key: bytes) -> bytes:
    text = json.dumps(message, separators=(",", ":")).encode()
    return (
        len(text).to_bytes(LENGTH)
        + hashlib.blake2b(text, key=key, digest_size=SEAL).digest()
        + text
    )


class Connection:
    """One connection of an agent. ``address``: where the process at its other end listens, once it has said so."""

    def __init__(
        self,
        sock: socket.socket,
        key: bytes,
        selector: selectors.BaseSelector,
        now: float,
    ) -> None:
        sock.setblocking(False)
        with suppress(OSError):
            send_at_once(sock)
        spare(sock)
        self.socket, self._key, self._selector = sock, key, selector
        self.address: Address | None = None
        self.made, self.closed = now, False
        self._in, self._out = bytearray(), bytearray()
        self._events = selectors.EVENT_READ
        selector.register(sock, self._events, self)

    @classmethod
    def to(
        cls, address: Address, key: bytes, selector: selectors.BaseSelector, now: float
    ) -> "Connection":
        """Dial; what is sent meanwhile waits. Raises OSError if it is known at once that nobody is there."""
        sock = socket.socket(family_of(address[0]))
        try:
            sock.setblocking(False)
            with suppress(BlockingIOError):
                sock.connect(address)
        except OSError:
            sock.close()
            raise
        wire = cls(sock, key, selector, now)
        wire.address = address
        wire._watch(writing=True)
        return wire

    @property
    def waiting(self) -> bool:
        """Whether something is still to be sent."""
        return bool(self._out)

    def send(self, message: dict[str, Any]) -> None:
        if len(self._out) < LONGEST:  # else the other end has long stopped to read
            self._out += frame(message, self._key)
        if not self._events & selectors.EVENT_WRITE:
            self.flush()

    def flush(self) -> None:
        """Raises :class:`WireCut`, or OSError if a connection was refused or lost."""
        if error := self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise OSError(error, "")
        with suppress(BlockingIOError):
            while self._out:
                del self._out[: self.socket.send(self._out)]
        self._watch(bool(self._out))

    def receive(self) -> Iterator[dict[str, Any]]:
        """The messages that have come; raises :class:`WireCut` or OSError after the last one of a connection."""
        ended: Exception | None = None
        try:
            while ended is None and len(self._in) <= LONGEST + FIRST:
                got = self.socket.recv(1 << 16)
                self._in += got
                ended = None if got else WireCut("ended")
        except BlockingIOError:
            pass
        except OSError as error:  # what was said before counts
            ended = error
        while len(self._in) >= LENGTH + SEAL:
            size = int.from_bytes(self._in[:LENGTH])
            if size > (LONGEST if self.address else FIRST):
                raise WireCut("a frame too long")
            end = LENGTH + SEAL + size
            if len(self._in) < end:
                break
            seal, text = (
                bytes(self._in[LENGTH : LENGTH + SEAL]),
                bytes(self._in[LENGTH + SEAL : end]),
            )
            if not hmac.compare_digest(
                seal, hashlib.blake2b(text, key=self._key, digest_size=SEAL).digest()
            ):
                raise WireCut("no agent of this run")
            del self._in[:end]
            yield json.loads(text)
        if ended:
            raise ended

    def close(self) -> None:
        self.closed = True
        with suppress(KeyError, ValueError):
            self._selector.unregister(self.socket)
        self.socket.close()

    def _watch(self, writing: bool) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if writing else 0)
        if events != self._events:
            self._events = events
            self._selector.modify(self.socket, events, self)
