"""A quota that keeps both latencies equally far from their limits, by what was measured in the last window."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean
from typing import ClassVar, Self

from weft.generate.quotas import LARGEST, LEAST, PhaseView, QuotaController
from weft.registry import register

#: Seconds that a first token and a further token may take, if nothing is said.
FIRST, NEXT = 1.0, 0.1
#: Windows in the time that a first token may take.
WINDOWS = 8
#: Part of the way to the wanted quota that a window goes, and the least change.
PACE, LEAST_CHANGE = 0.5, 0.02
#: Part of the limit of a first token that is aimed at, as prompts that wait make later ones wait too.
MARGIN = 0.3
#: Part of a window's first-token times that are below the one that counts.
RANK = 0.9
#: Ratio of a latency and its limit below which nothing is changed.
CALM = 0.9
#: Least and largest ratio of a latency and its limit that count.
CLEAR, LOST = 0.05, 4.0


@register(
    "quota",
    "semi-pd",
    title="A quota by first-token and inter-token times against limits",
    paper="Hong et al. 2025 (semi-PD), 2504.19867",
    recipe="weft serve --checkpoint RUN --phases split --quota semi-pd:1,0.1",
    proof="tests/techniques/test_quotas.py, tests/serve/test_phase_simulation.py",
    figure=(
        "simulated on a drifting load under three limits, 3.36, 1.08 and 1.002 of the goodput of the best of six fixed "
        "quotas, 0.910, 0.930 and 0.984 of one process in chunks (`bench/quotas.py`)"
    ),
)
class LimitsQuota(QuotaController):
    """Chooses the share of the device for prompts (the quota) by limits of latency: ``first`` seconds to a request's
    first token, ``later`` seconds to each further token (semi-PD, Hong et al. 2025). A window lasts an eighth of the
    limit ``first``. At its end two ratios are computed: the first-token time that nine in ten requests do not exceed,
    and the mean time between tokens, each divided by its limit. A request that still waits counts as if it got its
    token now. Latency is assumed to be inversely proportional to the share of its phase. From this follows the quota at
    which both ratios would be equal. If first tokens meet their limit, the texts get at least the share with which
    further tokens take nine tenths of theirs. The quota moves half of the way there. It stays if both ratios are below
    nine tenths, and if the change is small, unless further tokens take more than nine tenths of their limit and get
    more by it.
    """

    example: ClassVar[str] = "semi-pd:1,0.1"
    argument: ClassVar[str] = (
        "the seconds above 0 to a first token and to each further one"
    )

    def __init__(self, first: float = FIRST, later: float = NEXT) -> None:
        self.first, self.later = first, later
        self._firsts: list[float] = []
        self._gaps: list[float] = []
        self._ends: float | None = None

    @classmethod
    def of_argument(cls, argument: str | None) -> Self | None:
        if argument is None:
            return cls()
        try:
            first, later = map(float, argument.split(","))
        except ValueError:
            return None
        good = 0 < first < float("inf") and 0 < later < float("inf")
        return cls(first, later) if good else None

    def note_first(self, now: float, seconds: float) -> None:
        self._firsts.append(seconds)

    def note_gap(self, now: float, seconds: float) -> None:
        self._gaps.append(seconds)

    def choose(self, view: PhaseView) -> float:
        if self._ends is None:
            self._ends = view.now + self.first / WINDOWS
        if view.now < self._ends:
            return view.quota
        firsts = [*self._firsts, view.oldest] if view.prompts else self._firsts
        late = pressure(high(firsts), MARGIN * self.first)
        slow = pressure(mean(self._gaps) if self._gaps else 0.0, self.later)
        self._firsts, self._gaps, self._ends = [], [], view.now + self.first / WINDOWS
        if max(late, slow) < CALM:
            return view.quota
        reading, writing = view.quota * late, (1 - view.quota) * slow
        wanted = reading / (reading + writing)
        if MARGIN * late < 1:  # no limit is missed if further tokens keep theirs
            wanted = min(wanted, max(LEAST, 1 - writing / CALM))
        change = PACE * (wanted - view.quota)
        # what can be kept is not missed for ever, however little is lacking
        missed = change < 0 and slow > CALM
        if abs(change) < LEAST_CHANGE and not missed:
            return view.quota
        return min(LARGEST, max(LEAST, view.quota + change))


def high(latencies: Sequence[float]) -> float:
    """Return the latency in seconds that nine in ten of ``latencies`` do not exceed; 0 if there are none."""
    ordered = sorted(latencies)
    last = len(ordered) - 1
    return ordered[min(last, int(RANK * len(ordered)))] if ordered else 0.0


def pressure(latency: float, limit: float) -> float:
    """Return how close a latency is to its limit: the ratio ``latency / limit``, raised to at least :data:`CLEAR` and
    cut off at :data:`LOST`.
    """
    return min(LOST, max(CLEAR, latency / limit))
