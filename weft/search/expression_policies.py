"""Policies of engines and clusters that are expressions, as ``weft search`` finds them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from weft.generate.policies import SchedulingPolicy
from weft.search.policy_language import parse_policy, run_of

if TYPE_CHECKING:
    from weft.cluster.dispatch_policy import DispatchRequest, EngineView
    from weft.generate.policies import Order
    from weft.generate.request import Request
    from weft.search.judged_policy import Formula

#: What an expression that chooses an engine may use, with what it means.
DISPATCH_FEATURES = {
    "tokens": "length of the request's text so far",
    "known": "tokens of the text that the engine's cache probably holds",
    "size": "tokens of a cache block",
    "blocks": "cache blocks of the engine",
    "usage": "blocks that the engine's requests own or will need",
    "least_usage": "the smallest usage of all engines",
    "answers": "answers that the engine writes, or that wait there",
    "seconds": "estimated time of the request on the engine",
    "fastest": "the smallest such time of all engines",
    "work": "estimated seconds of all requests that the engine has not ended",
    "mean_work": "the mean work of all engines",
}

#: What an expression that orders requests may use, with what it means.
ORDER_FEATURES = {
    "wanted": "tokens of the request that are still to be computed before its next token",
    "length": "tokens of the text so far",
    "computed": "tokens of the text whose keys and values are in the cache",
    "running": "1 for a request that has begun, else 0",
    "waited": "seconds since the request arrived",
    "priority": "priority of the request; smaller is more urgent",
    "slack": "seconds until the deadline of the request's workflow; 1000 without one",
    "left": "stages of the workflow after this one",
    "budget": "tokens of the step",
}

#: Seconds after which a request goes before all that came later, whatever an expression says.
PATIENCE = 60.0
#: The slack of a request without a deadline, in seconds.
NO_DEADLINE = 1000.0


class ExpressionDispatch:
    """A dispatch policy of a server with several engines: a call takes their states and a request, and returns the name
    of the engine for which the value of an expression is smallest. ``source``: text of the expression.
    """

    source: ClassVar[str] = "answers"

    def __init__(self, formula: Formula | None = None) -> None:
        names = [*DISPATCH_FEATURES]
        self.formula = formula or run_of(parse_policy(self.source, names), names)

    def __call__(self, engines: Sequence[EngineView], request: DispatchRequest) -> str:
        least = min(engine.usage for engine in engines)
        fastest = min(engine.seconds for engine in engines)
        mean = sum(engine.work for engine in engines) / len(engines)

        def cost(e: EngineView) -> float:
            return self.formula(
                (
                    request.tokens,
                    e.known,
                    e.size,
                    e.blocks,
                    e.usage,
                    least,
                    e.answers,
                    e.seconds,
                    fastest,
                    e.work,
                    mean,
                )
            )

        return min(engines, key=lambda e: (cost(e), e.answers, e.name)).name


class _PromptRank(NamedTuple):
    """What orders requests: the smallest rank is served first."""

    reads: bool  # a prompt, and no token of an answer
    patient: bool  # not one that has waited too long
    cost: float
    arrival: int


class ExpressionOrder(SchedulingPolicy):
    """A scheduling policy: first requests that need one token, then prompts in the order of an expression's value, the
    smallest first. ``source``: text of the expression. Requests that arrived more than :data:`PATIENCE` seconds ago
    come first, so that no request waits without end.
    """

    source: ClassVar[str] = "-waited"

    def __init__(self, formula: Formula | None = None) -> None:
        names = [*ORDER_FEATURES]
        self.formula = formula or run_of(parse_policy(self.source, names), names)
        self.clock: Callable[[], float] = time.monotonic

    def read_time(self, clock: Callable[[], float]) -> None:
        self.clock = clock

    def __call__(
        self, running: Sequence[Request], waiting: Sequence[Request], budget: int
    ) -> Order:
        now = self.clock()

        def rank(r: Request) -> _PromptRank:
            if r.runs and r.wanted == 1:
                return _PromptRank(False, False, 0.0, r.arrival)
            waited = now - r.asked_at
            overdue = waited > PATIENCE
            job = r.workflow
            slack = NO_DEADLINE if job is None else min(job.deadline - now, NO_DEADLINE)
            left = 0.0 if job is None else float(len(job.remaining))
            values = (
                r.wanted,
                len(r.ids),
                r.computed,
                float(r.runs),
                waited,
                r.priority,
                slack,
                left,
                budget,
            )
            cost = -waited if overdue else self.formula(values)
            return _PromptRank(True, not overdue, cost, r.arrival)

        return [(r, r.wanted) for r in sorted((*running, *waiting), key=rank)]
