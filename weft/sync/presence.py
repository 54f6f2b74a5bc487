"""Which islands take part in an exchange, and that all of them end it in the same way.

Every island numbers its exchanges 0, 1, 2 and so on. Here all islands take part in all exchanges, and losing one ends
the run. :class:`weft.resilience.company.Company` has the same methods and lets islands come and go.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

if TYPE_CHECKING:
    import torch.distributed as dist

    from weft.sync.streams import Streams

R = TypeVar("R")

#: Does an exchange with these islands; its messages have tags that begin with the given text.
Work = Callable[[Sequence[int], str], R]
#: Chooses, from the islands that are there, those with which this one exchanges, itself included.
Draw = Callable[[Sequence[int]], Sequence[int]]


class StopRequest(NamedTuple):
    """Request of an island to end the run.

    ``round``: number of the round with which all islands end. ``wishes``: for each rank of the island, whether it has
    received a signal to end, and why the run is to end as if it were complete (empty if it is not).
    """

    round: int
    wishes: list[tuple[bool, str]]


class Presence:
    """Decides which islands take part in each exchange. In this class all islands do, and the loss of an island ends
    the run; :class:`weft.resilience.company.Company` lets islands come and go.

    ``counts`` (attribute): for each fragment of the model, how many islands took part in its latest exchange. An island
    that joins a running run gets these numbers. If the list is empty, all islands took part.

    ``wishes`` (attribute): collective function that returns the wishes of this island's ranks to end the run, as in
    :class:`StopRequest`; the loop of the run sets it. ``ends`` (attribute): the request with which the run ended as
    this island joined; None if it went on.
    """

    def __init__(self, streams: Streams) -> None:
        self.streams, self.counts = streams, list[int]()
        self.wishes: Callable[[], list[tuple[bool, str]]] = list
        self.ends: StopRequest | None = None
        self._news = deque[str]()

    def begin(self, number: int) -> None:
        """Decide which islands take part in exchange ``number``; called before this island sends a message of the
        exchange.

        In this class all islands take part, so that nothing is done.
        """

    def exchange(self, number: int, draw: Draw, work: Work[R]) -> R:
        """Run ``work``, which exchanges tensors with other islands, and return its result.

        A subclass may wait until the other islands have finished the exchange, too. ``number``: index of the exchange,
        from the beginning of the run. ``draw(islands)``: chooses the islands to exchange with among the present ones.
        ``work(islands, tag)``: exchanges with the chosen islands, by messages whose tags begin with ``tag``.
        """
        return work(draw(range(self.streams.islands)), str(number))

    def newcomers(self, number: int) -> Sequence[int]:
        """Return the numbers of the islands that join after exchange ``number`` and get their state from this island.

        In this class the result is empty, as no island joins.
        """
        return ()

    @property
    def tokens(self) -> int:
        """Number of tokens that the run had counted before this island joined; in this class 0, as no island joins."""
        return 0

    def request_stop(self, number: int) -> None:
        """Ask all islands to end the run after the round ``number``. The first request counts. Collective over the
        ranks of this island.
        """
        said = json.dumps([number, self.wishes()])
        self._store().compare_set("weft/stop", "", said)

    def stop_request(self) -> StopRequest | None:
        """Return the request to end the run, or None if no island has asked for that."""
        store = self._store()
        if not store.check(["weft/stop"]):
            return None
        return StopRequest(*json.loads(store.get("weft/stop")))

    def all_wishes(self, wishes: list[tuple[bool, str]]) -> list[tuple[bool, str]]:
        """Return the wishes for which the run ends now, the same list on all islands.

        ``wishes``: those of this island's ranks. If all islands have ended after the same step without a request, as
        those do that sum gradients, the result is the wishes of all islands. All of them must then call this method.
        """
        request = self.ends or self.stop_request()
        if request is not None:
            return request.wishes
        from weft.sync.collectives import all_texts

        texts = all_texts(self.streams, json.dumps(wishes), "wishes")
        return [wish for text in texts for wish in json.loads(text)]

    def _store(self) -> dist.Store:
        assert self.streams.shared is not None
        return self.streams.shared

    def note_differing(self, odd: Sequence[int], step: int) -> None:
        """Report that the state of the islands ``odd`` differed from that of most islands after step ``step``.

        The report is a line for the user. It says that the differing state has been replaced by that of most islands.
        """
        for island in odd:
            self._news.append(
                f"island {island} had another anchor or momentum than most after step {step} (their hashes differ): it "
                "has taken theirs; if that comes again look for a faulty memory there"
            )

    def take_news(self) -> list[str]:
        """Return the lines for the user that were added since the last call."""
        return [self._news.popleft() for _ in range(len(self._news))]
