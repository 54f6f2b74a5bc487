"""Cache engines of a simulated cluster: they keep the blocks of all engines, which fetch them over links.

An engine's real scheduler finds and fetches blocks there as it does in a service, and only where that is quicker than
computing them (the caching role of CloudMatrix384, 2506.12708).
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import takewhile

from weft.generate.block_channel import NEWS_S
from weft.generate.request import BlockFetch, Request
from weft.generate.scheduler import ScheduledStep, Scheduler
from weft.serve.block_link import BlockLink


@dataclass(frozen=True)
class SimulatedCaches:
    """Cache engines of a simulated cluster.

    Attributes:
        ``engines``: their number, at least 1.
        ``blocks``: number of cache blocks that each of them keeps.
        ``link``: speed at which each of them takes blocks, and at which it gives them.
    """

    engines: int
    blocks: int
    link: BlockLink


@dataclass
class _Stock:
    """What a cache engine keeps. ``known``: its keys, those used longest ago first, each with the time from which on
    other engines know of it; ``gives``, ``takes``: when its link is free again.
    """

    known: OrderedDict[bytes, float] = field(default_factory=OrderedDict)
    gives: float = 0.0
    takes: float = 0.0


class CacheStocks:
    """Keeps the blocks of all cache engines of the simulated cluster. ``setup``: the cache engines. ``size``: tokens of
    a block.
    """

    def __init__(self, setup: SimulatedCaches, size: int) -> None:
        self.setup = setup
        self.block_seconds = size * setup.link.token_bytes / setup.link.rate
        self._stocks = [_Stock() for _ in range(setup.engines)]

    def find(self, keys: Sequence[bytes], now: float) -> int:
        """Return how many of ``keys``, from the first one on without a gap, engines know to be kept at time ``now``."""

        def there(key: bytes) -> bool:
            return self._owner(key).known.get(key, math.inf) <= now

        return sum(1 for _ in takewhile(there, keys))

    def ready(self, keys: Sequence[bytes], now: float, take: bool = False) -> float:
        """Return when the blocks of ``keys`` would have come, if they were asked for at time ``now``. ``take``: whether
        they are asked for, so that later ones wait for them.
        """
        counts: dict[int, int] = {}
        # a text's first block is needed by all that follow it: it goes last
        for key in reversed(keys):
            number = self._number(key)
            counts[number] = counts.get(number, 0) + 1
            if take:
                self._stocks[number].known.move_to_end(key)
        last = now
        for number, blocks in counts.items():
            stock = self._stocks[number]
            free = max(stock.gives, now) + blocks * self.block_seconds
            if take:
                stock.gives = free
            last = max(last, free)
        return last + self.setup.link.latency

    def store(self, key: bytes, now: float) -> None:
        """Send the block of ``key`` to its cache engine at time ``now``, unless that has it."""
        stock = self._owner(key)
        if key in stock.known:
            return
        stock.takes = max(stock.takes, now) + self.block_seconds
        stock.known[key] = stock.takes + self.setup.link.latency + NEWS_S
        while len(stock.known) > self.setup.blocks:
            stock.known.popitem(last=False)

    def _number(self, key: bytes) -> int:
        """The index of the cache engine to which a block belongs."""

        def rank(number: int) -> bytes:
            return blake2b(key, digest_size=8, key=bytes([number])).digest()

        return max(range(len(self._stocks)), key=rank)

    def _owner(self, key: bytes) -> _Stock:
        return self._stocks[self._number(key)]


@dataclass(eq=False)
class StockedBlocks:
    """The blocks at cache engines, as the ``scheduler`` of a simulated engine finds and fetches them. It is an
    :class:`weft.generate.scheduler.OutsideBlocks`.

    Attributes:
        ``scheduler``: the engine's scheduler.
        ``stocks``: what the cache engines keep.
        ``curve``: returns the seconds of a step of the engine; None: they do not count, and all is fetched.
        ``now``: returns the time in the simulation.
        ``later``: takes a time and a function, and calls the function at that time.
        ``note``: called with a request and the blocks that are fetched for it.
        ``resume``: called when blocks have come, so that the engine takes a step.
    """

    scheduler: Scheduler
    stocks: CacheStocks
    curve: Callable[[ScheduledStep], float] | None
    now: Callable[[], float]
    later: Callable[[float, Callable[[], None]], None]
    note: Callable[[Request, int], None]
    resume: Callable[[], None]

    def find(self, request: Request, keys: Sequence[bytes]) -> int:
        """Return how many of ``keys``, from the first one on, ``request`` is to fetch."""
        now = self.now()
        blocks = self.stocks.find(keys, now)
        if not blocks:
            return 0
        seconds = self.stocks.ready(keys[:blocks], now) - now
        return blocks if seconds <= self._computing(request, len(keys), blocks) else 0

    def fetch(self, request: Request, keys: Sequence[bytes]) -> None:
        """Let the blocks of ``keys`` travel to ``request``, which waits for them."""
        fetch = request.fetch = BlockFetch(Future(), math.inf)

        def arrive() -> None:
            if request.fetch is fetch:  # else it has lost its blocks meanwhile
                self.scheduler.arrived(request, len(keys))
                self.resume()

        self.note(request, len(keys))
        self.later(self.stocks.ready(keys, self.now(), take=True), arrive)

    def note_full(self, request: Request, key: bytes, block: int) -> None:
        """Send the block of ``key``, which is full, to its cache engine."""
        self.stocks.store(key, self.now())

    def _computing(self, request: Request, lacks: int, blocks: int) -> float:
        """The seconds in which the engine would compute ``blocks`` blocks, the first of the last ``lacks`` ones of a
        text, in steps that the text does not need in any case.
        """
        if self.curve is None:
            return math.inf
        size, budget = self.scheduler.pool.size, self.scheduler.budget
        at, left = ((len(request.ids) - 1) // size - lacks) * size, blocks * size
        seconds = 0.0
        while left >= budget:
            seconds += self.curve(_step(at, budget))
            at, left = at + budget, left - budget
        if left:
            seconds += self.curve(_step(at, left)) - self.curve(_step(at + left, 1))
        return seconds


def _step(before: int, tokens: int) -> ScheduledStep:
    """A step that computes ``tokens`` tokens of a text behind ``before`` computed ones."""
    text = Request([0] * (before + tokens), before + tokens, computed=before)
    return ScheduledStep({text: tokens}, [])
