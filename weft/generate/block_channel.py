"""Cache blocks from other engines' memory, over a channel of their endpoints.

The host memories of all engines are one pool (peer memory pooling of EnergonAI, 2209.02341): what one engine has
computed, every other one reads instead of computing it again. Each engine learns from each other which keys it has, a
few times a second, so that finding a block asks nobody. What is gone meanwhile is computed. An engine that ends or
stalls costs no request. Over the same channel, engines send blocks to those that keep them for all
(:mod:`weft.generate.cache_role`).
"""

import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Protocol

from weft.generate.block_source import Contents, done
from weft.net.endpoint import Address, Channel, Endpoint
from weft.net.wire import Frame, Head, SealedConnection

#: Name of the channel.
BLOCKS = "blocks"
#: Bytes of a key.
KEY = 16
#: Seconds within which a peer connects and answers, between two questions for news, and until it is dialled again.
CONNECT_S, ANSWER_S, NEWS_S, AGAIN_S = 2.0, 5.0, 0.25, 1.0


class BlockStock(Protocol):
    """Interface of a store of cache blocks (keys and values of tokens) that other engines read, and into which they may
    put blocks.
    """

    def keys(self) -> set[bytes]:
        """Return the keys of all blocks that the store has now."""

    def fetch(self, keys: Sequence[bytes]) -> Future[list[Contents]]:
        """Start to read the blocks of ``keys``. Return a future of the blocks' contents in the order of ``keys``; the
        list ends before the first block that the store does not have.
        """

    def store(self, key: bytes, contents: Contents) -> bool | None:
        """Keep the block with the key ``key`` and the bytes ``contents``, if there is room. Return whether it was
        taken; None if the store had it already.
        """


def open_blocks(
    endpoint: Endpoint, secret: str, stock: BlockStock, takes: bool = False
) -> Channel:
    """Let engines that know the ``secret`` read the blocks in ``stock``, at the address of ``endpoint``. Return the
    channel that answers them. ``takes``: whether engines may also store blocks there.
    """
    return endpoint.open(BLOCKS, secret, lambda c: serve_blocks(stock, c, takes))


def serve_blocks(stock: BlockStock, connection: SealedConnection, takes: bool) -> None:
    """Answer an engine that reads blocks of ``stock``, until the engine closes ``connection``. ``takes``: whether the
    engine may also store blocks.
    """
    sent = set[bytes]()
    try:
        while True:
            frame = connection.receive()
            if frame.head.get("do") == "store":
                if not takes:
                    break
                stock.store(bytes(frame.payload[:KEY]), frame.payload[KEY:])
            elif frame.head.get("do") == "news":
                there = stock.keys()
                added, gone = b"".join(there - sent), b"".join(sent - there)
                sent = there
                connection.send({"added": len(added)}, [memoryview(added + gone)])
            else:
                contents = stock.fetch(split_keys(frame.payload)).result()
                sizes = [len(each) for each in contents]
                connection.send({"sizes": sizes}, [memoryview(x) for x in contents])
    except (OSError, CancelledError):  # the stock is closed
        pass
    finally:
        connection.close()


def split_keys(payload: memoryview) -> list[bytes]:
    """Return the keys of cache blocks in the ``payload`` of a message, where keys of equal length follow one
    another.
    """
    whole = bytes(payload)
    return [whole[at : at + KEY] for at in range(0, len(whole), KEY)]


