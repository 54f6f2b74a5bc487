"""The seconds of an engine step as a linear function of its work, fitted to steps that were measured."""

import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain, combinations

import numpy as np
from numpy.typing import NDArray

from weft.generate.scheduler import ScheduledStep
from weft.generate.step_work import work_of

#: Differences of squared errors below this share of the squared seconds are rounding.
ROUNDING = 1e-12

Numbers = NDArray[np.float64]

#: Steps of an engine that serves which are remembered, the fewest to which a curve is fitted, and seconds between two
#: fits.
STEPS, FIT, FIT_S = 256, 32, 2.0


def nonnegative_rates(work: Numbers, seconds: Numbers) -> Numbers:
    """Return the rates, none below zero, with which ``work @ rates`` is nearest to ``seconds`` in least squares.
    ``work``: ``[steps, kinds of work]``; ``seconds``: ``[steps]``. The result is ``[kinds of work]``. There must be few
    kinds, because a least-squares fit is made for every subset of them.
    """
    scale = np.linalg.norm(work, axis=0)
    usable = np.flatnonzero(scale)
    # the same distances in as many rows as there are kinds
    q, r = np.linalg.qr(work[:, usable] / scale[usable])
    aim, kinds = q.T @ seconds, len(usable)
    best, rates = float(aim @ aim), np.zeros(work.shape[1])
    least = ROUNDING * best
    sets = (combinations(range(kinds), count) for count in range(1, kinds + 1))
    # few kinds first: what more of them change by rounding alone does not count
    for some in map(list, chain.from_iterable(sets)):
        fit = np.linalg.lstsq(r[:, some], aim, rcond=None)[0]
        error = float(np.square(r[:, some] @ fit - aim).sum())
        if error < best - least and (fit >= 0).all():
            best, rates = error, np.zeros(work.shape[1])
            rates[usable[some]] = fit / scale[usable[some]]
    return rates


class Curve:
    """Predicts the time of an engine step as a linear function of its work, the six numbers of :func:`work_of`. A call
    takes the planned step and returns seconds.

    ``samples``: measured steps to which the function is fitted, as pairs of work and seconds.
    """

    def __init__(self, samples: Sequence[tuple[Sequence[float], float]]) -> None:
        work, seconds = (
            np.array([each for each, _ in samples]),
            np.array([each for _, each in samples]),
        )
        # Relative errors count, so that all steps weigh alike, and no rate is negative. Steps that are short by chance
        # weigh more in that, so that the total would come out too short: it is scaled to the measured one.
        self.rates = nonnegative_rates(work / seconds[:, None], np.ones(len(seconds)))
        self.rates *= seconds.sum() / (work @ self.rates).sum()

    def __call__(self, step: ScheduledStep) -> float:
        return float(self.rates @ np.array(work_of(step)))


class StepWatch:
    """Keeps the work and the times of an engine's last steps, and fits the time as a linear function of the work. The
    methods are called in the engine's thread.
    """

    def __init__(self) -> None:
        self._steps: deque[tuple[list[float], float]] = deque(maxlen=STEPS)
        self._work: list[float] | None = None
        self._rates: Sequence[float] = ()
        self._again = 0.0

    def begin(self, step: ScheduledStep) -> None:
        """Note the amount of work of ``step``, the six numbers of :func:`work_of`. Call this method before the step is
        computed.
        """
        self._work = work_of(step)

    def end(self, seconds: float) -> None:
        """Note that the step of the last :meth:`begin` has taken so many ``seconds``."""
        if self._work is not None:
            self._steps.append((self._work, seconds))
        self._work = None

    @property
    def rates(self) -> Sequence[float]:
        """Fitted seconds per unit of each of the six kinds of work that :func:`work_of` counts; empty before there are
        enough measurements.
        """
        if len(self._steps) >= FIT and time.monotonic() >= self._again:
            self._again = time.monotonic() + FIT_S
            with suppress(np.linalg.LinAlgError):  # the fit does not converge
                rates = Curve(list(self._steps)).rates
                if np.isfinite(rates).all():
                    self._rates = [float(rate) for rate in rates]
        return self._rates
