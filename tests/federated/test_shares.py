"""Weights: over many changes each client counts its share, whatever its speed."""

from __future__ import annotations

from statistics import fmean, pstdev
from typing import Any, NamedTuple

import pytest

from tests.federated.quadratics import QuadraticCohort, clock

OPTIMA = [1.0, 2.0, 3.0, 7.0]
#: Seconds of a work of five steps.
SECONDS = [1.0, 1.3, 2.1, 4.7]
OPTIMUM = fmean(OPTIMA)


class Path(NamedTuple):
    """The model over the second half of a run: its mean and its standard deviation."""

    mean: float
    deviation: float


def path(changes: int, **settings: Any) -> Path:
    simulated = clock(QuadraticCohort(OPTIMA, rate=0.03), [s / 5 for s in SECONDS], steps=5, **settings)  # fmt: skip
    values = []
    while simulated.policy.version < changes:
        simulated.run(simulated.policy.version + 1)
        values.append(float(simulated.parameters["x"]))
    half = values[len(values) // 2 :]
    return Path(fmean(half), pstdev(half))


def test_fedfix_is_unbiased_at_every_tick() -> None:
    """Bias at most a third of that of equal weights, and less variance the longer the tick (Fraboni et al. 2023)."""
    deviations = []
    for tick in (0.5, 1.0, 2.0):
        weighted = path(400, policy="fedfix", tick=tick)
        plain = path(400, policy="fedfix", tick=tick, unbiased=False)
        assert abs(weighted.mean - OPTIMUM) <= abs(plain.mean - OPTIMUM) / 3, tick
        deviations.append(weighted.deviation)
    synchronous = path(240, policy="fedfix", tick=5.0)
    assert synchronous.mean == pytest.approx(OPTIMUM, abs=1e-6)
    assert deviations == sorted(deviations, reverse=True)
    assert synchronous.deviation < min(deviations)


@pytest.mark.parametrize("policy", ["fedasync", "fedbuff"])
def test_counted_clients_are_unbiased(policy: str) -> None:
    weighted = path(600, policy=policy, unbiased=True, staleness=0.0, rate=0.3)
    plain = path(600, policy=policy, staleness=0.0, rate=0.3)
    assert abs(weighted.mean - OPTIMUM) <= abs(plain.mean - OPTIMUM) / 3


def test_weights_by_samples_reach_the_weighted_optimum() -> None:
    simulated = clock(QuadraticCohort(OPTIMA, [1, 1, 1, 5]), [1, 2, 3, 4], steps=5)
    simulated.run(80)
    assert float(simulated.parameters["x"]) == pytest.approx((1 + 2 + 3 + 35) / 8, abs=1e-6)  # fmt: skip
