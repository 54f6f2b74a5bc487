"""Streams between islands: messages from a rank to the one with the same place in another island.

They are TCP connections of their own, made when there is something to send, and not part of a process group, so that
an island that is gone stops nobody else. A message is a tag and bytes, with a keyed hash (its *seal*). Both ends derive
the key from the run's token and a handshake. Nothing that arrives is unpickled. If a seal is wrong, the connection is
closed and the error names the island; a connection that fails the handshake is closed without a word.
"""

import hashlib
import hmac
import json
import os
import secrets
import socket
import struct
import time
from collections import defaultdict, deque
from collections.abc import Container, Iterator
from contextlib import contextmanager, suppress
from queue import Queue
from threading import Condition, Thread
from typing import Any

import torch
import torch.distributed as dist

from weft.errors import UsageError, WeftError
from weft.layout.mesh import Mesh
from weft.net.hangup import spare
from weft.net.sockets import end, listen, own_address, read, send_at_once, serve_each

#: Bytes of a seal and of a challenge, and of a message's fixed head; longest introduction and tag.
SEAL, HEAD, LONGEST = 16, 18, 1024
#: Seconds for the handshake of a connection, and at the end of a run for the messages that are still to be sent.
HELLO_S, END_S = 10.0, 30.0
#: Seconds of one wait at most: Python refuses to wait for as long as a ``limit`` may say.
MOST_S = 3600.0


class IslandLost(WeftError):
    """Another island is gone, late, or has sent a message with a wrong seal; the error names it."""


