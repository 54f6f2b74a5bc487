"""The most urgent stage first: requests are parts of workflows with deadlines."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Self

from weft.generate.policies import Order, SchedulingPolicy
from weft.generate.stage_times import StageTimes
from weft.registry import register

if TYPE_CHECKING:
    from weft.generate.request import Request

#: Seconds after which a request goes before all that came later.
PATIENCE = 60.0


@dataclass
class _Watched:
    """What is known about a request. Times are seconds of the policy's clock."""

    start: float  # by when it must start, to end in time
    prompt: int  # tokens
    begun: float  # when it was last seen waiting
    first: float = 0.0  # when its first token was seen
    early: int = 0  # tokens that it had written by then
    last: float = 0.0  # when its last token was seen
    late: int = 0  # tokens that it had written by then


class _Rank(NamedTuple):
    """What orders requests: the smallest rank is the most urgent one."""

    overdue: int  # 0 for a request that has waited too long
    start: float  # by when it must start
    arrival: int


@register(
    "policy",
    "urgency",
    title="The most urgent stage of a workflow first",
    paper="HexGen-Text2SQL, 2505.05286",
    recipe="weft serve --checkpoint RUN --policy urgency",
    proof="tests/techniques/test_urgency.py, tests/generate/test_scheduler.py",
    figure=(
        "with equal estimates the earliest deadline first, exactly; simulated at 0.9 of the highest load, 0.666 of the "
        "deadlines are met, first come, first served 0.464 (`bench/workflows.py`)"
    ),
)
class Urgency(SchedulingPolicy):
    """Schedules new tokens first, then prompts (HexGen-Text2SQL, 2505.05286). Of each kind, the most urgent come first.

    A workflow is a series of requests (stages) with one deadline. The time until the deadline is divided among the
    present and the remaining stages, in proportion to their estimated times. The urgency of a request is its estimated
    time minus the time that its stage has left. The policy estimates times from the requests that it has seen.

    Requests without a deadline, or past it, come after the others of their kind, in the order of arrival. Requests that
    arrived more than ``patience`` seconds ago come first, so that no request waits without end.
    """

    example: ClassVar[str] = "urgency:30"
    argument: ClassVar[str] = "a whole number of seconds above 0"

    def __init__(self, patience: float = PATIENCE) -> None:
        self.patience = patience
        self.times = StageTimes()
        self.clock: Callable[[], float] = time.monotonic
        self._watched: dict[Request, _Watched] = {}

    @classmethod
    def of_argument(cls, argument: str | None) -> Self | None:
        if argument is None:
            return cls()
        seconds = float(argument) if argument.isdecimal() else 0.0
        return cls(seconds) if seconds else None

    def read_time(self, clock: Callable[[], float]) -> None:
        self.clock = clock

    def __call__(
        self, running: Sequence[Request], waiting: Sequence[Request], budget: int
    ) -> Order:
        now = self.clock()
        self._watch(running, waiting, now)
        every = sorted(
            (*running, *waiting),
            key=lambda r: (not (r.runs and r.wanted == 1), *self._rank(r, now)),
        )
        return [(r, r.wanted) for r in every]

    def _rank(self, request: Request, now: float) -> _Rank:
        """Return what orders requests: the smallest rank is the most urgent one."""
        if now - request.asked_at > self.patience:
            return _Rank(0, 0.0, request.arrival)
        job = request.workflow
        if job is None or job.deadline <= now:
            return _Rank(1, math.inf, request.arrival)
        return _Rank(1, self._watched[request].start, request.arrival)

    def _watch(
        self, running: Sequence[Request], waiting: Sequence[Request], now: float
    ) -> None:
        """Measure the requests that run, and let those that have ended count in the estimates."""
        still = set(waiting)
        for request in [r for r in self._watched if not r.runs and r not in still]:
            self._note(request, self._watched.pop(request))
        for request in (*running, *waiting):
            if request not in self._watched:
                self._watched[request] = self._first_look(request, now)
        for request in waiting:
            self._watched[request].begun = now
        for request in running:
            watched = self._watched[request]
            written = len(request.ids) - watched.prompt
            if written > watched.late:
                if not watched.first:
                    watched.first, watched.early = now, written
                watched.last, watched.late = now, written

    def _first_look(self, request: Request, now: float) -> _Watched:
        job, start = request.workflow, math.inf
        if job is not None:
            deadline = job.stage_deadline(request.asked_at, self.times.seconds)
            start = deadline - self.times.seconds(job.stage)
        # a text may have come from another engine, with tokens that were written there
        prompt = getattr(request, "prompt", 0) or len(request.ids)
        early = len(request.ids) - prompt
        return _Watched(start, prompt, now, early=early, late=early)

    def _note(self, request: Request, watched: _Watched) -> None:
        written = len(request.ids) - watched.prompt
        if request.workflow is not None:
            self.times.tokens.note(request.workflow.stage, watched.prompt, written)
        if not watched.first:
            return
        read = watched.prompt - request.hits
        if read > 0 and watched.early == 1:
            self.times.prompt_second.add((watched.first - watched.begun) / read)
        if watched.late > watched.early:
            seconds = watched.last - watched.first
            self.times.written_second.add(seconds / (watched.late - watched.early))
