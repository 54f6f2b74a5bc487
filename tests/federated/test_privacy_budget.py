"""Differential privacy of clients: the clipped norm, the noise, and epsilon as the theory of the mechanism says."""

from __future__ import annotations

import math

import pytest
import torch

from weft.errors import UsageError
from weft.federated.privacy_budget import (
    PrivacyBudget,
    clipped_difference,
    difference_norm,
    spent_epsilon,
)
from weft.recipe.federated_section import Federated


def test_clipping_scales_the_whole_difference() -> None:
    difference = {"a": torch.full((3,), 2.0), "b": torch.full((1,), 2.0)}
    assert difference_norm(difference) == 4.0
    clipped = clipped_difference(difference, 1.0)
    assert difference_norm(clipped) == pytest.approx(1.0, rel=1e-6)
    assert clipped["b"].tolist() == [0.5]
    assert clipped_difference(difference, 5.0)["a"].tolist() == [2.0] * 3
    assert clipped_difference(difference, 0.0)["a"].tolist() == [2.0] * 3


def test_noise_is_as_large_as_the_largest_part_of_a_client() -> None:
    budget = PrivacyBudget(clip=2.0, multiplier=0.5, delta=1e-5, seed=0)
    change = {"a": torch.zeros(20_000, dtype=torch.float64)}
    noisy = budget.noisy(change, ("x", "y"), (0.25, 0.75))["a"]
    assert float(noisy.std()) == pytest.approx(0.5 * 2.0 * 0.75, rel=0.03)
    assert not torch.equal(noisy, budget.noisy(change, ("x",), (0.75,))["a"])
    assert budget.taken == {"x": 2, "y": 1}
    again = PrivacyBudget(2.0, 0.5, 1e-5)
    again.count(budget.state_dict())
    assert (again.taken, again.changes) == (budget.taken, 2)
    assert (
        PrivacyBudget(2.0, 0.0, 1e-5).noisy(change, ("x",), (1.0,))["a"].abs().sum()
        == 0
    )


@pytest.mark.slow(8)
def test_epsilon_is_that_of_the_gaussian_mechanism() -> None:
    """The best conversion of Renyi divergence ``k a / (2 z^2)`` over orders ``a`` (Balle et al. 2020)."""
    pytest.importorskip("opacus")
    for multiplier, times, delta in ((1.0, 1, 1e-5), (2.0, 30, 1e-6), (0.7, 5, 1e-3)):
        orders = [1 + x / 10 for x in range(1, 100)] + [*range(12, 64)]
        best = min(
            times * a / (2 * multiplier**2)
            + math.log((a - 1) / a)
            - (math.log(delta) + math.log(a)) / (a - 1)
            for a in orders
        )
        assert spent_epsilon(multiplier, times, delta) == pytest.approx(best, rel=1e-6)
    assert spent_epsilon(1.0, 10, 1e-5) < spent_epsilon(1.0, 20, 1e-5)


def test_no_work_costs_nothing_and_no_noise_protects_nobody() -> None:
    assert spent_epsilon(1.0, 0, 1e-5) == 0.0
    assert spent_epsilon(0.0, 1, 1e-5) == math.inf


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"noise": 1.0}, "set federated.clip"),
        ({"secure": True, "compress": "topk:0.1"}, "leave one of them out"),
        ({"compress": "zip"}, "federated.compress"),
        ({"compress_back": "topk:2"}, "federated.compress_back"),
        ({"delta": 0.0}, "delta"),
    ],
)
def test_settings_that_protect_nobody_are_refused(
    settings: dict[str, object], word: str
) -> None:
    with pytest.raises((UsageError, ValueError), match=word):
        Federated(**settings)