class Streams:
    """This rank's streams to the rank with the same ``place`` in each other island.

    ``host``: the address to listen on; ``limit``: seconds that a message may take. The ``store`` holds the address of
    every rank that listens, and the run's secret. Where islands come and go, time is divided into *epochs*, in which
    the set of islands does not change: :meth:`break_off` ends the exchanges of an epoch, and :meth:`begin` starts the
    next, which sees no message of an earlier one.

    ``sent`` and ``received`` count the bytes of messages' tensors. ``around`` counts the other bytes sent: seals, tags,
    handshakes, and messages that are sent as ``control``.
    """

    def __init__(
        self,
        island: int,
        islands: int,
        place: int,
        store: dist.Store,
        host: str,
        limit: float,
    ) -> None:
        self.island, self.islands, self.limit = island, islands, limit
        self.sent = self.received = self.around = 0
        self.place, self.store = place, store
        #: The store that all islands share, while there is one.
        self.shared: dist.Store | None = store
        #: The islands in the order of the ring that sums go around.
        self.order = list(range(islands))
        self._key = store.compare_set("weft/streams/token", "", secrets.token_hex(32))
        self.epoch = 0
        self._came: dict[tuple[int, int, str], deque[bytearray]] = defaultdict(deque)
        self._news, self._closed, self._broken = Condition(), False, ""
        self._lost: dict[int, str] = {}
        self._outboxes: dict[int, Queue[Any]] = {}
        self._waiting = 0  # messages of this epoch that are still to be sent
        self._threads: list[Thread] = []
        self._sockets: list[socket.socket] = []
        self._to: dict[int, socket.socket] = {}
        self._listener = listen(host, own_port(place))
        self._sockets.append(self._listener)
        store.set(
            f"weft/streams/{island}/{place}",
            json.dumps(self._listener.getsockname()[:2]),
        )
        serve_each(self._listener, self._serve, "weft-streams")

    def ring(self, islands: Container[int]) -> list[int]:
        """These islands, in the order of the ring."""
        return [island for island in self.order if island in islands]

    def send(
        self, island: int, tag: str, tensor: torch.Tensor, control: bool = False
    ) -> None:
        """Send a flat tensor of the CPU, which must not change before :meth:`flush` returns. Does not wait."""
        if island not in self._outboxes:
            self._outboxes[island] = Queue()
            self._threads.append(
                Thread(
                    target=self._deliver,
                    args=(island,),
                    name="weft-streams",
                    daemon=True,
                )
            )
            self._threads[-1].start()
        with self._news:
            self._waiting += 1
            item = (self.epoch, tag, tensor.view(torch.uint8).numpy().data, control)
        self._outboxes[island].put(item)

    def flush(self) -> None:
        """Wait until all messages have been sent, or dropped because their island is lost."""
        with self._news:
            while self._waiting and not self._broken and not self._closed:
                self._news.wait()
            self._check()

    def receive(
        self, island: int, tag: str, dtype: torch.dtype, limit: float = 0.0
    ) -> torch.Tensor:
        """The next message with this tag from an island, as a flat tensor; raises :class:`IslandLost`.

        ``limit``: seconds to wait, if they are not those of the streams.
        """
        limit = limit or self.limit
        deadline = time.monotonic() + limit
        with self._news:
            key = (self.epoch, island, tag)
            while not (waiting := self._came[key]):
                left = deadline - time.monotonic()
                self._check()
                if self._closed:
                    raise IslandLost(
                        f"island {self.island} has ended while it waited for island {island}"
                    )
                if island in self._lost or left <= 0:
                    why = self._lost.get(island) or f"has not answered for {limit:g} s"
                    raise IslandLost(
                        f"island {island} {why}: island {self.island} waits for its {tag!r}; look at its ranks and the "
                        "link, then go on from the last checkpoint with --resume auto"
                    )
                self._news.wait(min(left, MOST_S))
            found = waiting.popleft()
            if not waiting:
                del self._came[key]
        self.received += len(found)
        return (
            torch.frombuffer(found, dtype=dtype)
            if found
            else torch.empty(0, dtype=dtype)
        )

    def _check(self) -> None:
        if self._broken:
            raise IslandLost(self._broken)

    def break_off(self, why: str) -> None:
        """Make all calls that wait here raise :class:`IslandLost`, now and until :meth:`begin`."""
        with self._news:
            self._broken = why or "islands come or go"
            self._news.notify_all()

    def begin(self, epoch: int) -> None:
        """Start an epoch, with new connections: messages of earlier epochs that are under way are dropped."""
        with self._news:
            self.epoch, self._broken, self._waiting = epoch, "", 0
            for key in [key for key in self._came if key[0] < epoch]:
                del self._came[key]
            before, self._to = list(self._to.values()), {}
            self._lost.clear()
            self._news.notify_all()
        # a thread may be about to send there, to one who does not read
        for connection in before:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self, flush: bool = True) -> None:
        """End all streams; with ``flush`` after the messages that are still to be sent."""
        for outbox in self._outboxes.values():
            outbox.put(None)
        for thread in self._threads:
            thread.join(END_S if flush else 0)
        with self._news:
            self._closed = True
            self._news.notify_all()
        for connection in self._sockets:
            end(connection)

    def _loses(self, island: int, why: str) -> None:
        with self._news:
            self._lost.setdefault(island, why)
            self._news.notify_all()

    def _deliver(self, island: int) -> None:
        """The body of the thread that sends to one island. Once the island is lost, its messages are dropped."""
        outbox, connection, number = self._outboxes[island], None, 0
        key = b""
        while (item := outbox.get()) is not None:
            epoch, tag, view, control = item
            try:
                if connection is None or self._to.get(island) is not connection:
                    self._drop(connection)
                    connection = None
                    if epoch == self.epoch and island not in self._lost:
                        connection, number = self._dial(island, epoch), 0
                        key = self._introduce(connection, island, epoch)
                if connection is not None and epoch == self.epoch:
                    head = (
                        struct.pack("!HQQ", len(tag), len(view), epoch) + tag.encode()
                    )
                    connection.sendall(head + _seal(key, number, head, view))
                    connection.sendall(view)
                    number += 1
                    self.sent += 0 if control else len(view)
                    self.around += len(head) + SEAL + (len(view) if control else 0)
            except (
                OSError,
                RuntimeError,
                EOFError,
            ) as error:  # of the store, if it has gone
                self._drop(connection)
                connection = None
                if not self._closed and epoch == self.epoch:
                    self._loses(
                        island, f"is gone ({getattr(error, 'strerror', None) or error})"
                    )
            with self._news:
                self._waiting -= epoch == self.epoch
                self._news.notify_all()
        if connection is not None:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_WR)

    def _drop(self, connection: socket.socket | None) -> None:
        if connection is not None:
            connection.close()
            with suppress(ValueError):
                self._sockets.remove(connection)

    def _dial(self, island: int, epoch: int) -> socket.socket:
        name = f"weft/streams/{island}/{self.place}"
        deadline = time.monotonic() + self.limit
        # a wait in the store would hold other threads of this rank up
        while not self.store.check([name]):
            if time.monotonic() > deadline:
                raise OSError(0, f"it has not said where it is for {self.limit:g} s")
            time.sleep(0.05)
        connection = socket.create_connection(
            json.loads(self.store.get(name)), self.limit
        )
        connection.settimeout(self.limit)
        self._adopt(connection)
        with self._news:
            if epoch != self.epoch:
                raise OSError(0, "it is of an epoch before")
            self._to[island] = connection
        return connection

    def _introduce(self, connection: socket.socket, island: int, epoch: int) -> bytes:
        """The dialling end of the handshake: answer the other end's challenge, and return the connection's key."""
        challenge = read(connection, SEAL)
        hello = json.dumps(
            {"from": self.island, "to": island, "place": self.place, "epoch": epoch}
        ).encode()
        key = hashlib.blake2b(challenge + hello, key=self._key[:64]).digest()
        connection.sendall(
            struct.pack("!H", len(hello)) + hello + _seal(key, 0, hello, b"")
        )
        self.around += len(hello) + SEAL + 2
        return key

    def _adopt(self, connection: socket.socket) -> None:
        send_at_once(connection)
        spare(connection)
        self._sockets.append(connection)

    def _serve(self, connection: socket.socket) -> None:
        """The body of the thread that reads one connection."""
        try:
            self._adopt(connection)
            connection.settimeout(HELLO_S)
            challenge = secrets.token_bytes(SEAL)
            connection.sendall(challenge)
            hello = bytes(
                read(connection, struct.unpack("!H", read(connection, 2))[0], LONGEST)
            )
            key = hashlib.blake2b(challenge + hello, key=self._key[:64]).digest()
            if not hmac.compare_digest(
                read(connection, SEAL), _seal(key, 0, hello, b"")
            ):
                raise ValueError
            said = json.loads(hello)
            island, epoch = int(said["from"]), int(said["epoch"])
            if (said["to"], said["place"]) != (self.island, self.place):
                raise ValueError
            connection.settimeout(None)
        except (OSError, ValueError, KeyError, TypeError, EOFError):
            # a stranger's bytes may be anything; who it was does not matter
            self._drop(connection)
            return
        why = "is gone"
        try:
            self._hear(connection, island, key)
        except ValueError:
            why = "has sent a message that is not what was sealed (it is broken or forged)"
        except (OSError, EOFError):
            pass
        if epoch == self.epoch:
            self._loses(island, why)
        self._drop(connection)

    def _hear(self, connection: socket.socket, island: int, key: bytes) -> None:
        number = 0
        while True:
            fixed = read(connection, HEAD)
            length, size, epoch = struct.unpack("!HQQ", fixed)
            head = bytes(fixed + read(connection, length, LONGEST))
            seal, found = read(connection, SEAL), read(connection, size)
            if not hmac.compare_digest(seal, _seal(key, number, head, found)):
                raise ValueError
            number += 1
            with self._news:
                if epoch >= self.epoch:
                    self._came[epoch, island, head[HEAD:].decode()].append(found)
                    self._news.notify_all()


