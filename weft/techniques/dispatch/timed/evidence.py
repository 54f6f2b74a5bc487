"""How long dispatch options take relative to each other, and how surely passes have shown it.

A machine is faster at one time than at another. So options are compared only by their times in the same turn of trials,
whose passes follow each other closely, and by the mean of the logarithms of their ratios over all turns, in which a
ratio that is far from the others counts as less far. What one ratio says is as uncertain as the ratios scatter, which
is measured too: on a quiet machine two turns show what takes 20 on a busy one.

What is lost if the slower of two options is taken depends on both: the *expected loss* is the mean of the share of time
that another option would save, over all values of the ratio that the measured ones leave likely (the expected
opportunity loss of ranking and selection; Chick and Inoue 2001).
"""

from dataclasses import dataclass, field
from math import exp, inf, isfinite, log, sqrt
from statistics import NormalDist, mean, median
from typing import NamedTuple

#: Standard deviation of the logarithm of two passes' ratio, where nothing was measured, and the number of measured
#: deviations that count as much as this one.
NOISE, TRUSTED = 0.5, 12
#: Noise below that of any machine.
LEAST = 0.005
#: Ratio of a normal distribution's standard deviation to the median of its absolute deviations.
DEVIATION = 1.4826
#: How many standard deviations from the median a ratio counts as far at most.
FAR = 2.0
#: After how many turns an older time that is so many standard deviations from them no longer counts: it was that of
#: another load.
ENOUGH, APART = 3, 3.0
NORMAL = NormalDist()


class OptionRatio(NamedTuple):
    """How an option compares with another one.

    Attributes:
        ``slower``: logarithm of how many times as long it takes; inf: not known.
        ``error``: the standard deviation of ``slower``.
    """

    slower: float
    error: float

    @property
    def loss(self) -> float:
        """Share of time that is expected to be lost if the option is not taken, 0 if it is surely the slower one."""
        if not isfinite(self.slower):
            return inf
        z = self.slower / self.error
        return self.error * (NORMAL.pdf(z) - z * NORMAL.cdf(-z))


@dataclass
class Evidence:
    """Times of dispatch options.

    Attributes:
        ``before``: for each option its usual seconds as earlier turns have measured them; inf: never tried.
        ``weights``: for each option, the number of turns as many as which its time in ``before`` counts.
        ``noise``: standard deviation of the logarithm of the ratio of two options in one turn.
        ``turns``: for each later turn, the seconds of every option on the slowest rank; inf: not tried.
    """

    before: list[float]
    weights: list[float]
    noise: float = NOISE
    turns: list[list[float]] = field(default_factory=list)

    def ratios(self, to: int) -> list[OptionRatio]:
        """Compare each option with the option ``to``."""
        logs = [self._logs(option, to) for option in range(len(self.before))]
        noise = self._scatter(logs)
        return [self._ratio(n, to, each, noise) for n, each in enumerate(logs)]

    def _logs(self, option: int, to: int) -> list[float]:
        """Return the logarithms of the ratio of two options' times, in turns in which both were tried."""
        both = [turn for turn in self.turns if max(turn[option], turn[to]) < inf]
        return [log(turn[option] / turn[to]) for turn in both]

    def _scatter(self, logs: list[list[float]]) -> float:
        """Return the noise that the ratios of all options (``logs``) show, together with :attr:`noise`."""
        # of the option with itself: all zero
        several = [each for each in logs if len(each) > 1 and any(each)]
        if not several:
            return self.noise
        deviations = [
            abs(value - median(each)) * sqrt(len(each) / (len(each) - 1))
            for each in several
            for value in each
        ]
        free = len(deviations) - len(several)
        measured = max(LEAST, DEVIATION * median(deviations))
        total = TRUSTED * log(self.noise) + free * log(measured)
        return exp(total / (TRUSTED + free))

    def _ratio(
        self, option: int, to: int, logs: list[float], noise: float
    ) -> OptionRatio:
        first, second = self.before[option], self.before[to]
        weight, old, now, turns = 0.0, 0.0, 0.0, len(logs)
        if max(first, second) < inf:
            weight = min(self.weights[option], self.weights[to])
            old = log(first / second)
        if logs:
            middle, width = median(logs), FAR * noise
            now = mean(min(max(x, middle - width), middle + width) for x in logs)
        if turns >= ENOUGH and weight:
            apart = abs(now - old) / (noise * sqrt(1 / weight + 1 / turns))
            weight = 0.0 if apart > APART else weight
        if not weight + turns:
            return OptionRatio(inf, inf)
        slower = (weight * old + turns * now) / (weight + turns)
        return OptionRatio(slower, noise / sqrt(weight + turns))

    def counts(self) -> list[float]:
        """Return for each option the number of turns that its time rests on."""
        tried = zip(*self.turns, strict=True) if self.turns else [()] * len(self.before)
        return [
            weight * (before < inf) + sum(seconds < inf for seconds in times)
            for weight, before, times in zip(
                self.weights, self.before, tried, strict=True
            )
        ]

    def faded(self, known: list[float], to: int, most: float) -> "Evidence":
        """Return what is left of this evidence when it has become old: the ``known`` times of options, each as if by
        ``most`` turns at most. The noise is that of comparisons with the option ``to``.
        """
        logs = [self._logs(option, to) for option in range(len(self.before))]
        weights = [min(most, count) for count in self.counts()]
        return Evidence([*known], weights, self._scatter(logs))
