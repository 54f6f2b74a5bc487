"""Which of many models are in memory, where not all have room (composition of experts, Prabhakar et al. 2024).

Requests to a model in memory run at once. Requests to another model wait: the model is read when nothing else is being
computed, or when the first of them has waited for half of a bound, so that most models serve many requests each time
they are read. A model then makes room that is idle, the least recently used first. If none is idle, the least recently
used takes no more requests until it has made room. No model is therefore waited for without end (SN40L, 2405.07518).
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import NamedTuple


class Switch(NamedTuple):
    """A change of the models in memory. ``name``: name of the model that is to be read into memory, unless it is there
    already. ``leaving``: names of the models that leave memory to make room for it.
    """

    name: str
    leaving: list[str]


class Residency:
    """Decides which of several models are in memory. ``limit``: room for models, in any unit. ``cost``: function that
    returns the room that a model takes, in the same unit. ``bound``: seconds within which a request should begin. All
    times are in seconds of any clock that does not go back.
    """

    def __init__(
        self, limit: float, bound: float, cost: Callable[[str], float] = lambda name: 1
    ) -> None:
        self.limit, self.bound, self.cost = limit, bound, cost
        # requests that run, by model in memory, the least recently used model first
        self.running: OrderedDict[str, int] = OrderedDict()
        # when each waiting request came, by model
        self.waiting: dict[str, list[float]] = {}
        self.closed: set[str] = set()  # models that take no more requests
        self.coming: str | None = None  # the model that is being read
        self.switches = 0

    def enter(self, name: str, now: float) -> bool:
        """Note a request to the model ``name`` that has come at the time ``now``, and return whether it may run at
        once. If not, the request counts as waiting.
        """
        if name in self.running and name not in self.closed:
            self.running[name] += 1
            self.running.move_to_end(name)
            return True
        self.waiting.setdefault(name, []).append(now)
        return False

    def leave(self, name: str) -> None:
        """Note that a running request to the model ``name`` has ended."""
        self.running[name] -= 1

    def give_up(self, name: str, came: float) -> None:
        """Forget the waiting request to the model ``name`` that came at the time ``came``, because nobody wants its
        answer any more.
        """
        self.waiting[name].remove(came)
        if not self.waiting[name]:
            del self.waiting[name]

    def due(self) -> float | None:
        """Return the time at which the request that came first has waited for half of ``bound`` seconds; None if no
        request waits.
        """
        came = [times[0] for name, times in self.waiting.items() if name != self.coming]
        return min(came) + self.bound / 2 if came else None

    def admit(self, name: str) -> int:
        """Note that the model ``name`` has been read into memory: all requests that wait for it run from now on. Return
        the number of these requests.
        """
        count = len(self.waiting.pop(name, []))
        self.running[name] = self.running.get(name, 0) + count
        self.running.move_to_end(name)
        self.closed.discard(name)
        if self.coming == name:
            self.coming = None
        return count

    def fail(self, name: str) -> None:
        """Note that the model ``name`` could not be read; its requests no longer wait."""
        self.waiting.pop(name, None)
        self.coming = None

    def switch(self, now: float) -> Switch | None:
        """Return the next change of the models in memory, or None if there is none now.

        A change names a model whose requests are to be admitted, and the models that must leave memory for it. The
        named model counts as being read from now on. In one case it is in memory already, and no model leaves. It had
        been chosen to leave for another model, and so took no new requests. Now nobody waits for that other model any
        more. The caller then only admits the model's waiting requests.

        ``now``: present time, in seconds of the clock by which requests were noted.
        """
        if self.coming is not None or not self.waiting:
            return None
        half = self.bound / 2
        by_age = sorted(self.waiting, key=lambda name: self.waiting[name][0])
        due = [name for name in by_age if self.waiting[name][0] + half <= now]
        if due:
            name = due[0]
        elif any(self.running.values()):
            return None
        else:
            name = max(by_age, key=lambda each: len(self.waiting[each]))
        if name in self.running:
            return Switch(name, [])
        used, idle = self._room(self.running), [n for n, c in self.running.items() if not c]  # fmt: skip
        lacking = used + self.cost(name) - self.limit
        leaving = self._enough(idle, lacking)
        if self._room(leaving) < lacking and len(leaving) < len(self.running):
            # all that are due need room, and models give it while others still run
            wanted = used + self._room(due) - self.limit
            self.closed.update(self._enough(self.running, wanted))
            return None
        for each in leaving:
            del self.running[each]
            self.closed.discard(each)
        self.coming, self.switches = name, self.switches + 1
        return Switch(name, leaving)

    def _room(self, names: Iterable[str]) -> float:
        return sum(map(self.cost, names))

    def _enough(self, models: Iterable[str], lacking: float) -> list[str]:
        """Return the first of ``models`` that together take the room ``lacking``, or all if that is too much."""
        chosen = list[str]()
        for name in models:
            if lacking <= 0:
                break
            chosen.append(name)
            lacking -= self.cost(name)
        return chosen
