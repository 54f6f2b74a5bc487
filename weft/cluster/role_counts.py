"""How many engines of a cluster compute prompts, write, or do both, and what is known when that is chosen anew."""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from weft.cluster.engine_link import EngineLink
from weft.cluster.flight import Flight

#: Requests that are remembered, and seconds between two choices.
RECENT, CHOICE_S = 100, 30.0


class RoleCounts(NamedTuple):
    """Numbers of engines by role. ``prefill``: engines that only compute prompts. ``decode``: engines that only
    continue answers that have begun. All other engines do both.
    """

    prefill: int
    decode: int

    def said(self, engines: int) -> str:
        """Return a text for the user with the numbers of engines by role. ``engines``: number of all engines."""
        both = engines - self.prefill - self.decode
        parts = [(self.prefill, "for prompts"), (self.decode, "for writing"), (both, "for both")]  # fmt: skip
        return ", ".join(f"{count} {what}" for count, what in parts if count)


class RecentRequest(NamedTuple):
    """A request that has come lately. ``time``: when it came, in seconds of the monotonic clock. ``prompt``: token ids
    of its prompt. ``tokens``: number of tokens of its answer. Before the answer ends, this is an estimate: the mean of
    other answers, or the tokens so far if these are more.
    """

    time: float
    prompt: Sequence[int]
    tokens: int


class RoleQuestion(NamedTuple):
    """Everything on which the choice of roles depends.

    Attributes:
        ``requests``: recent requests, in the order of their arrival.
        ``engines``: number of engines.
        ``current``: how many engines have each role at present.
        ``rates``: seconds of an engine step for one of each of the numbers of :func:`weft.generate.step_work.work_of`,
            as a mean over the engines.
        ``cache``: tokens that the cache of an engine holds.
        ``stall``: mean seconds during which an answer that moves is computed by no engine.
    """

    requests: Sequence[RecentRequest]
    engines: int
    current: RoleCounts
    rates: Sequence[float]
    cache: int
    stall: float


#: Returns better roles than the present ones, or None.
RoleChooser = Callable[[RoleQuestion], RoleCounts | None]


class RecentRequests:
    """Remembers the last :data:`RECENT` requests of a router."""

    def __init__(self) -> None:
        self._recent: deque[tuple[float, Flight]] = deque(maxlen=RECENT)

    def note(self, flight: Flight, now: float) -> None:
        """Remember ``flight``, an answer that a client asked for at the time ``now``."""
        self._recent.append((now, flight))

    def all(self) -> list[RecentRequest]:
        """Return the remembered requests in the order of their arrival."""
        flights = [(time, flight) for time, flight in self._recent if flight.finished != "error"]  # fmt: skip
        ended = [len(flight.tokens) for _, flight in flights if flight.finished]
        mean = round(sum(ended) / len(ended)) if ended else 1
        return [
            RecentRequest(
                time,
                flight.request.ids,
                max(1, len(flight.tokens), 0 if flight.finished else min(mean, flight.request.most)),
            )
            for time, flight in flights
        ]  # fmt: skip


def assign_roles(links: Sequence[EngineLink], counts: RoleCounts) -> RoleCounts:
    """Give as many engines each role as ``counts`` says, and return how many had each role before.

    ``links``: all engines that take requests, those that are to change first. Engines keep their roles as far as
    possible.
    """
    before = Counter(link.role for link in links)
    free = list(links)
    chosen: dict[str, str] = {}
    for role, count in (("prefill", counts.prefill), ("decode", counts.decode)):
        free.sort(key=lambda link: link.role != role)
        chosen |= {link.name: role for link in free[:count]}
        free = free[count:]
    for link in links:
        link.role = chosen.get(link.name, "")
    return RoleCounts(before["prefill"], before["decode"])
