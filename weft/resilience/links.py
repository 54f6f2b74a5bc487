"""Streams of bytes from rank to rank. They do not depend on process groups, which break when any rank is lost.

A message is a head in JSON and then as many bytes as the head's ``size`` says. The receiver answers with one byte
whether it has kept them. A connection begins with the receiver's challenge, whose hash shows that the sender knows the
run's secret. Sending and receiving run in threads of their own, most of the time without Python's lock.
"""

import hashlib
import hmac
import json
import secrets
import socket
import struct
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any

from weft.net.sockets import (
    end,
    family_of,
    listen,
    read,
    read_into,
    send_at_once,
    serve_each,
)
from weft.resilience.wires import key_of

Head = dict[str, Any]

#: Most bytes of a head, and of a connection's first one, which has the sender's rank; bytes of a challenge.
MOST, FIRST, CHALLENGE = 64 << 20, 4096, 16
#: Seconds within which a new connection must send its first head.
HELLO_S = 10.0
KEPT, REFUSED = b"+", b"-"
ENDED = "the connection has ended"


class LinkBroken(ConnectionError):
    """The other end is gone, or has not kept what it was sent."""


class Inbox:
    """Listens on ``host`` for the streams of ranks that know ``token``.

    ``place(sender, head)`` returns the memory that the bytes of a message are read into. ``keep(sender, head)`` is
    called when they are there, and returns whether they are what was sent.
    """

    def __init__(
        self,
        host: str,
        token: str,
        place: Callable[[int, Head], memoryview],
        keep: Callable[[int, Head], bool],
    ) -> None:
        self._token, self._place, self._keep = token, place, keep
        self._lock, self._open, self._closed = Lock(), set[socket.socket](), False
        self._listener = listen(host)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]

    def start(self) -> None:
        """Take messages from now on; who has connected before waits until then."""
        serve_each(self._listener, self._serve, "weft-inbox")

    def close(self) -> None:
        """Take nothing more from now on: a message that is under way is not kept."""
        with self._lock:
            self._closed = True
            ends = [self._listener, *self._open]
        for connection in ends:
            end(connection)

    def _serve(self, connection: socket.socket) -> None:
        with self._lock:
            if self._closed:
                return end(connection)
            self._open.add(connection)
        try:
            connection.settimeout(HELLO_S)
            connection.sendall(challenge := secrets.token_bytes(CHALLENGE))
            hello = _read_head(connection, FIRST)
            if hmac.compare_digest(
                hello["seal"], _seal(self._token, challenge, hello["rank"])
            ):
                connection.settimeout(None)  # only so a read goes on until all is there
                self._receive(connection, hello["rank"])
        except (OSError, EOFError, ValueError, KeyError, TypeError):
            pass  # a stranger's bytes may be anything; who it was does not matter
        finally:
            with self._lock:
                self._open.discard(connection)
            end(connection)

    def _receive(self, connection: socket.socket, sender: int) -> None:
        while True:
            head = _read_head(connection, MOST)
            place = self._place(sender, head)
            if len(place) != head["size"]:
                raise ValueError("a message of another size than there is room for")
            read_into(connection, place)
            connection.sendall(KEPT if self._keep(sender, head) else REFUSED)


class Outbox:
    """One stream from rank ``rank`` to the :class:`Inbox` at ``address``, made when there is something to send.

    ``limit``: seconds until a host that does not answer at all counts as gone.
    """

    def __init__(
        self, address: tuple[str, int], token: str, rank: int, limit: float
    ) -> None:
        self._address, self._token, self._rank, self._made = address, token, rank, False
        self._socket = socket.socket(family_of(address[0]))
        self._socket.settimeout(limit)

    def send(self, head: Head, payload: Sequence[memoryview]) -> None:
        """Send a message and wait until the receiver has kept it; raises :class:`LinkBroken` if it does not."""
        try:
            if not self._made:
                self._socket.connect(self._address)
                self._socket.settimeout(None)
                send_at_once(self._socket)
                challenge = bytes(read(self._socket, CHALLENGE))
                _send_head(
                    self._socket,
                    {
                        "rank": self._rank,
                        "seal": _seal(self._token, challenge, self._rank),
                    },
                )
                self._made = True
            _send_head(self._socket, head | {"size": sum(map(len, payload))})
            for view in payload:
                self._socket.sendall(view)
            answer = self._socket.recv(1)
        except EOFError:
            raise LinkBroken(ENDED) from None
        except OSError as error:
            raise LinkBroken(error.strerror or str(error)) from None
        if answer != KEPT:
            raise LinkBroken("what came is not what was sent" if answer else ENDED)

    def close(self) -> None:
        """End the stream; a :meth:`send` that waits in another thread raises."""
        end(self._socket)


def _seal(token: str, challenge: bytes, rank: int) -> str:
    """What only a rank that knows ``token`` can answer to this connection's challenge."""
    return hashlib.blake2b(
        challenge + str(rank).encode(), key=key_of(token)
    ).hexdigest()


def _send_head(connection: socket.socket, head: Head) -> None:
    text = json.dumps(head).encode()
    connection.sendall(struct.pack("!I", len(text)) + text)


def _read_head(connection: socket.socket, most: int) -> Head:
    (count,) = struct.unpack("!I", read(connection, 4))
    head = json.loads(read(connection, count, most))
    if not isinstance(head, dict):
        raise TypeError("no message of Weft's")
    return head
