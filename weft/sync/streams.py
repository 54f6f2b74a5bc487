"""Streams between islands: messages between the ranks with the same place in two islands.

They are connections of a channel of the process's endpoint (:mod:`weft.net.endpoint`), made when there is something to
send, and not part of a process group, so that an island that is gone stops nobody else. A message is a tag and bytes.
If it is not what its sender sealed, the connection is closed and the error names the island.
"""

import json
import os
import secrets
import time
from collections import defaultdict, deque
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from queue import Queue
from threading import Condition, Thread
from typing import NamedTuple

import torch
import torch.distributed as dist

from weft.errors import UsageError, WeftError
from weft.layout.mesh import Mesh
from weft.net.endpoint import Address, Endpoint, process_endpoint
from weft.net.sockets import own_address
from weft.net.wire import Encryption, SealedConnection, WireForged

#: Seconds at the end of a run for the messages that are still to be sent.
END_S = 30.0
#: Seconds of one wait at most: Python refuses to wait for as long as a ``limit`` may say.
MOST_S = 3600.0


class IslandLost(WeftError):
    """Raised if another island is gone or late, or sends a message with a wrong seal. The error names the island."""


class _Message(NamedTuple):
    epoch: int
    tag: str
    view: memoryview
    control: bool


class Streams:
    """This rank's connections to the ranks with the same number (``place``) in all other islands.

    Where islands come and go, time is divided into *epochs*. Within an epoch the set of islands does not change.
    :meth:`break_off` ends the exchanges of an epoch, and :meth:`begin` starts the next one. Messages of an earlier
    epoch are dropped. ``endpoint``: this process's listener; ``secret``: the run's key for seals.

    Attributes:
        ``island``, ``islands``: number of this island, and how many there are.
        ``limit``: seconds that a message may take.
        ``address_of``: function that returns the address of the rank with the same number in another island, given that
            island's number; None while it is not known.
        ``sent``, ``received``: how many bytes of tensors were sent and received so far.
        ``around``: number of all other bytes sent, such as seals, tags and control messages.
        ``shared``: the store that all islands share, while there is one.
        ``order``: the islands in the order of the ring all-reduce.
        ``epoch``: number of the present epoch.
    """

    def __init__(
        self,
        island: int,
        islands: int,
        place: int,
        endpoint: Endpoint,
        secret: str,
        address_of: Callable[[int], Address | None],
        limit: float,
        shared: dist.Store | None = None,
    ) -> None:
        self.island, self.islands, self.limit = island, islands, limit
        self.sent = self.received = self.around = 0
        self.place, self.address_of, self.shared = place, address_of, shared
        #: The islands in the order of the ring that sums go around.
        self.order = list(range(islands))
        self.epoch = 0
        self._came: dict[tuple[int, int, str], deque[memoryview]] = defaultdict(deque)
        self._news, self._closed, self._broken = Condition(), False, ""
        self._lost: dict[int, str] = {}
        self._outboxes: dict[int, Queue[_Message | None]] = {}
        self._waiting = 0  # messages of this epoch that are still to be sent
        self._threads: list[Thread] = []
        self._to: dict[int, SealedConnection] = {}
        self._channel = endpoint.open(self._name_of(island), secret, self._hear)

    def _name_of(self, island: int) -> str:
        """Return the channel name of the rank with this rank's place in another island."""
        return f"streams/{island}/{self.place}"

    def ring(self, islands: Container[int]) -> list[int]:
        """Return ``islands`` in the order in which the ring all-reduce visits them."""
        return [island for island in self.order if island in islands]

    def send(
        self, island: int, tag: str, tensor: torch.Tensor, control: bool = False
    ) -> None:
        """Queue the flat CPU ``tensor`` for ``island`` under ``tag``, without waiting.

        The tensor must not change before :meth:`flush` returns. ``control``: count its bytes as control messages, not
        as tensors.
        """
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
            view = tensor.view(torch.uint8).numpy().data
            item = _Message(self.epoch, tag, view, control)
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
        """Return the next message of ``island`` with this ``tag`` as a flat tensor of type ``dtype``.

        ``limit``: seconds to wait, by default the limit of the streams. Raises :class:`IslandLost` if no message comes.
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
                        "link, then go on from the last checkpoint with weft train --resume RUN"
                    )
                self._news.wait(min(left, MOST_S))
            payload = waiting.popleft()
            if not waiting:
                del self._came[key]
        self.received += len(payload)
        return (
            torch.frombuffer(payload, dtype=dtype)
            if payload
            else torch.empty(0, dtype=dtype)
        )

    def _check(self) -> None:
        if self._broken:
            raise IslandLost(self._broken)

    def break_off(self, why: str) -> None:
        """Make calls that wait, and all later calls until :meth:`begin`, raise :class:`IslandLost`.

        ``why``: the reason that the error states.
        """
        with self._news:
            self._broken = why or "islands come or go"
            self._news.notify_all()

    def begin(self, epoch: int) -> None:
        """Start the epoch with number ``epoch`` on new connections, and drop the messages of earlier epochs."""
        with self._news:
            self.epoch, self._broken, self._waiting = epoch, "", 0
            for key in [key for key in self._came if key[0] < epoch]:
                del self._came[key]
            before, self._to = list(self._to.values()), {}
            self._lost.clear()
            self._news.notify_all()
        # a thread may be about to send there, to one who does not read
        for connection in before:
            connection.close()

    def close(self, flush: bool = True) -> None:
        """End all streams. ``flush``: whether the queued messages are sent first."""
        for outbox in self._outboxes.values():
            outbox.put(None)
        for thread in self._threads:
            thread.join(END_S if flush else 0)
        with self._news:
            self._closed = True
            self._news.notify_all()
        self._channel.close()

    def _loses(self, island: int, why: str) -> None:
        with self._news:
            self._lost.setdefault(island, why)
            self._news.notify_all()

    def _deliver(self, island: int) -> None:
        """Send to one island, as the body of a thread. Once the island is lost, its messages are dropped."""
        outbox, connection = self._outboxes[island], None
        while (item := outbox.get()) is not None:
            epoch, tag, view, control = item
            try:
                if connection is None or self._to.get(island) is not connection:
                    if connection is not None:
                        connection.close()
                    connection = None
                    if epoch == self.epoch and island not in self._lost:
                        connection = self._dial(island, epoch)
                if connection is not None and epoch == self.epoch:
                    count = connection.send({"tag": tag}, [view])
                    size = 0 if control else len(view)
                    self.sent += size
                    self.around += count - size
            except (OSError, RuntimeError) as error:  # of the store, if it has gone
                if connection is not None:
                    connection.close()
                connection = None
                if not self._closed and epoch == self.epoch:
                    why = getattr(error, "strerror", None) or error
                    self._loses(island, f"is gone ({why})")
            with self._news:
                self._waiting -= epoch == self.epoch
                self._news.notify_all()
        if connection is not None:
            connection.close()

    def _dial(self, island: int, epoch: int) -> SealedConnection:
        deadline = time.monotonic() + self.limit
        # a wait in a store would hold other threads of this rank up
        while (address := self.address_of(island)) is None:
            if time.monotonic() > deadline:
                raise OSError(0, f"it has not said where it is for {self.limit:g} s")
            time.sleep(0.05)
        hello = {"from": self.island, "epoch": epoch}
        connection = self._channel.dial(
            address, hello, self.limit, self.limit, self._name_of(island)
        )
        with self._news:
            if epoch != self.epoch:
                connection.close()
                raise OSError(0, "it is of an epoch before")
            self._to[island] = connection
        return connection

    def _hear(self, connection: SealedConnection) -> None:
        """Read one connection, as the body of a thread."""
        hello = connection.hello
        island, epoch, why = int(hello["from"]), int(hello["epoch"]), "is gone"
        try:
            while True:
                head, payload = connection.receive()
                with self._news:
                    if epoch >= self.epoch:
                        self._came[epoch, island, head["tag"]].append(payload)
                        self._news.notify_all()
        except WireForged:
            why = "has sent a message that is not what was sealed (it is broken or forged)"
        except OSError:
            pass
        connection.close()
        if epoch == self.epoch:
            self._loses(island, why)


def own_port(place: int) -> int:
    """Return the port on which this rank listens: ``WEFT_STREAMS_PORT`` plus ``place``, its number in its island.

    If this environment variable is not set, the result is 0, which stands for any free port. Raises :class:`UsageError`
    if the value is no port.
    """
    text = os.environ.get("WEFT_STREAMS_PORT", "0")
    if not text.isdecimal() or int(text) + place > 65535:
        raise UsageError(
            f"WEFT_STREAMS_PORT={text} is no port; give a number such as 7100"
        )
    return int(text) + place if int(text) else 0


def streams_by_store(
    island: int,
    islands: int,
    place: int,
    store: dist.Store,
    endpoint: Endpoint,
    limit: float,
) -> Streams:
    """Open streams between islands through a ``store``, where the ranks find each other and agree on a secret.

    ``island``: this island's number among ``islands`` islands; ``place``: this rank's number in its island;
    ``endpoint``: this process's listener; ``limit``: seconds that a message may take.
    """
    token = secrets.token_hex(32)
    secret = store.compare_set("weft/streams/token", "", token).decode()

    def address_of(other: int) -> Address | None:
        name = f"weft/streams/{other}/{place}"
        if not store.check([name]):
            return None
        host, port = json.loads(store.get(name))
        return host, port

    streams = Streams(
        island, islands, place, endpoint, secret, address_of, limit, store
    )
    # who comes before the channel is open is turned away, and takes this island for lost
    store.set(f"weft/streams/{island}/{place}", json.dumps(endpoint.address))
    return streams


@contextmanager
def open_streams(
    mesh: Mesh, limit: float, encrypt: Encryption = "auto"
) -> Iterator[Streams | None]:
    """Open this rank's streams to the other islands of ``mesh`` for the context; yield None if there are none.

    ``limit``: seconds that a message may take. ``encrypt``: "always" or "never" encrypt, or "auto" for only those
    connections that leave the private network.
    """
    if mesh.island_store is None:
        yield None
        return
    place = dist.get_rank() if dist.is_initialized() else 0
    endpoint = process_endpoint(own_address(), own_port(place), encrypt)
    streams = streams_by_store(
        mesh.island, mesh.islands, place, mesh.island_store, endpoint, limit
    )
    try:
        yield streams
    except BaseException:
        streams.close(flush=False)
        raise
    streams.close()
