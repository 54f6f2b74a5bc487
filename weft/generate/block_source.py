"""Where cache blocks outlive the cache: host memory, files, or another engine.

A block is found by a key that stands for the model, the adapter and the whole text up to the block's end, so equal keys
mean equal contents. Contents are bytes in the order of :mod:`weft.generate.block_contents`.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import takewhile
from typing import NamedTuple, Protocol

from weft.generate.fetch_pace import FetchPace

#: Seconds that blocks are waited for, more than any source takes to notice that its blocks do not come.
READ_S = 15.0

#: The contents of a block.
Contents = bytes | bytearray | memoryview


class SourceUsage(NamedTuple):
    """Numbers of cache blocks that a source has given and taken so far.

    Attributes:
        ``name``: kind of source: "host" (host memory), "files", "engines" (other engines) or "caches" (cache engines).
        ``fetched``: number of blocks that were read from it.
        ``fetched_bytes``: their bytes.
        ``stored``: number of blocks that it has taken.
        ``stored_bytes``: their bytes.
        ``refused``: number of blocks that it has not taken, for want of room, or not given, although it had them a
            moment before.
    """

    name: str
    fetched: int = 0
    fetched_bytes: int = 0
    stored: int = 0
    stored_bytes: int = 0
    refused: int = 0


class BlockSource(Protocol):
    """Interface of objects that keep cache blocks (keys and values of a fixed number of tokens) outside the cache. A
    block's contents are bytes. It is found by its key, which stands for the model, the adapter and the whole text up to
    the block's end. The methods can be called in any thread, and none of them waits long. ``name``: kind of the source,
    such as "host" or "files".
    """

    name: str

    def find(self, keys: Sequence[bytes]) -> int:
        """Return how many of ``keys``, from the first one on without a gap, the source has."""

    def fetch(self, keys: Sequence[bytes]) -> Future[list[Contents]]:
        """Start to read the blocks of ``keys``. Return a future of the list of their contents; the list ends before the
        first block that is gone or damaged.
        """

    def store(self, key: bytes, contents: Contents) -> bool | None:
        """Keep the block with the key ``key`` and the bytes ``contents``, if there is room. A later :meth:`find` may or
        may not see it. Return whether the block was taken; None if the source had it already, or takes no blocks at
        all.
        """

    def close(self) -> None:
        """Finish writing, within a limit of time, and free the memory that the source uses."""


def done(contents: list[Contents]) -> Future[list[Contents]]:
    """Return a future that is already completed with the result ``contents``."""
    future: Future[list[Contents]] = Future()
    future.set_result(contents)
    return future


class HostBlocks:
    """Keeps blocks in this process's memory, at most ``most`` bytes. When it is full, the least recently used blocks
    are dropped.
    """

    name = "host"

    def __init__(self, most: int) -> None:
        self.most, self.bytes = most, 0
        self._blocks: OrderedDict[bytes, Contents] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, keys: Sequence[bytes]) -> int:
        """Return how many of ``keys``, from the first one on without a gap, are in memory."""
        with self._lock:
            return sum(1 for _ in takewhile(self._blocks.__contains__, keys))

    def __len__(self) -> int:
        return len(self._blocks)

    def keys(self) -> set[bytes]:
        """Return the keys of all blocks in memory."""
        with self._lock:
            return set(self._blocks)

    def fetch(self, keys: Sequence[bytes]) -> Future[list[Contents]]:
        """Return a completed future of the list of contents of the blocks of ``keys``; the list ends before the first
        key that is not in memory.
        """
        with self._lock:
            there = list(takewhile(self._blocks.__contains__, keys))
            # a text's first block is needed by all that follow it: it goes last
            for key in reversed(there):
                self._blocks.move_to_end(key)
            return done([self._blocks[key] for key in there])

    def store(self, key: bytes, contents: Contents) -> bool | None:
        """Keep the block with the key ``key`` and the bytes ``contents`` in memory. Return whether it was taken, or
        None if it was there already.
        """
        size = len(contents)
        with self._lock:
            if key in self._blocks or size > self.most:
                return None if key in self._blocks else False
            self._blocks[key] = contents
            self.bytes += size
            while self.bytes > self.most:
                _, gone = self._blocks.popitem(last=False)
                self.bytes -= len(gone)
        return True

    def close(self) -> None:
        """Drop all blocks from memory."""
        with self._lock:
            self._blocks.clear()
            self.bytes = 0


class TieredBlocks:
    """Keeps blocks in several ``sources``, at least one, from the fastest to the slowest. A block that is read from a
    slower source is also stored in the faster sources before it.
    """

    name = "all"

    def __init__(self, sources: Sequence[BlockSource]) -> None:
        self.sources = list(sources)
        self._usages = {each.name: SourceUsage(each.name) for each in sources}
        self._paces = {each.name: FetchPace() for each in sources}
        self._counting = threading.Lock()
        self._reader = ThreadPoolExecutor(2, "blocks")

    def find(self, keys: Sequence[bytes]) -> int:
        """Return how many of ``keys``, from the first one on without a gap, are in at least one of the sources."""
        count = 0
        while count < len(keys):
            more = max(source.find(keys[count:]) for source in self.sources)
            if not more:
                break
            count += more
        return count

    def fetch(self, keys: Sequence[bytes]) -> Future[list[Contents]]:
        """Start to read the blocks of ``keys``, each from the first source that has it. Return a future of the blocks'
        contents; the list ends before the first block that no source has.
        """
        first = self.sources[0]
        if first.find(keys) == len(keys):
            begun = self._paces[first.name].begin()
            try:
                future = first.fetch(keys)
            except BaseException:
                self._count_fetched(first, len(keys), [], begun)
                raise
            future.add_done_callback(
                lambda ended: self._count_fetched(first, len(keys), _come(ended), begun)
            )
            return future
        return self._reader.submit(self._collect, keys)

    def gainful(self, keys: Sequence[bytes], computing: Callable[[int], float]) -> int:
        """Return how many of ``keys``, from the first one on, are to be read so that all blocks are there soonest; the
        others are computed. ``keys``: those that :meth:`find` has counted. ``computing``: returns the seconds in which
        so many blocks, from the first one on, are computed.

        Each source has the pace of its last readings. A source of which nothing is known counts as quick.
        """
        best, least, seen, waited = 0, 0.0, 0, 0.0
        while seen < len(keys):
            counts = ((each.find(keys[seen:]), each.name) for each in self.sources)
            blocks, name = next((pair for pair in counts if pair[0]), (0, ""))
            if not blocks:
                break
            seen += blocks
            waited += self._paces[name].seconds(blocks)
            if (lost := waited - computing(seen)) <= least:
                best, least = seen, lost
        return best

    def store(self, key: bytes, contents: Contents) -> None:
        """Store the block with the key ``key`` and the bytes ``contents`` in every source that accepts it."""
        for source in self.sources:
            self._store(source, key, contents)

    def usages(self) -> list[SourceUsage]:
        """Return the numbers of blocks and bytes that each source has given and taken so far."""
        with self._counting:
            return [*self._usages.values()]

    def close(self) -> None:
        """Close all sources, which stores what waits to be written and frees their memory."""
        self._reader.shutdown(wait=False, cancel_futures=True)
        for source in self.sources:
            source.close()

    def insert(self, number: int, source: BlockSource) -> None:
        """Insert ``source`` into the list of sources at the index ``number``; sources behind it are slower."""
        self.sources.insert(number, source)
        self._usages.setdefault(source.name, SourceUsage(source.name))
        self._paces.setdefault(source.name, FetchPace())

    def _store(self, source: BlockSource, key: bytes, contents: Contents) -> None:
        taken = source.store(key, contents)
        if taken:
            self._count(source, stored=1, stored_bytes=len(contents))
        elif taken is False:
            self._count(source, refused=1)

    def _count_fetched(
        self, source: BlockSource, asked: int, contents: Sequence[Contents], begun: float
    ) -> None:  # fmt: skip
        """Count what a source gave of ``asked`` blocks that it had, and how long it took since the time ``begun``."""
        self._paces[source.name].end(begun, asked)
        size, lacks = sum(map(len, contents)), asked - len(contents)
        self._count(source, fetched=len(contents), fetched_bytes=size, refused=lacks)

    def _count(self, source: BlockSource, **more: int) -> None:
        with self._counting:
            usage = self._usages[source.name]
            sums = {name: getattr(usage, name) + n for name, n in more.items()}
            self._usages[source.name] = usage._replace(**sums)

    def _collect(self, keys: Sequence[bytes]) -> list[Contents]:
        collected: list[Contents] = []
        while len(collected) < len(keys):
            rest = keys[len(collected) :]
            more = self._next_run(rest)
            if not more:
                break
            collected += more
        return collected

    def _next_run(self, keys: Sequence[bytes]) -> list[Contents]:
        """The contents of the first of ``keys`` and of those behind it that the same source has."""
        for number, source in enumerate(self.sources):
            count = source.find(keys)
            if not count:
                continue
            contents = self._read(source, keys[:count])
            if not contents:
                continue
            for key, each in zip(keys, contents, strict=False):
                for faster in self.sources[:number]:
                    self._store(faster, key, each)
            return contents
        return []

    def _read(self, source: BlockSource, keys: Sequence[bytes]) -> list[Contents]:
        """Read the blocks of ``keys`` from ``source``; none if it is closed meanwhile, or does not give them in
        time.
        """
        begun, contents = self._paces[source.name].begin(), list[Contents]()
        try:
            reading = source.fetch(keys)
            # a future that was cancelled before it ran is never done for concurrent.futures.wait
            with suppress(CancelledError, TimeoutError):
                contents = reading.result(READ_S)
            reading.cancel()
        finally:
            self._count_fetched(source, len(keys), contents, begun)
        return contents


def _come(ended: Future[list[Contents]]) -> list[Contents]:
    """Return what a reading that has ended gave; nothing if it has failed or was cancelled."""
    failed = ended.cancelled() or ended.exception() is not None
    return [] if failed else ended.result()
