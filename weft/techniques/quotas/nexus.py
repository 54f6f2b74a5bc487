"""A quota by a cost model that is fitted to the passes so far: prompts as fast as writing allows."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Self

from weft.generate.phase_costs import Demand, PhaseCosts
from weft.generate.quotas import (
    LARGEST,
    LEAST,
    PassTime,
    Phase,
    PhaseView,
    QuotaController,
)
from weft.registry import register

if TYPE_CHECKING:
    from weft.generate.policies import Order
    from weft.generate.request import Request

# No code of Nexus is public. The constants here are this project's own, tuned on one simulated load (`bench/quotas.py`
# compares on others), and not those of the paper.
#: How much longer than at best the other phase may take.
SLACK = 1.6
#: Used part of the cache above which writing comes first, as only texts that end free blocks.
FULL = 0.8
#: With limits: part of the limit that a step of the texts may take.
PART = 0.9
#: Steps of the search, and the least change that is made.
STEP, HYSTERESIS = 0.05, 0.1
#: Passes to which the costs are fitted, and passes between two fits.
PASSES, AGAIN = 256, 16
#: Tokens by which a prompt goes forward in the order for each pass that it has waited for.
AGE = 64.0
#: Fits one after the other, each with the contention for memory that follows from the costs of the one before.
FITS = 3
#: Part of the way to a step's ratio of measured to predicted seconds that the correction of predictions goes.
LEARNED = 0.1


@register(
    "quota",
    "nexus",
    title="A quota by a cost model with shared bandwidth, shortest prompts first",
    paper="Nexus, 2507.06608",
    recipe="weft serve --checkpoint RUN --phases split --quota nexus",
    proof="tests/techniques/test_quotas.py, tests/serve/test_phase_simulation.py",
    figure=(
        "simulated on a drifting load under three limits, with these 3.56, 1.13 and 1.01 of the goodput of the best "
        "of six fixed quotas, without them 2.72, 1.08 and 0.948 (`bench/quotas.py`)"
    ),
)
class CostQuota(QuotaController):
    """Chooses the share of the device for prompts (the quota) by a cost model of both phases, reading prompts and
    writing texts (Nexus, 2507.06608). While the cache has room, prompts get as much as possible without making a step
    of the texts longer than ``slack`` times its best. When the cache is nearly full, texts get as much as possible
    under the same condition for prompts. The quota is searched in small steps from the present one. It is changed only
    by a tenth or more (hysteresis), unless the condition is not met at present: then it is changed at once. The costs
    of compute and of reading memory are fitted to the passes so far. Short prompts are read first; waiting makes a
    prompt count as shorter.

    ``limits``: most seconds to a first token and per further token, as for semi-PD; None: the slack alone counts. With
    them a step of the texts may take nine tenths of its limit, whatever its best is. By how much longer the steps so
    far took than predicted is learned, and counted. Prompts that can still keep their limit are read first, in the
    order in which they came; the others as without limits.
    """

    example: ClassVar[str] = "nexus:1.6 or nexus:1.6,1,0.05"
    argument: ClassVar[str] = (
        "a number of 1 or more, alone or with the seconds above 0 to a first token and to each further one"
    )

    def __init__(
        self, slack: float = SLACK, limits: tuple[float, float] | None = None
    ) -> None:
        self.slack, self.limits = slack, limits
        self.costs: PhaseCosts | None = None
        # measured over predicted seconds of a step of the texts beside prompts, which read memory for part of the time
        self.longer, self._beside = 1.0, 0.0
        self._passes: deque[PassTime] = deque(maxlen=PASSES)
        self._new, self._depth, self._now, self._quota = 0, 0.0, 0.0, self.initial
        self._waited: dict[int, int] = {}

    @classmethod
    def of_argument(cls, argument: str | None) -> Self | None:
        if argument is None:
            return cls()
        try:
            slack, *limits = map(float, argument.split(","))
        except ValueError:
            return None
        good = 1 <= slack < float("inf") and all(0 < x < float("inf") for x in limits)
        if not good or len(limits) not in (0, 2):
            return None
        return cls(slack, (limits[0], limits[1]) if limits else None)

    def order(self, prompts: Order) -> Order:
        every = list(prompts)
        waited = {r.arrival: self._waited.get(r.arrival, 0) + 1 for r, _ in every}
        self._waited = waited

        def rank(served: tuple[Request, int]) -> tuple[bool, tuple[float, int]]:
            request = served[0]
            if self._in_time(request):
                return False, (0.0, request.arrival)
            length = request.wanted - AGE * waited[request.arrival]
            return True, (length, request.arrival)

        return sorted(every, key=rank)

    def _in_time(self, request: Request) -> bool:
        """Whether a prompt can keep its limit if it is read now; without limits False."""
        if self.limits is None:
            return False
        ends = self._now - request.asked_at
        if self.costs is not None:
            tokens = float(request.wanted)
            work = [1.0, tokens, 1.0, 1.0, tokens, tokens * self._depth]
            ends += self.costs.seconds(self.costs.demand(work), self._quota)
        return ends < self.limits[0]

    def note_pass(self, ended: PassTime) -> None:
        self._passes.append(ended)
        self._new += 1
        self._learn(ended)
        if ended.phase == "prefill":  # keys that a token of a prompt sees
            seen = ended.work[5] / max(1.0, ended.work[1])
            self._depth += (seen - self._depth) / 8
        if self._new >= AGAIN:
            self._new = 0
            self.costs = fitted_costs([*self._passes])

    def choose(self, view: PhaseView) -> float:
        self._now, self._quota = view.now, view.quota
        if self.costs is None or not view.prompts or not view.texts:
            return view.quota
        tokens, texts = float(sum(view.prompts)), float(view.texts)
        reading = self.costs.demand(
            [1.0, tokens, len(view.prompts), len(view.prompts), tokens, tokens * self._depth]
        )  # fmt: skip
        writing = self.costs.demand([1.0, texts, texts, texts, view.keys, view.keys])
        self._beside = self.costs.reading(reading, view.quota)
        return self._search(reading, writing, view.quota, view.usage < FULL)

    def _learn(self, ended: PassTime) -> None:
        """Compare a step of the texts beside prompts with what the costs have predicted."""
        if self.costs is None or not ended.beside or ended.phase == "prefill":
            return
        needs = self.costs.demand(ended.work)
        predicted = self.costs.seconds(needs, ended.share, self._beside)
        ratio = min(2.0, max(0.5, ended.seconds / max(predicted, 1e-9)))
        self.longer += LEARNED * (ratio - self.longer)

    def _search(
        self, reading: Demand, writing: Demand, quota: float, prompts_first: bool
    ) -> float:
        """Return the best quota for the phase that comes first, with which the other one stays within the slack."""
        assert self.costs is not None
        costs, other, present = self.costs, int(prompts_first), quota
        best = costs.both(reading, writing, LEAST if prompts_first else LARGEST)[other]
        most = self.slack * best
        if prompts_first and self.limits is not None:
            most = max(best, PART * self.limits[1] / self.longer)

        def allowed(at: float) -> bool:
            return costs.both(reading, writing, at)[other] <= most

        step = STEP if prompts_first else -STEP
        while not allowed(quota) and LEAST <= quota - step <= LARGEST:
            quota -= step
        while LEAST <= quota + step <= LARGEST and allowed(quota + step):
            quota += step
        small = abs(quota - present) < HYSTERESIS - 1e-9
        return present if small and allowed(present) else quota


def fitted_costs(passes: list[PassTime], rounds: int = 200) -> PhaseCosts:
    """Return the cost model that fits the times of ``passes`` best, by relative errors. It has four costs, none
    negative. Those of compute are per token, and per product of a query and a key. Those of memory traffic are per
    pass, and per key. How much of the time the other phase reads memory follows from these costs, so that they are
    fitted several times. ``rounds``: number of iterations of each fit.
    """
    reads: dict[Phase, float] = {"prefill": 0.0, "decode": 0.0}
    for _ in range(FITS):
        costs = _fitted(passes, reads, rounds)
        for phase in reads:
            beside = [each for each in passes if each.phase == phase and each.beside]
            parts = [costs.reading(costs.demand(p.work), p.share) for p in beside]
            reads[phase] = sum(parts) / max(1, len(parts))
    return costs


def _fitted(
    passes: list[PassTime], reads: Mapping[Phase, float], rounds: int
) -> PhaseCosts:
    """Fit the four costs. ``reads``: fraction of its time in which each phase reads memory."""
    saturation = PhaseCosts((), ()).saturation
    rows, squares = [], [[0.0] * 4 for _ in range(4)]
    for each in passes:
        other = reads["decode" if each.phase == "prefill" else "prefill"]
        slower = (1 + other * each.beside) / min(1.0, each.share / saturation)
        whole, tokens, _, _, keys, products = each.work
        row = [
            tokens / each.share,
            products / each.share,
            whole * slower,
            keys * slower,
        ]
        rows.append([x / each.seconds for x in row])
    sums = [sum(row[i] for row in rows) for i in range(4)]
    for row in rows:
        for i in range(4):
            for j in range(4):
                squares[i][j] += row[i] * row[j]
    rates = [0.0] * 4
    for _ in range(rounds):  # one rate after the other at its best
        for i in range(4):
            if squares[i][i] > 0:
                rest = sum(squares[i][j] * rates[j] for j in range(4) if j != i)
                rates[i] = max(0.0, (sums[i] - rest) / squares[i][i])
    token, product, whole, key = rates
    return PhaseCosts((0, token, 0, 0, 0, product), (whole, 0, 0, 0, key, 0))
