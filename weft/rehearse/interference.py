"""Predicts how much other programs on a shared host slow the next steps, from repeated small probes.

As CloudFormer (2509.03394) predicts the slowdown that unknown tenants of a cloud cause, from what a machine shows of
itself. There a network learns from many metrics of many machines; here a ridge regression learns from three probes of
this one, and says between which bounds four of five windows lie.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

#: What a window measures, in seconds: memory, a product, a step; and the processes that wait for a core.
PROBES = ("stream", "product", "step", "load")
#: Windows that a prediction looks back on.
BACK = 3
#: Ridge of the regression; share of windows that lie between the bounds; fewest windows from which to learn.
RIDGE, COVERED, LEAST = 1.0, 0.8, 24


def small_step() -> Callable[[], None]:
    """Return a function that takes a training step of a small network, as a probe of the machine's present speed. A
    step takes a few tens of milliseconds on a quiet machine.
    """
    import torch

    layers = [torch.nn.Linear(512, 2048), torch.nn.GELU(), torch.nn.Linear(2048, 512)]
    model = torch.nn.Sequential(*layers)
    update = torch.optim.AdamW(model.parameters())
    tokens = torch.rand(512, 512)

    def step() -> None:
        update.zero_grad()
        model(tokens).square().mean().backward()
        update.step()

    return step


def watch_windows(step: Callable[[], Any], windows: int, wait: float = 0.0) -> Array:
    """Measure how fast the machine is in ``windows`` successive windows of time; return the measurements, ``[window,
    probe]``.

    The probes, in the order of :data:`PROBES`, are elapsed seconds of short computations, and 1 plus the load average.
    Other programs lengthen elapsed times. ``step``: a training step whose time is to be predicted, one of the probes.
    ``wait``: seconds between windows.
    """
    import torch

    a, b = torch.rand(2, 2**20).unbind()
    square = torch.rand(384, 384)
    rows = []
    for _ in range(windows):
        rows.append(
            [
                _elapsed(lambda: torch.add(a, b, alpha=3.0)),
                _elapsed(lambda: square @ square),
                _elapsed(step),
                1.0 + os.getloadavg()[0],
            ]
        )
        time.sleep(wait)
    return np.array(rows)


def _elapsed(call: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    call()
    return max(time.perf_counter() - begun, 1e-9)


@dataclass(frozen=True)
class Slowdown:
    """Predicted time of a step, divided by its time on the quiet machine.

    ``middle``: the prediction. ``low``, ``high``: bounds, between which the share :data:`COVERED` of steps is expected.
    """

    low: float
    middle: float
    high: float


@dataclass(frozen=True)
class InterferencePredictor:
    """Predicts how much other programs will slow the next step, by a regression on the probes of the last windows of
    time.

    ``quiet``: the smallest time of every probe. ``weights``: weights of the results of :func:`features`. ``spread``:
    how far, in logarithms, the measured slowdown was below and above the prediction, in windows not used for the fit.
    """

    quiet: Array
    weights: Array
    spread: tuple[float, float]

    def slowdown(self, recent: Array) -> Slowdown:
        """Return the predicted slowdown of the next step. ``recent``: probes of successive windows of time, ``[window,
        probe]``, of which the last :data:`BACK` count.
        """
        middle = float(features(recent[-BACK:], self.quiet) @ self.weights)
        low, high = (middle + off for off in self.spread)
        return Slowdown(*(max(1.0, float(np.exp(x))) for x in (low, middle, high)))


def features(recent: Array, quiet: Array) -> Array:
    """Return the input variables of the regression that predicts a slowdown.

    They are 1, and for each probe two numbers: the logarithm of its last time divided by its time on the quiet machine,
    and the mean of this logarithm over all ``recent`` windows. ``recent``: times of the probes, ``[window, probe]``.
    ``quiet``: time of each probe on the quiet machine, ``[probe]``.
    """
    logs = np.log(recent / quiet)
    return np.concatenate([[1.0], logs[-1], logs.mean(0)])


def learn(windows: Array) -> InterferencePredictor:
    """Fit a predictor to ``windows``, ``[window, probe]``: weights to the older half, bounds to the newer half.

    The bounds are those of split conformal prediction (Vovk et al. 2005): quantiles of the newer half's residuals.
    """
    quiet = np.quantile(windows, 0.02, axis=0)
    rows = np.array(
        [features(windows[i - BACK : i], quiet) for i in range(BACK, len(windows))]
    )
    target = np.log(windows[BACK:, PROBES.index("step")] / quiet[PROBES.index("step")])
    half = len(rows) // 2
    old, seen = rows[:half], target[:half]
    penalty = RIDGE * np.eye(old.shape[1])
    penalty[0, 0] = 0.0
    weights = np.linalg.solve(old.T @ old + penalty, old.T @ seen)
    left = np.sort(target[half:] - rows[half:] @ weights)
    # one more at each end than the plain quantile: what conformal prediction asks for
    outside = int((1 - COVERED) / 2 * (len(left) + 1)) - 1
    low, high = left[max(outside, 0)], left[len(left) - 1 - max(outside, 0)]
    return InterferencePredictor(quiet, weights, (float(low), float(high)))


def judged(windows: Array, after: int) -> dict[str, float]:
    """Measure how good predictions are: fit a predictor to the windows before ``after``, and predict each later window.

    Returns the share of these windows between the bounds (``covered``) and the mean absolute error of the logarithm
    (``error``). For comparison it has the errors of two simple predictions: the mean of the windows before ``after``
    (``constant``), and the window before (``last``).
    """
    predictor = learn(windows[:after])
    column = PROBES.index("step")
    step = windows[:, column] / predictor.quiet[column]
    usual = float(np.log(np.maximum(step[:after], 1.0)).mean())
    inside, errors, constant, last = [], [], [], []
    for i in range(after, len(windows)):
        predicted = predictor.slowdown(windows[:i])
        real = max(1.0, float(step[i]))
        inside.append(predicted.low <= real <= predicted.high)
        errors.append(abs(np.log(real / predicted.middle)))
        constant.append(abs(np.log(real) - usual))
        last.append(abs(np.log(real / max(1.0, float(step[i - 1])))))
    names = ("covered", "error", "constant", "last")
    means = (np.mean(each) for each in (inside, errors, constant, last))
    return {name: float(mean) for name, mean in zip(names, means, strict=True)}


def shared_words(windows: Sequence[Sequence[float]]) -> str:
    """Return a text on the slowdown to expect on this machine, from the probes in ``windows``, ``[window, probe]``;
    empty if these are too few.
    """
    if len(windows) < LEAST:
        return ""
    table = np.array(windows, dtype=float)
    expected = learn(table).slowdown(table)
    return (
        f"beside other programs a step takes {expected.middle:.2f} times as long as on the quiet machine, "
        f"{expected.low:.2f} to {expected.high:.2f} in {COVERED:.0%} of windows ({len(windows)} probed)"
    )
