"""An engine's cache beyond its own blocks: full blocks are kept in a source, and found there by later texts.

A request whose first blocks are in the source gets blocks for them here and waits until they are read, while other
requests compute. If that takes too long, or a block turns out to be gone, the rest is computed as usual.
"""

import json
import math
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from functools import partial
from hashlib import blake2b
from pathlib import Path
from weakref import WeakSet

import torch

from weft.errors import UsageError
from weft.generate.block_channel import BLOCKS, PeerBlocks, open_blocks
from weft.generate.block_contents import bytes_of
from weft.generate.block_files import BlockFiles
from weft.generate.block_source import BlockSource, Contents, HostBlocks, TieredBlocks
from weft.generate.cache_role import CacheEngines
from weft.generate.engine import Engine, KeptUsage
from weft.generate.request import BlockFetch, Request
from weft.net.endpoint import Channel, Endpoint

#: Seconds that a request waits for its blocks before it computes them, at most and at least. In between, it waits for
#: as long as it would compute them: so a place that stalls costs no more than twice the time.
FETCH_S, LEAST_S = 5.0, 0.5
#: Seconds that a step waits for blocks if nothing else is to be computed.
IDLE_S = 0.005
#: Blocks that may wait to be kept while steps are under way whose end would have to be waited for.
DEFERRED = 64


