"""Messages from one rank to all others, in order, over a channel of the first rank's endpoint."""

import json
import secrets
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch.distributed as dist

from weft.net.endpoint import process_endpoint
from weft.net.groups import limit
from weft.net.lost import PeerLost
from weft.net.wire import SealedConnection

#: Seconds between two signs of life of a rank, and without any until the rank counts as silent. With the time that a
#: router takes to hear of it, a service notices a stopped rank within two seconds.
BEAT_S, SILENT_S = 0.25, 1.25

#: Seconds that the first rank waits at its end until the others have its last message.
END_S = 10.0


def open_tickets(group: dist.ProcessGroup) -> "TicketWriter | TicketReader":
    """Open the connection over which the first rank of ``group`` sends messages to all other ranks of the group. Return
    a writer on the first rank and a reader on each other rank. All ranks of the group must call this function.
    """
    # The store of the default process group; PyTorch has no public way to it.
    store, rank = dist.distributed_c10d._get_default_store(), group.rank()
    members = ",".join(map(str, dist.get_process_group_ranks(group)))
    # the same on all ranks
    book = store.add(f"weft/tickets/{members}/{rank}", 1)
    key = f"weft/tickets/{members}/book-{book}"
    if rank:
        return TicketReader(rank, *json.loads(store.get(key)))
    writer = TicketWriter(group.size())
    store.set(key, json.dumps(writer.place))
    return writer


class TicketWriter:
    """Sends messages from the first rank to all other ranks without waiting for a reader. Messages are JSON values,
    numbered from 1. ``place``: address, name and secret with which readers connect to the writer.
    """

    def __init__(self, ranks: int) -> None:
        name, secret = f"tickets/{secrets.token_hex(8)}", secrets.token_hex(16)
        endpoint = process_endpoint()
        self.place = (endpoint.address, name, secret)
        self.number = 0
        # when each rank has given its last sign of life, and since when this process has been looking without a pause
        self._heard: dict[int, float] = {}
        self._looks_since = self._looked = time.monotonic()
        self._waiting = {rank: SimpleQueue[Any]() for rank in range(1, ranks)}
        self._ended = {rank: threading.Event() for rank in range(1, ranks)}
        self._channel = endpoint.open(name, secret, self._deliver)

    def give(self, message: Sequence[Any]) -> int:
        """Send ``message`` to all other ranks. Return the message's number."""
        self.number += 1
        for queue in self._waiting.values():
            queue.put(message)
        return self.number

    def silence(self) -> str:
        """Return, in words, which rank has given no sign of life for :data:`SILENT_S` seconds; "" if there is no such
        rank. Call it a few times a second. Time during which this process itself was stopped does not count.
        """
        now = time.monotonic()
        if now - self._looked > SILENT_S / 2:
            self._looks_since = now
        self._looked = now
        for rank, heard in sorted(self._heard.items()):
            silent = now - max(heard, self._looks_since)
            if silent > SILENT_S and not self._ended[rank].is_set():
                return (
                    f"its rank {rank} has given no sign of life for {now - heard:.1f} s"
                )
        return ""

    def close(self) -> None:
        """Send no further messages; readers end after those that were sent."""
        for queue in self._waiting.values():
            queue.put(None)
        deadline = time.monotonic() + END_S
        for ended in self._ended.values():
            ended.wait(max(0.0, deadline - time.monotonic()))
        self._channel.close()

    def _deliver(self, connection: SealedConnection) -> None:
        """Send one rank its messages, in a thread of its own."""
        rank, message = int(connection.hello["rank"]), object()
        self._heard[rank] = time.monotonic()
        listener = partial(self._listen, rank, connection)
        threading.Thread(target=listener, name="weft-beats", daemon=True).start()
        with suppress(OSError):  # who is gone is missed in the next collective
            while message is not None:
                message = self._waiting[rank].get()
                connection.send({"message": message})
        self._ended[rank].set()
        connection.close()

    def _listen(self, rank: int, connection: SealedConnection) -> None:
        """Note the signs of life of a rank, in a thread of its own."""
        with suppress(OSError):
            while True:
                connection.receive()
                self._heard[rank] = time.monotonic()


class TicketReader:
    """Reads the messages of the first rank's :class:`TicketWriter` on the rank ``rank``. ``address``, ``name``,
    ``secret``: the writer's ``place``, which says how to connect.
    """

    def __init__(
        self, rank: int, address: Sequence[Any], name: str, secret: str
    ) -> None:
        self.number, (host, port) = 0, address
        patience = limit()
        seconds = patience.total_seconds() if patience else 600.0
        channel = process_endpoint().join(name, secret)
        self._connection = channel.dial((host, port), {"rank": rank}, seconds)
        self._over = threading.Event()
        threading.Thread(target=self._beat, name="weft-beats", daemon=True).start()

    def next(self) -> Any:
        """Wait for the next message and return it; None if there are no more."""
        self.number += 1
        try:
            message = self._connection.receive().head["message"]
        except OSError as error:
            self._over.set()
            raise PeerLost("rank 0, which hands out the steps, is gone") from error
        if message is None:
            self._over.set()
        return message

    def _beat(self) -> None:
        """Give signs of life until the end, in a thread of its own."""
        with suppress(OSError):
            while not self._over.wait(BEAT_S):
                self._connection.send({})
