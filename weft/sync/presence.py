"""Which islands take part in an exchange, and that all of them end it in the same way.

Exchanges have numbers, which rise by one from each to the next on every island. Here all islands take part in all of
them, and one that is lost ends the run. :class:`weft.resilience.company.Company` lets islands come and go.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Empty, Queue
from typing import TypeVar

from weft.sync.streams import Streams

R = TypeVar("R")

#: What is done in an exchange with these islands; messages have tags that begin with its number.
Work = Callable[[Sequence[int], str], R]
#: Of those who can take part in an exchange, this island among them, those with whom it does.
Draw = Callable[[Sequence[int]], Sequence[int]]


class Presence:
    """All islands, always. ``counts``: of how many islands the answers are that the state came with, if not of all."""

    def __init__(self, streams: Streams) -> None:
        self.streams, self.counts = streams, list[int]()
        self._news: Queue[str] = Queue()

    def begin(self, number: int) -> None:
        """This island is about to send something in an exchange; who takes part in it does not change any more."""

    def exchange(self, number: int, draw: Draw, work: Work[R]) -> R:
        """What ``work`` returns, once it has come to its end on all islands that take part."""
        return work(draw(range(self.streams.islands)), str(number))

    def newcomers(self, number: int) -> Sequence[int]:
        """The islands to which this one hands its state after exchange ``number``, the last that they have no part in.

        ``tokens`` are those that the run had counted by then.
        """
        return ()

    @property
    def tokens(self) -> int:
        return 0

    def wish(self, number: int) -> None:
        """This island wishes the run to end with round ``number``."""
        self.streams.store.compare_set("weft/stop", "", str(number))

    def wished(self) -> int | None:
        """The round that the run is to end with, if anybody wishes so."""
        store = self.streams.store
        return int(store.get("weft/stop")) if store.check(["weft/stop"]) else None

    def note_odd(self, odd: Sequence[int], step: int) -> None:
        """These islands had another state than the others after a step, and have been mended."""
        for island in odd:
            self._news.put(
                f"island {island} had another anchor or momentum than most after step {step} (their hashes differ): it "
                "has taken theirs; if that comes again look for a faulty memory there"
            )

    def take_news(self) -> list[str]:
        """Lines for whoever watches the run, since this was asked last."""
        found = []
        with suppress(Empty):
            while True:
                found.append(self._news.get_nowait())
        return found