class OutsideCache:
    """Keeps copies of the full cache blocks of ``engine`` in ``source``, outside its cache, and fetches them for
    requests whose text begins alike.

    ``source``: where blocks are kept, such as host memory or files. ``name``: fingerprint of the model, which enters
    the keys of all blocks, so that no model gets blocks of another. ``seconds``: how long a request waits for its
    blocks; then it computes them itself. ``warn``: shows the user a line.

    Attributes:
        ``fetched``: number of blocks that were read from the source so far.
        ``late``: how often a request has computed blocks because they did not come in time.
        ``looked``: number of blocks that requests have looked for when they first began.
    """

    def __init__(
        self, engine: Engine, source: BlockSource, name: str, seconds: float = FETCH_S,
        warn: Callable[[str], None] = lambda line: None,
    ) -> None:  # fmt: skip
        self.engine, self.source, self.name, self.seconds = engine, source, name, seconds  # fmt: skip
        self.warn, self._failed = warn, False
        self._version: int | None = 0  # of the weights that the name stands for
        self.fetched = self.late = self.looked = 0
        self._asked: WeakSet[Request] = WeakSet()
        self._fetching: list[Request] = []
        self._full: list[tuple[Request, bytes, int]] = []
        self._size = bytes_of(engine.block_form(), engine.reader.size)
        if not self._size:
            raise UsageError(
                "a plugin's model remembers nothing that could be kept; leave out --host-cache and --cache-folder"
            )
        engine.outside = engine.scheduler.outside = self

    # Called by the scheduler.

    def find(self, request: Request, keys: Sequence[bytes]) -> int:
        """Return how many of ``keys``, from the first one on without a gap, the source has. ``keys``: keys of those
        blocks of ``request`` that the engine's cache lacks. An error of the source is shown to the user, and the result
        is 0.
        """
        if not self._knows(request) or not keys:
            return 0
        if request not in self._asked:
            self._asked.add(request)
            self.looked += len(keys)
        outside = self._outside_keys(request, keys)
        try:
            there = self.source.find(outside)
            if there and isinstance(self.source, TieredBlocks):
                computing = partial(self._computing, request, len(keys))
                return self.source.gainful(outside[:there], computing)
            return there
        except Exception as error:
            self._give_up(error)
            return 0

    def fetch(self, request: Request, keys: Sequence[bytes]) -> None:
        """Start to read the blocks of ``keys`` for ``request``, which waits for them for a limited time."""
        try:
            future = self.source.fetch(self._outside_keys(request, keys))
        except Exception as error:
            return self._give_up(error)
        computing = self._computing(request, len(keys), len(keys))
        limit = min(self.seconds, max(LEAST_S, computing))
        request.fetch = BlockFetch(future, time.monotonic() + limit)
        self._fetching.append(request)

    def note_full(self, request: Request, key: bytes, block: int) -> None:
        """Note that the cache block number ``block``, of ``request``, is full. It is stored under ``key`` before it can
        be overwritten.
        """
        if self._knows(request) and block >= 0:
            self._full.append((request, key, block))

    # Called by the engine, between steps.

    def settle(self) -> None:
        """Store the blocks that have become full, and write the blocks that were fetched for requests into the cache.
        The engine calls this between two steps.
        """
        if self._full and (not self.engine.sent or len(self._full) > DEFERRED):
            full, self._full = self._full, []
            self._keep(full)
        for request in [*self._fetching]:
            fetch = request.fetch
            if fetch is None:  # it has lost its blocks, or has ended
                self._fetching.remove(request)
            elif fetch.blocks.done():
                self._fetching.remove(request)
                self._write(request, fetch)
            elif time.monotonic() > fetch.deadline:
                self._fetching.remove(request)
                fetch.blocks.cancel()
                self.late += 1
                self.engine.scheduler.arrived(request, 0)

    def pause(self) -> None:
        """Wait a moment for blocks that are being fetched. The engine calls this when it has nothing to compute before
        they come.
        """
        futures = [r.fetch.blocks for r in self._fetching if r.fetch is not None]
        if futures:
            wait(futures, IDLE_S, FIRST_COMPLETED)

    def usage(self) -> KeptUsage:
        """Return how many blocks requests have looked for, and how many the source has given and taken so far. This may
        be called in any thread.
        """
        tiers = self.source
        sources = tiers.usages() if isinstance(tiers, TieredBlocks) else []
        return KeptUsage(self.looked, sources)

    def weights_changed(self, version: int, fingerprint: str) -> None:
        """Find and keep only blocks that were computed with the new weights from now on. ``fingerprint``: hash of these
        weights; "": it is not known, so that no blocks are found or kept. ``version``: number of the weights.
        """
        self._full = []
        self._version = version if fingerprint else None
        self.name = cache_name(self.engine, fingerprint)

    def close(self) -> None:
        """Store the full cache blocks that are not stored yet, and close the memory or files that keep them."""
        self._keep(self._full)
        self._full = []
        self.source.close()

    def _knows(self, request: Request) -> bool:
        """Whether equal keys of such a request mean equal blocks for every engine."""
        scheduler = self.engine.scheduler
        return (
            scheduler.version == self._version
            and not request.context
            and request.adapter in self.engine.adapter_digests
        )

    def _computing(self, request: Request, lacks: int, blocks: int) -> float:
        """Return the seconds in which the engine would compute ``blocks`` blocks, the first of the last ``lacks`` full
        blocks of the text of ``request``; infinity if no steps were measured. Steps that the request needs in any
        case do not count.
        """
        rates = self.engine.watch.rates if self.engine.watch is not None else ()
        if not rates:
            return math.inf
        size = self.engine.reader.size
        tokens = blocks * size
        end = ((len(request.ids) - 1) // size - lacks) * size + tokens
        steps = tokens // self.engine.scheduler.budget
        per_step, per_token, *_, per_product = rates
        products = tokens * (end - tokens / 2)
        return steps * per_step + tokens * per_token + products * per_product

    def _outside_keys(self, request: Request, keys: Iterable[bytes]) -> list[bytes]:
        about = self.name.encode() + self.engine.adapter_digests[request.adapter]
        return [blake2b(about + key, digest_size=16).digest() for key in keys]

    def _keep(self, full: Sequence[tuple[Request, bytes, int]]) -> None:
        pool, reader = self.engine.scheduler.pool, self.engine.reader
        for request, key, block in full:
            # else somebody else has the block now
            if pool.known.get(key) != block or not self._knows(request):
                continue
            (outside,) = self._outside_keys(request, [key])
            try:
                if not self.source.find([outside]):
                    rows = reader.read_blocks([block], reader.size)
                    self.source.store(outside, rows.flatten().numpy().data)
            except Exception as error:
                return self._give_up(error)

    def _write(self, request: Request, fetch: BlockFetch) -> None:
        """Write what has come to the blocks of ``request``, which then computes the rest."""
        try:
            contents = fetch.blocks.result()
        except Exception as error:
            self._give_up(error)
            contents = list[Contents]()
        blocks = 0
        while blocks < len(contents) and len(contents[blocks]) == self._size:
            blocks += 1
        reader = self.engine.reader
        first = request.computed // reader.size
        if blocks:
            joined = bytearray().join(contents[:blocks])
            rows = torch.frombuffer(joined, dtype=torch.uint8).view(blocks, -1)
            table = request.table[first : first + blocks]
            reader.write_blocks(table, reader.size, rows)
        self.fetched += blocks
        self.engine.scheduler.arrived(request, blocks)

    def _give_up(self, error: Exception) -> None:
        """Go on without blocks from the source, of which the user hears once."""
        if not self._failed:
            self._failed = True
            self.warn(f"kept cache blocks cannot be used ({error}); texts are computed")


def cache_name(engine: Engine, weights: str) -> str:
    """Return a name of ``engine`` that is equal only for engines whose cache blocks have the same contents for the same
    text. It depends on the model's fingerprint ``weights``, the form of a block, and the tokens of a block.
    """
    form = [each.form for each in engine.block_form()]
    text = json.dumps([weights, engine.reader.size, form])
    return blake2b(text.encode(), digest_size=16).hexdigest()


def keep_blocks(
    engine: Engine, weights: str, memory: int, folder: Path | None, most: int, warn: Callable[[str], None]
) -> OutsideCache:  # fmt: skip
    """Keep copies of the cache blocks of ``engine`` outside its cache: in host memory, in files, or in both. Return the
    object that does so.

    ``weights``: fingerprint of the model. ``memory``: bytes of host memory to use; 0: none. ``folder``: folder of the
    files; None: no files. ``most``: bytes that all files together may take. ``warn``: shows the user a line. Raises
    :class:`UsageError` if the folder cannot be made, or if the model has no blocks that could be kept.
    """
    name = cache_name(engine, weights)
    sources = list[BlockSource]()
    if memory:
        sources.append(HostBlocks(memory))
    if folder is not None:
        sources.append(BlockFiles(folder, name, most, warn))
    return OutsideCache(engine, TieredBlocks(sources), name, warn=warn)


def join_memories(
    cache: OutsideCache, endpoint: Endpoint, secret: str
) -> PeerBlocks | None:
    """Let other engines read the host memory in which ``cache`` keeps blocks, and let ``cache`` read theirs. Return the
    object that reads the other engines' memories; it must be told the engines' addresses. Return None if ``cache``
    keeps nothing in host memory.

    ``secret``: known to all engines that may read. ``endpoint``: where this engine is reached.
    """
    tiers = cache.source
    memory = tiers.sources[0] if isinstance(tiers, TieredBlocks) else None
    if not isinstance(tiers, TieredBlocks) or not isinstance(memory, HostBlocks):
        return None
    open_blocks(endpoint, secret, memory)
    peers = PeerBlocks(endpoint.join(BLOCKS, secret))
    tiers.insert(1, peers)
    return peers


def attach_caches(
    engine: Engine, weights: str, channel: Channel, warn: Callable[[str], None]
) -> CacheEngines:
    """Let ``engine`` keep copies of its blocks at cache engines too, and fetch from them the blocks that neither its
    own host memory nor other engines have. Return the object that does so; it must be told the cache engines'
    addresses. Called in the engine's thread.

    ``weights``: fingerprint of the model. ``channel``: channel by which the cache engines are dialled. ``warn``: shows
    the user a line. Raises :class:`UsageError` if the model has no blocks that could be kept.
    """
    caches, outside = CacheEngines(channel), engine.outside
    if not isinstance(outside, OutsideCache):
        name = cache_name(engine, weights)
        OutsideCache(engine, TieredBlocks([caches]), name, warn=warn)
        return caches
    tiers = outside.source
    assert isinstance(tiers, TieredBlocks)
    faster = [each for each in tiers.sources if not isinstance(each, BlockFiles)]
    tiers.insert(len(faster), caches)
    return caches
