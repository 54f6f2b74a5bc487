"""Experts placed by integer programs: against the optimum, which is found by trying every assignment."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from tests.parallel.test_affinity import planted
from weft.parallel.experts.affinity import loads_of, share_that_stays, steps_between
from weft.parallel.experts.integer_placement import (
    all_groupings,
    best_owner,
    place_by_programs,
)


def optimum(
    steps: list[np.ndarray], loads: list[np.ndarray], ranks: int, most_load: float
) -> tuple[float, list[float]]:
    """The largest share that can stay, and each layer's least largest load, from all assignments of every layer."""
    experts = len(loads[0])
    even = [rank for rank in range(ranks) for _ in range(experts // ranks)]
    every = np.eye(ranks)[
        sorted(set(permutations(even)))
    ]  # [assignments, experts, ranks]
    least, value, before = [], np.zeros(1), None
    for layer, load in enumerate(loads):
        largest = np.einsum("aer,e->ar", every, load).max(1)
        least.append(float(largest.min()))
        here = every[largest <= most_load * largest.min() + 1e-9]
        if before is None:
            value = np.zeros(len(here))
        else:
            stays = np.einsum(
                "aer,ef,bfr->ab", before, steps[layer - 1], here, optimize=True
            )
            value = (value[:, None] + stays).max(0)
        before = here
    return float(value.max() / sum(s.sum() for s in steps)), least


def drawn(
    layers: int, experts: int, seed: int
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Transitions without groups that could be found, and the loads that belong to them."""
    rng = np.random.default_rng(seed)
    odds = rng.dirichlet(np.full(experts**2, 0.3), layers - 1)
    steps = [np.floor(row.reshape(experts, experts) * 5000) for row in odds]
    return steps, [*(s.sum(1) for s in steps), steps[-1].sum(0)]


CASES = [
    (3, 6, 3, 1.0),
    (3, 6, 2, 1.3),
    pytest.param(4, 8, 4, 1.05, marks=pytest.mark.slow),
    pytest.param(5, 8, 2, 1.05, marks=pytest.mark.slow),
    pytest.param(3, 10, 2, 1.2, marks=pytest.mark.soak),
    pytest.param(4, 9, 3, 1.05, marks=pytest.mark.soak),
    pytest.param(4, 9, 3, 1.3, marks=pytest.mark.soak),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("layers", "experts", "ranks", "most_load"), CASES)
def test_within_two_percent_of_the_optimum(
    layers: int, experts: int, ranks: int, most_load: float
) -> None:
    """Loads by the first program exactly; the second's share that stays; for drawn transitions and planted ones."""
    chosen, _ = planted(layers, experts, ranks, 1)
    counts = [experts] * layers
    grouped = steps_between(chosen, counts), loads_of(chosen, counts)
    for steps, loads in (drawn(layers, experts, 1), grouped):
        best, least = optimum(steps, loads, ranks, most_load)
        placement = place_by_programs(steps, loads, ranks, most_load)
        assert np.allclose(placement.least, least, rtol=1e-3)
        assert placement.stays >= 0.98 * best
        assert share_that_stays(steps, placement.owners) == placement.stays
        for owner, load, bound in zip(placement.owners, loads, least, strict=True):
            assert (np.bincount(owner) == experts // ranks).all()
            assert np.bincount(owner, load).max() <= most_load * bound * 1.001 + 1e-9


@pytest.mark.soak
def test_a_search_is_as_good_as_all_groupings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are too many groupings to compare, searches from several assignments are joined."""
    steps, loads = drawn(4, 8, 2)
    best = place_by_programs(steps, loads, 4, 1.3).stays
    monkeypatch.setattr("weft.parallel.experts.integer_placement.FEW", 0)
    assert place_by_programs(steps, loads, 4, 1.3).stays >= 0.98 * best


def test_groupings_and_what_cannot_be_placed() -> None:
    assert len(all_groupings(np.ones(6), 3, 2.0)) == 15
    assert len(all_groupings(np.array([3, 1, 1, 1, 1, 1]), 3, 3.0)) == 0
    assert best_owner(np.ones((4, 2)), np.array([3, 3, 1, 1]), 3.0) is None
    kept = best_owner(np.eye(4, 2), np.array([3, 3, 1, 1]), 4.0)
    assert kept is not None and sorted(kept[:2]) == [0, 1]
