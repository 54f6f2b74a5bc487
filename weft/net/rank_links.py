"""Connections between all ranks of a process group, over which a tensor arrives after the delay of one link.

Gloo's messages wait for the receiver's word that it is ready, which is one more delay of the link, and its all-reduce
goes round a ring. Over slow links both cost more than the bytes. Here a tensor is a frame of a channel of the process's
endpoint (:mod:`weft.net.endpoint`), sent as soon as it is there.
"""

from __future__ import annotations

import json
import select
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from weft.net.endpoint import process_endpoint
from weft.net.groups import limit
from weft.net.lost import PeerLost, peer_lost
from weft.net.wire import CipherMissing, Frame, Incoming, SealedConnection

T = torch.Tensor

#: Seconds that ranks wait for each other in a simulated group, which has no limit.
WAIT_S = 600.0


class _Outgoing(NamedTuple):
    """A frame on its way out: what is left of its first buffer, and of the frame."""

    buffer: memoryview
    rest: chain[memoryview]


class RankLinks:
    """Connections of this rank to all other ranks of ``group``, for messages of CPU tensors.

    Create the object on all ranks of the group at the same time. Ranks are numbered as in the group.

    Attributes:
        ``rank``, ``ranks``: number of this rank, and how many there are.
        ``hosts``: for each host, its ranks in order; the host of rank 0 first.
        ``bytes_sent``: bytes of tensors that this rank has sent.
        ``messages``: number of tensors that this rank has sent.

    Raises :class:`weft.net.lost.PeerLost` if a rank does not connect in time.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        # The store of the default process group; PyTorch has no public way to it.
        store = dist.distributed_c10d._get_default_store()
        self.rank, self.ranks = group.rank(), group.size()
        self.members = dist.get_process_group_ranks(group)
        given = limit()
        self.limit = given.total_seconds() if given else WAIT_S
        self.bytes_sent = self.messages = 0
        self._to: dict[int, SealedConnection] = {}
        self._news = threading.Condition()
        key = f"weft/links/{','.join(map(str, self.members))}"
        # how many links this group has had is the same on all ranks
        key = f"{key}/{store.add(f'{key}/{self.rank}', 1)}"
        token = store.compare_set(f"{key}/token", "", _token()).decode()
        endpoint, name = process_endpoint(), f"links/{token[:16]}"
        self._channel = endpoint.open(f"{name}/{self.rank}", token, self._join)
        store.set(f"{key}/at-{self.rank}", json.dumps(endpoint.address))
        addresses: list[list[Any]] = []
        for rank in range(self.ranks):
            at = f"{key}/at-{rank}"
            try:
                store.wait([at], timedelta(seconds=self.limit))
            except RuntimeError as error:  # of the store, which names its key alone
                doing = "waits for it to make its connections"
                raise self._lost(rank, doing, error) from error
            addresses.append(json.loads(store.get(at)))
        try:
            for rank in range(self.rank):
                hello, of_rank = {"rank": self.rank}, f"{name}/{rank}"
                self._to[rank] = self._channel.dial(
                    tuple(addresses[rank]), hello, self.limit, self.limit, of_rank
                )
        except CipherMissing:  # which says what to install
            raise
        except OSError as error:
            raise self._lost(rank, "connects to it", error) from error
        with self._news:
            came = self._news.wait_for(
                lambda: len(self._to) == self.ranks - 1, self.limit
            )
        if not came:
            missing = next(
                rank
                for rank in range(self.rank + 1, self.ranks)
                if rank not in self._to
            )
            late = TimeoutError("timed out")
            raise self._lost(missing, "waits for its connection", late)
        # nobody else is to come, and the endpoint keeps these links no longer than their owner
        self._channel.shut()
        places: dict[str, list[int]] = {}
        for rank, (host, _) in enumerate(addresses):
            places.setdefault(host, []).append(rank)
        self.hosts = list(places.values())

    def exchange(self, out: Mapping[int, T], into: Mapping[int, T]) -> None:
        """Send tensors to some ranks and receive tensors from some ranks at the same time; return when all have
        arrived.

        ``out``: the contiguous CPU tensor to send to each rank. ``into``: the contiguous CPU tensor to fill with the
        data of each rank, which has as many bytes as that rank sends. Two ranks must make their calls for each other
        in the same order. Raises :class:`weft.net.lost.PeerLost`, which names a rank that is gone or late.
        """
        deadline = time.monotonic() + self.limit
        leaving = {rank: self._frame(rank, tensor) for rank, tensor in out.items()}
        coming = {rank: self._reading(rank, tensor) for rank, tensor in into.items()}
        rank = -1
        try:
            while True:
                for rank in list(leaving):
                    if left := self._push(rank, leaving[rank]):
                        leaving[rank] = left
                    else:
                        del leaving[rank]
                for rank in list(coming):
                    if coming[rank].take(self._to[rank].socket):
                        del coming[rank]
                if not leaving and not coming:
                    return
                rank = next(iter(coming or leaving))
                self._await(leaving.keys(), coming.keys(), deadline)
        except OSError as error:
            doing = "waits for its part of a sum" if coming else "hands it its part"
            raise self._lost(rank, doing, error) from error

    def close(self) -> None:
        """Close the connections to the other ranks."""
        self._channel.close()

    def _frame(self, rank: int, tensor: T) -> _Outgoing:
        view = _bytes_of(tensor)
        self.bytes_sent += len(view)
        self.messages += 1
        buffers = self._to[rank].session.encode({}, [view])
        return _Outgoing(memoryview(b""), chain(map(memoryview, buffers)))

    def _push(self, rank: int, frame: _Outgoing) -> _Outgoing | None:
        """Send what the socket takes of ``frame``; return what is left, None if nothing is."""
        sock, (buffer, rest) = self._to[rank].socket, frame
        with suppress(BlockingIOError, InterruptedError):
            while True:
                while len(buffer):
                    buffer = buffer[sock.send(buffer) :]
                following = next(rest, None)
                if following is None:
                    return None
                buffer = following
        return _Outgoing(buffer, rest)

    def _reading(self, rank: int, tensor: T) -> Incoming[Frame]:
        view = _bytes_of(tensor)
        return Incoming(self._to[rank].session.decode(lambda head, size: view))

    def _await(self, leaving: object, coming: object, deadline: float) -> None:
        """Wait until a connection can go on. Raises TimeoutError after ``deadline``."""
        waiting = select.poll()
        for rank, connection in self._to.items():
            events = select.POLLIN * (rank in coming)  # type: ignore[operator]
            events |= select.POLLOUT * (rank in leaving)  # type: ignore[operator]
            if events:
                waiting.register(connection.socket, events)
        left = deadline - time.monotonic()
        if left <= 0 or not waiting.poll(left * 1000):
            raise TimeoutError(f"timed out after {self.limit:g} s")

    def _join(self, connection: SealedConnection) -> None:
        """Keep the connection that a rank with a higher number has made."""
        with self._news:
            self._to[int(connection.hello["rank"])] = connection
            self._news.notify_all()

    def _lost(self, rank: int, doing: str, error: Exception) -> PeerLost:
        world = self.members[rank]
        # a store's error has a trace of its own on further lines
        why = str(error).partition("\n")[0]
        lost = peer_lost(error, world, f"{doing} ({why})", self.limit)
        return lost or PeerLost(f"rank {world} is gone: rank {dist.get_rank()} {doing}")


def _token() -> str:
    import secrets

    return secrets.token_hex(32)


def _bytes_of(tensor: T) -> memoryview:
    flat = tensor.detach().view(-1).view(torch.uint8)
    return flat.numpy().data
