"""Cache engines of a simulated cluster: they keep the blocks of all engines, which fetch them over links.

An engine's real scheduler finds and fetches blocks there as it does in a service, and only where that is quicker than
computing them (the caching role of CloudMatrix384, 2506.12708). A cache engine that fails takes its blocks with it:
texts compute what has not come from there, and its share of new blocks goes to the others once the failure is noticed.
"""

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import takewhile
from typing import NamedTuple

from weft.generate.block_channel import NEWS_S
from weft.generate.request import BlockFetch, Request
from weft.generate.scheduler import ScheduledStep, Scheduler
from weft.serve.block_link import BlockLink

#: Seconds after which the failure of an engine is noticed.
NOTICED = 2.0


@dataclass(frozen=True)
class SimulatedCaches:
    """Cache engines of a simulated cluster.

    Attributes:
        ``engines``: their number, at least 1.
        ``blocks``: number of cache blocks that each of them keeps.
        ``link``: speed at which each of them takes blocks, and at which it gives them.
        ``fails``: for each of them that fails for good, the time of that, in seconds from the load's beginning.
    """

    engines: int
    blocks: int
    link: BlockLink
    fails: Sequence[float] = ()


@dataclass
class _Stock:
    """What a cache engine keeps until it fails at the time ``fails``. ``known``: its keys, those used longest ago
    first, each with the time from which on other engines know of it; ``gives``, ``takes``: when its link is free again.
    """

    fails: float
    known: OrderedDict[bytes, float] = field(default_factory=OrderedDict)
    gives: float = 0.0
    takes: float = 0.0


class StockedFetch(NamedTuple):
    """End of a fetch from cache engines. ``time``: when it ends. ``blocks``: how many blocks have come by then, from
    the first one on without a gap.
    """

    time: float
    blocks: int


class CacheStocks:
    """Keeps the blocks of all cache engines of the simulated cluster. ``setup``: the cache engines. ``size``: tokens of
    a block.
    """

    def __init__(self, setup: SimulatedCaches, size: int) -> None:
        self.setup = setup
        self.block_seconds = size * setup.link.token_bytes / setup.link.rate
        fails = [*setup.fails, *[math.inf] * setup.engines]
        self._stocks = [_Stock(at) for at in fails[: setup.engines]]

    def find(self, keys: Sequence[bytes], now: float) -> int:
        """Return how many of ``keys``, from the first one on without a gap, engines know to be kept at time ``now``."""

        def there(key: bytes) -> bool:
            owner = self._owner(key, now)
            return owner is not None and owner.known.get(key, math.inf) <= now

        return sum(1 for _ in takewhile(there, keys))

    def keys_of(self, number: int) -> list[bytes]:
        """Return the keys of the blocks that the cache engine ``number`` keeps, or kept when it failed."""
        return list(self._stocks[number].known)

    def ready(self, keys: Sequence[bytes], now: float) -> float:
        """Return when the blocks of ``keys``, which engines know to be kept, would have come if they were asked for at
        time ``now``, as far as that can be foreseen.
        """
        counts = Counter(self._number(key, now) for key in keys)
        ends = [self._end(number, blocks, now) for number, blocks in counts.items()]
        return max(ends, default=now) + self.setup.link.latency

    def fetch(self, keys: Sequence[bytes], now: float) -> StockedFetch:
        """Ask for the blocks of ``keys`` at time ``now``, so that later ones wait for them. Return when they have come,
        or those before the first one whose cache engine fails meanwhile.
        """
        numbers = [self._number(key, now) for key in keys]
        # a text's first block is needed by all that follow it: it goes last
        for number, key in zip(reversed(numbers), reversed(keys), strict=True):
            self._stocks[number].known.move_to_end(key)
        last, lost = now, set[int]()
        for number, blocks in Counter(numbers).items():
            stock = self._stocks[number]
            stock.gives = self._end(number, blocks, now)
            end = stock.gives + self.setup.link.latency
            if stock.fails < end:
                lost.add(number)
            last = max(last, min(end, stock.fails))
        come = sum(1 for _ in takewhile(lambda number: number not in lost, numbers))
        return StockedFetch(last, come)

    def _end(self, number: int, blocks: int, now: float) -> float:
        """When the link of a cache engine has given so many more blocks."""
        return max(self._stocks[number].gives, now) + blocks * self.block_seconds

    def store(self, key: bytes, now: float) -> None:
        """Send the block of ``key`` to its cache engine at time ``now``, unless that has it. The block is lost if the
        cache engine has failed, and that is not known yet.
        """
        stock = self._owner(key, now - NOTICED)
        if stock is None or stock.fails <= now or key in stock.known:
            return
        stock.takes = max(stock.takes, now) + self.block_seconds
        stock.known[key] = stock.takes + self.setup.link.latency + NEWS_S
        while len(stock.known) > self.setup.blocks:
            stock.known.popitem(last=False)

    def _number(self, key: bytes, now: float) -> int:
        """The index of the cache engine to which a block belongs, among those that have not failed by the time ``now``;
        -1 if all have.
        """

        def rank(number: int) -> bytes:
            return blake2b(key, digest_size=8, key=bytes([number])).digest()

        alive = [i for i, stock in enumerate(self._stocks) if stock.fails > now]
        return max(alive, key=rank, default=-1)

    def _owner(self, key: bytes, now: float) -> _Stock | None:
        number = self._number(key, now)
        return None if number < 0 else self._stocks[number]


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
        end = self.stocks.fetch(keys, self.now())

        def arrive() -> None:
            if request.fetch is fetch:  # else it has lost its blocks meanwhile
                self.scheduler.arrived(request, end.blocks)
                self.resume()

        self.note(request, end.blocks)
        self.later(end.time, arrive)

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