class BlockPeer:
    """Another engine, as a place from whose host memory cache blocks are read. ``channel``, ``address``: channel and
    address by which the engine is dialled.

    Attributes:
        ``keys``: keys of the blocks that the engine had when it was last asked.
    """

    def __init__(self, channel: Channel, address: Address) -> None:
        self.channel, self.address, self.keys = channel, address, set[bytes]()
        self._reader = ThreadPoolExecutor(1, "block-peer")
        self._connection: SealedConnection | None = None
        self._ended = threading.Event()
        threading.Thread(target=self._watch, name="block-news", daemon=True).start()

    def find(self, keys: Sequence[bytes]) -> int:
        """Return how many of ``keys``, from the first one on without a gap, the other engine probably has."""
        for count, key in enumerate(keys):
            if key not in self.keys:
                return count
        return len(keys)

    def fetch(self, keys: Sequence[bytes]) -> Future[list[Contents]]:
        """Start to read the blocks of ``keys`` from the engine. Return a future of their contents; its result is an
        empty list if the engine does not answer in time, or if this object is closed.
        """
        try:
            return self._reader.submit(self._fetch, list(keys))
        except RuntimeError:  # closed since somebody has found them
            return done([])

    def close(self) -> None:
        """Close the connection to the engine and stop reading from it."""
        self._ended.set()
        self.keys = set()
        self._reader.shutdown(wait=False, cancel_futures=True)
        if self._connection is not None:
            self._connection.close()

    def _fetch(self, keys: list[bytes]) -> list[Contents]:
        try:
            if self._connection is None:
                self._connection = self._dial()
            self._connection.send({"do": "fetch"}, [memoryview(b"".join(keys))])
            frame = self._connection.receive(limit=ANSWER_S)
            return _pieces(frame)
        except (OSError, KeyError, TypeError, ValueError):
            if self._connection is not None:
                self._connection.close()
            # nothing more is expected of it before it tells news again
            self._connection, self.keys = None, set()
            return []

    def _dial(self) -> SealedConnection:
        hello: Head = {"reads": "blocks"}
        return self.channel.dial(self.address, hello, CONNECT_S, ANSWER_S)

    def _watch(self) -> None:
        """Keep :attr:`keys` up to date, over a connection of its own, until the end."""
        while not self._ended.is_set():
            with suppress(OSError, KeyError, TypeError, ValueError):
                self._follow(self._dial())
            self.keys = set()
            self._ended.wait(AGAIN_S)

    def _follow(self, connection: SealedConnection) -> None:
        keys = set[bytes]()
        try:
            while not self._ended.wait(NEWS_S):
                connection.send({"do": "news"})
                head, payload = connection.receive(limit=ANSWER_S)
                added = int(head["added"])
                keys |= {*split_keys(payload[:added])}
                keys -= {*split_keys(payload[added:])}
                self.keys = set(keys)
        finally:
            connection.close()


class PeerBlocks:
    """Cache blocks in the host memories of other engines. It is a :class:`weft.generate.block_source.BlockSource` from
    which blocks are only read.

    ``channel``: channel by which the engines are dialled.
    """

    name = "engines"

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.peers: dict[Address, BlockPeer] = {}
        self._lock = threading.Lock()

    def meet(self, addresses: Sequence[Address]) -> None:
        """Read from the engines at ``addresses`` from now on, and close the connections to all others."""
        with self._lock:
            for address in set(self.peers) - set(addresses):
                self.peers.pop(address).close()
            for address in set(addresses) - set(self.peers):
                self.peers[address] = BlockPeer(self.channel, address)

    def find(self, keys: Sequence[bytes]) -> int:
        """Return the largest number of leading ``keys``, without a gap, whose blocks a single other engine has."""
        return max((peer.find(keys) for peer in self._all()), default=0)

    def fetch(self, keys: Sequence[bytes]) -> Future[list[Contents]]:
        """Start to read the blocks of ``keys`` from one engine: the one that has most of them from the first one on.
        Return a future of the blocks' contents, an empty list if there is no engine.
        """
        peers = self._all()
        if not peers:
            return done([])
        return max(peers, key=lambda peer: peer.find(keys)).fetch(keys)

    def store(self, key: bytes, contents: Contents) -> None:
        """Do nothing: other engines keep the blocks that they have computed, and accept none from here."""

    def close(self) -> None:
        """Close the connections to all other engines, so that no more blocks are read from them."""
        self.meet([])

    def _all(self) -> list[BlockPeer]:
        with self._lock:
            return [*self.peers.values()]


def _pieces(frame: Frame) -> list[Contents]:
    pieces, at = list[Contents](), 0
    for size in frame.head["sizes"]:
        pieces.append(frame.payload[at : at + size])
        at += size
    if at != len(frame.payload):
        raise ValueError("sizes that are not those of the payload")
    return pieces
