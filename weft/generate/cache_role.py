"""Cache engines: processes that compute nothing, and keep cache blocks for all engines of a service.

Engines that compute prompts or write store their full blocks there, and later texts that begin alike fetch them by key,
whichever engine they come to (the caching role of CloudMatrix384, 2506.12708). The blocks lie in the cache engines'
memory and files. A block belongs to one of several cache engines by its key (rendezvous hashing), so that their memory
and their links add up. Bytes of a block are ``2 * layers * kv_heads * head_dim * tokens * width``. A block
travels once to be stored, unless two engines fill it within a quarter of a second, and once for each text that fetches
it. A cache engine that is gone costs no request: what it had is computed again.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from hashlib import blake2b
from itertools import takewhile
from pathlib import Path

from weft.generate.block_channel import BlockPeer
from weft.generate.block_files import BlockFiles
from weft.generate.block_source import (
    BlockSource,
    Contents,
    HostBlocks,
    SourceUsage,
    TieredBlocks,
    done,
)
from weft.net.endpoint import Address, Channel
from weft.net.wire import Head

#: Bytes of blocks that may wait to be sent to a cache engine; further blocks are not stored.
QUEUED = 1 << 28
#: Seconds within which a cache engine connects and takes each MiB, and until it is dialled again.
CONNECT_S, TAKE_S, AGAIN_S = 2.0, 5.0, 1.0


class CacheStock:
    """The stock of cache blocks of a cache engine. Blocks are kept in ``memory``, and also in ``files`` unless that is
    None. ``warn`` shows the user a line if a block is larger than the memory.

    It is a :class:`weft.generate.block_channel.BlockStock`.
    """

    def __init__(
        self,
        memory: HostBlocks,
        files: BlockFiles | None = None,
        warn: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.memory, self.files = memory, files
        self._warn, self._warned = warn, False
        sources: list[BlockSource] = [memory] if files is None else [memory, files]
        self._tiers = TieredBlocks(sources)

    def keys(self) -> set[bytes]:
        """Return the keys of all blocks in memory or files."""
        kept = self.memory.keys()
        return kept if self.files is None else kept | self.files.keys()

    def fetch(self, keys: Sequence[bytes]) -> Future[list[Contents]]:
        """Start to read the blocks of ``keys``. Return a future of their contents; the list ends before the first block
        that is neither in memory nor in the files.
        """
        return self._tiers.fetch(keys)

    def store(self, key: bytes, contents: Contents) -> bool | None:
        """Keep the block with the key ``key`` and the bytes ``contents`` in memory and files. Return None if it was
        there already, else True.
        """
        if self._tiers.find([key]):
            return None
        if len(contents) > self.memory.most and not self._warned:
            self._warned = True
            self._warn(
                f"a block of {len(contents):,} bytes does not fit into {self.memory.most:,} bytes of memory; "
                f"give more --host-cache"
            )
        self._tiers.store(key, contents)
        return True

    def usages(self) -> list[SourceUsage]:
        """Return the numbers of blocks and bytes that memory and files have given and taken so far."""
        return self._tiers.usages()

    def close(self) -> None:
        """Finish writing the files, within a limit of time, and free the memory."""
        self._tiers.close()


def open_stock(
    memory: int, folder: Path | None, model: str, most: int, warn: Callable[[str], None]
) -> CacheStock:
    """Return a stock of at most ``memory`` bytes in this process. ``folder``: folder for files beside it; None: none.
    ``model``: name of the model's folder in it. ``most``: bytes that all files together may take. ``warn`` shows the
    user a line.

    Raises :class:`UsageError` if the folder cannot be made.
    """
    files = None if folder is None else BlockFiles(folder, model, most, warn)
    return CacheStock(HostBlocks(memory), files, warn)


class CachePeer:
    """A cache engine, as other engines use it: they find, read and store cache blocks there. ``channel``, ``address``:
    channel and address by which it is dialled.
    """

    def __init__(self, channel: Channel, address: Address) -> None:
        self.address = address
        self.reader = BlockPeer(channel, address)
        self._channel = channel
        self._queue: deque[tuple[bytes, Contents]] = deque()
        self._queued, self._ended = 0, False
        self._wake = threading.Condition()
        self._writer = threading.Thread(target=self._send_all, name="block-store", daemon=True)  # fmt: skip
        self._writer.start()

    def has(self, key: bytes) -> bool:
        """Return whether the cache engine probably has the block of ``key``."""
        return key in self.reader.keys

    def rank(self, key: bytes) -> bytes:
        """Return a hash of ``key`` and of this peer's address (rendezvous hashing): the block belongs to the peer with
        the largest hash.
        """
        return blake2b(key, digest_size=8, key=repr(self.address).encode()[:64]).digest()  # fmt: skip

    def store(self, key: bytes, contents: Contents) -> bool | None:
        """Queue the block with the key ``key`` and the bytes ``contents``, to be sent to the cache engine. Return True
        if it was queued, None if the cache engine has it already, and False if too many bytes wait to be sent.
        """
        if self.has(key):
            return None
        with self._wake:
            if self._ended or self._queued + len(contents) > QUEUED:
                return False
            self._queue.append((key, contents))
            self._queued += len(contents)
            self._wake.notify()
        return True

    def close(self) -> None:
        """Stop sending and reading blocks, and close the connections to the cache engine."""
        with self._wake:
            self._ended = True
            self._wake.notify()
        self.reader.close()

    def _send_all(self) -> None:
        """Send what is queued, until the end. What cannot be sent is dropped."""
        while not self._ended:
            with suppress(OSError):
                self._send_over()
            with self._wake:
                self._queue.clear()
                self._queued = 0
                self._wake.wait_for(lambda: self._ended, AGAIN_S)

    def _send_over(self) -> None:
        """Send what is queued over a connection, until it or this peer ends."""
        hello: Head = {"stores": "blocks"}
        connection = self._channel.dial(self.address, hello, CONNECT_S, TAKE_S)
        try:
            while True:
                with self._wake:
                    self._wake.wait_for(lambda: self._queue or self._ended)
                    if self._ended:
                        return
                    key, contents = self._queue.popleft()
                    self._queued -= len(contents)
                connection.send({"do": "store"}, [memoryview(key), memoryview(contents)])  # fmt: skip
        finally:
            connection.close()


class CacheEngines:
    """Cache blocks at all cache engines of a service. It is a :class:`weft.generate.block_source.BlockSource`.

    ``channel``: channel by which the cache engines are dialled.
    """

    name = "caches"

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.peers: dict[Address, CachePeer] = {}
        self._lock = threading.Lock()
        self._joiner = ThreadPoolExecutor(2, "block-caches")

    def meet(self, addresses: Sequence[Address]) -> None:
        """Use the cache engines at ``addresses`` from now on, and close the connections to all others."""
        with self._lock:
            for address in set(self.peers) - set(addresses):
                self.peers.pop(address).close()
            for address in set(addresses) - set(self.peers):
                self.peers[address] = CachePeer(self.channel, address)

    def find(self, keys: Sequence[bytes]) -> int:
        """Return how many of ``keys``, from the first one on without a gap, are at some cache engine."""
        peers = self._all()
        return sum(1 for _ in takewhile(lambda key: any(p.has(key) for p in peers), keys))  # fmt: skip

    def fetch(self, keys: Sequence[bytes]) -> Future[list[Contents]]:
        """Start to read the blocks of ``keys``, from all cache engines that have some of them at the same time. Return
        a future of the blocks' contents; the list ends before the first block that is missing.
        """
        shares: dict[CachePeer, list[int]] = {}
        peers = self._all()
        for place, key in enumerate(keys):
            holders = [peer for peer in peers if peer.has(key)]
            if not holders:
                break
            shares.setdefault(owner_of(key, holders), []).append(place)
        if not shares:
            return done([])
        parts = {
            peer: peer.reader.fetch([keys[place] for place in places])
            for peer, places in shares.items()
        }
        return self._joiner.submit(_joined, shares, parts)

    def store(self, key: bytes, contents: Contents) -> bool | None:
        """Send the block with the key ``key`` and the bytes ``contents`` to the cache engine to which its key belongs.
        Return whether it will be sent; None if that engine has it, or there is no cache engine.
        """
        peers = self._all()
        return owner_of(key, peers).store(key, contents) if peers else None

    def close(self) -> None:
        """Close the connections to all cache engines."""
        self.meet([])
        self._joiner.shutdown(wait=False, cancel_futures=True)

    def _all(self) -> list[CachePeer]:
        with self._lock:
            return [*self.peers.values()]


def owner_of(key: bytes, peers: Sequence[CachePeer]) -> CachePeer:
    """Return the peer, out of ``peers``, to which the block of ``key`` belongs. When a peer comes or goes, most keys
    keep their owner.
    """
    return peers[0] if len(peers) == 1 else max(peers, key=lambda peer: peer.rank(key))


def _joined(
    shares: dict[CachePeer, list[int]], parts: dict[CachePeer, Future[list[Contents]]]
) -> list[Contents]:
    """Return the blocks of all cache engines in their order, up to the first one that has not come."""
    blocks: dict[int, Contents] = {}
    for peer, places in shares.items():
        with suppress(CancelledError):  # that one is closed
            blocks |= zip(places, parts[peer].result(), strict=False)
    ordered: list[Contents] = []
    while len(ordered) in blocks:
        ordered.append(blocks[len(ordered)])
    return ordered
