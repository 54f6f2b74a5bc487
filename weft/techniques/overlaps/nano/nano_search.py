"""The search for nano-batches: first their number and order, then their sizes, and at last the fastest in turns."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from itertools import product
from statistics import median
from typing import ClassVar, NamedTuple

from weft.models.token_parts import PassTokens, TurnOrder, Weave, by_phase, weaving

#: Passes with each choice before slow ones are left out. The first does not count, if there are others: it is slow.
TRIALS = 2
#: Of the fastest choices, how many are tried with other sizes.
GROWN = 2
#: Of the fastest choices at last, how many take turns again, and how often, as a single pass may be slow by chance.
FINALISTS, ROUNDS = 4, 3
#: Numbers of parts that are tried, and by how much each part is larger than the part before.
NUMBERS, GROWTHS = (2, 3, 4), (1.0, 1.5, 1 / 1.5)


class NanoChoice(NamedTuple):
    """A way to cut a pass into parts, called nano-batches. ``number``: number of nano-batches. ``rows``: whether a
    nano-batch is some of the rows; otherwise it is some tokens of every row. ``order``: name of the order of their
    turns, a key of :attr:`NanoSearch.ORDERS`. ``growth``: size of a nano-batch divided by that of the one before.
    """

    number: int
    rows: bool = False
    order: str = "turns"
    growth: float = 1.0

    def weave(self, tokens: PassTokens) -> Weave:
        """Return the nano-batches of a pass over ``tokens``, and how they take turns."""
        shares = [self.growth**i for i in range(self.number)]
        parts = tokens.row_parts(shares) if self.rows else tokens.token_parts(shares)
        return Weave(parts, NanoSearch.ORDERS[self.order])


def every_choice(tokens: PassTokens) -> list[NanoChoice]:
    """Return all choices that cut a pass over ``tokens`` differently. A search tries only a few of them."""
    numbers = (tokens.asked,) if tokens.asked else NUMBERS
    cuts = [False] * tokens.cuts_tokens + [True] * (tokens.rows > 1)
    ways = product(numbers, cuts, NanoSearch.ORDERS, GROWTHS)
    different = dict[Weave, NanoChoice]()
    # few rows are cut alike by several numbers and growths
    for choice in (NanoChoice(1), *(NanoChoice(*way) for way in ways)):
        different.setdefault(choice.weave(tokens), choice)
    return [*different.values()]


class NanoSearch:
    """A search for the fastest way to cut passes like ``tokens`` into nano-batches, by one trial after the other.

    Attributes:
        ``choice``: the choice to try next, or the fastest one after the last trial.
        ``trying``: whether trials remain.
        ``seconds``: the times of each choice so far, in the order of its trials.
    """

    #: Orders of turns by name.
    ORDERS: ClassVar[Mapping[str, TurnOrder]] = {"turns": weaving, "phases": by_phase}

    def __init__(self, tokens: PassTokens) -> None:
        self.seconds: dict[NanoChoice, list[float]] = {}
        self.trying = True
        self._trials = self._search(tokens)
        self.choice = next(self._trials)

    def note(self, seconds: float) -> None:
        """Record ``seconds`` as a time of a pass with :attr:`choice`, and go on to the choice to try next."""
        if not self.trying:
            return
        self.seconds.setdefault(self.choice, []).append(seconds)
        try:
            self.choice = next(self._trials)
        except StopIteration:
            self.choice, self.trying = self._by_time()[0], False

    def _time(self, choice: NanoChoice) -> float:
        """Return the usual time of a choice: the median, without that of the first pass."""
        return median(self.seconds[choice][1:])

    def _by_time(self) -> list[NanoChoice]:
        return sorted(self.seconds, key=self._time)

    def _search(self, tokens: PassTokens) -> Generator[NanoChoice]:
        """Yield the choice of each trial: all numbers of equal parts in all orders, the best of them with other sizes,
        and the best of all once more, in turns.
        """
        choices = every_choice(tokens)
        equal = [choice for choice in choices if choice.growth == 1.0]
        # a whole pass last, so that tokens travel under work from the first pass on
        for choice in sorted(equal, key=lambda choice: choice.number == 1):
            yield from [choice] * TRIALS
        best = self._by_time()[:GROWN]
        if best[0].number == 1:
            return
        for choice, growth in product(best, GROWTHS[1:]):
            grown = choice._replace(growth=growth)
            yield from [grown] * (TRIALS if grown in choices else 0)
        finalists = self._by_time()[:FINALISTS]
        for _ in range(ROUNDS):
            yield from finalists
