"""The search for nano-batches: first their number, then their order, then their sizes."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from itertools import product
from math import inf
from typing import ClassVar, NamedTuple

from weft.models.token_parts import PassTokens, TurnOrder, Weave, by_phase, weaving

#: Passes with each choice, of which the fastest counts: the first one of a shape is slow.
TRIALS = 2
#: Of the fastest numbers of parts in turns, how many are tried in another order.
ORDERED = 2
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
        ``seconds``: the shortest time of each choice so far.
    """

    #: Orders of turns by name.
    ORDERS: ClassVar[Mapping[str, TurnOrder]] = {"turns": weaving, "phases": by_phase}

    def __init__(self, tokens: PassTokens) -> None:
        self.seconds: dict[NanoChoice, float] = {}
        self.trying, self._noted = True, 0
        self._steps = self._search(tokens)
        self.choice = next(self._steps)

    def note(self, seconds: float) -> None:
        """Record ``seconds`` as a time of a pass with :attr:`choice`. After :data:`TRIALS` passes the next choice is
        tried.
        """
        if not self.trying:
            return
        before = self.seconds.get(self.choice, inf)
        self.seconds[self.choice] = min(before, seconds)
        self._noted += 1
        if self._noted < TRIALS:
            return
        self._noted = 0
        try:
            self.choice = next(self._steps)
        except StopIteration:
            self.choice, self.trying = self._fastest(), False

    def _fastest(self) -> NanoChoice:
        return self._by_time()[0]

    def _by_time(self) -> list[NanoChoice]:
        return sorted(self.seconds, key=self.seconds.__getitem__)

    def _search(self, tokens: PassTokens) -> Generator[NanoChoice]:
        """Yield the choices to try: all numbers of equal parts in turns, then the best of them in other ways."""
        choices = every_choice(tokens)
        equal = [c for c in choices if c.order == "turns" and c.growth == 1.0]
        # a whole pass last, so that tokens travel under work from the first pass on
        yield from sorted(equal, key=lambda choice: choice.number == 1)
        if self._fastest().number == 1:
            return
        # another order may suit another number of parts
        cut = [choice for choice in self._by_time() if choice.number > 1]
        ordered = [choice._replace(order="phases") for choice in cut[:ORDERED]]
        yield from (choice for choice in ordered if choice in choices)
        best = self._fastest()
        grown = [best._replace(growth=growth) for growth in GROWTHS[1:]]
        yield from (choice for choice in grown if choice in choices)