def _seal(
    key: bytes, number: int, head: bytes, payload: bytes | bytearray | memoryview
) -> bytes:
    """The keyed hash of a message and of its ``number`` in its connection, so that no message can be left out, repeated
    or exchanged for another."""
    found = hashlib.blake2b(struct.pack("!Q", number) + head, key=key, digest_size=SEAL)
    found.update(payload)
    return found.digest()


def own_port(place: int) -> int:
    """The port to listen on: 0, which is any, or ``WEFT_STREAMS_PORT`` plus the rank's place if that is set, as it must
    be where tunnels or firewalls have to know it."""
    text = os.environ.get("WEFT_STREAMS_PORT", "0")
    if not text.isdecimal() or int(text) + place > 65535:
        raise UsageError(
            f"WEFT_STREAMS_PORT={text} is no port; give a number such as 7100"
        )
    return int(text) + place if int(text) else 0


@contextmanager
def open_streams(mesh: Mesh, limit: float) -> Iterator[Streams | None]:
    """A context in which this rank has streams to the other islands. It gives None if there are no other islands."""
    if mesh.shore is None:
        yield None
        return
    place = dist.get_rank() if dist.is_initialized() else 0
    streams = Streams(
        mesh.island, mesh.islands, place, mesh.shore, own_address(), limit
    )
    try:
        yield streams
    except BaseException:
        streams.close(flush=False)
        raise
    streams.close()
