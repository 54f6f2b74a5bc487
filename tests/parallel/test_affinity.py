"""Where experts are put by what tokens chose: against what is planted, and against the optimum of HiGHS."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import Bounds, LinearConstraint, milp

from weft.parallel.experts.affinity import (
    Owners,
    experts_by_slot,
    largest_load,
    place_experts,
    random_owners,
    share_that_stays,
    steps_between,
)


def planted(
    layers: int, experts: int, ranks: int, seed: int
) -> tuple[list[np.ndarray], Owners]:
    """What 2,000 tokens choose that stay in a group of experts nine times of ten, by unequal odds; and the groups."""
    rng = np.random.default_rng(seed)
    groups = random_owners([experts] * layers, ranks, seed + 100)
    odds = rng.dirichlet(np.full(experts // ranks, 2.0), (layers, ranks))
    chosen = [rng.integers(experts, size=2000)]
    for layer in range(1, layers):
        at = groups[layer - 1][chosen[-1]]
        at = np.where(rng.random(2000) < 0.9, at, rng.integers(ranks, size=2000))
        chosen.append(
            np.array(
                [
                    rng.choice(np.flatnonzero(groups[layer] == one), p=odds[layer, one])
                    for one in at
                ]
            )
        )
    return [one[:, None] for one in chosen], groups


@pytest.mark.parametrize(
    ("layers", "experts", "ranks"), [(4, 8, 4), (6, 16, 4), (8, 16, 2), (6, 32, 8)]
)
@pytest.mark.parametrize("seed", [0, 1])
def test_planted_groups_are_found(
    layers: int, experts: int, ranks: int, seed: int
) -> None:
    chosen, groups = planted(layers, experts, ranks, seed)
    steps, loads = (
        steps_between(chosen, [experts] * layers),
        [np.bincount(c[:, 0], minlength=experts) for c in chosen],
    )
    owners = place_experts(steps, loads, ranks)
    assert all((np.bincount(owner) == experts // ranks).all() for owner in owners)
    assert (
        share_that_stays(steps, owners) >= 0.95 * share_that_stays(steps, groups) > 0.8
    )
    table = experts_by_slot(owners)
    assert all((owner[slots] == np.repeat(np.arange(ranks), experts // ranks)).all()
               for owner, slots in zip(owners, table, strict=True))  # fmt: skip


def test_steps_are_counted_for_every_pair_of_choices() -> None:
    chosen = [np.array([[0, 2], [1, 2]]), np.array([[1, 0], [1, 2]])]
    (steps,) = steps_between(chosen, [3, 4])
    assert steps.tolist() == [[1, 1, 0, 0], [0, 1, 1, 0], [1, 2, 1, 0]]
    assert (
        share_that_stays([steps], [np.array([0, 0, 1]), np.array([0, 1, 0, 1])]) == 0.5
    )


def most_that_can_stay(steps: list[np.ndarray], experts: int, ranks: int) -> float:
    """By integer programming: an expert is on one rank, ranks have equally many, a step stays if both ends do."""
    layers = len(steps) + 1
    on = np.arange(layers * experts * ranks).reshape(layers, experts, ranks)
    cells = [(i, e, f, r, steps[i][e, f]) for i in range(layers - 1) for e, f in np.argwhere(steps[i])
             for r in range(ranks)]  # fmt: skip
    rows, low, high = [], [], []

    def bound(ones: list[int], less: list[int], least: float, most: float) -> None:
        row = np.zeros(on.size + len(cells))
        row[ones], row[less] = 1, -1
        rows.append(row)
        low.append(least)
        high.append(most)

    for layer in on:
        for expert in layer:
            bound(list(expert), [], 1, 1)
        for rank in layer.T:
            bound(list(rank), [], experts // ranks, experts // ranks)
    for n, (i, e, f, r, _) in enumerate(cells, on.size):
        bound([n], [on[i, e, r]], -1, 0)
        bound([n], [on[i + 1, f, r]], -1, 0)
    gain = np.array([0] * on.size + [-cell[-1] for cell in cells], float)
    whole = np.array([1] * on.size + [0] * len(cells))
    found = milp(
        gain,
        constraints=LinearConstraint(np.array(rows), low, high),
        bounds=Bounds(0, 1),
        integrality=whole,
    )
    assert found.success
    return -found.fun / sum(one.sum() for one in steps)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(3))
def test_as_much_stays_as_can(seed: int) -> None:
    """Random steps have no structure to be found, which is what is hard."""
    steps = [np.random.default_rng([seed, i]).poisson(2.0, (6, 6)) for i in range(2)]
    loads = [steps[0].sum(1), steps[1].sum(1), steps[1].sum(0)]
    found = share_that_stays(steps, place_experts(steps, loads, 2, starts=8))
    assert 0.98 * (best := most_that_can_stay(steps, 6, 2)) <= found <= best + 1e-9
    assert found > share_that_stays(steps, random_owners([6, 6, 6], 2))


def least_largest_load(load: np.ndarray, ranks: int) -> float:
    """By integer programming, over the mean."""
    experts = len(load)
    # on one rank each
    rows = [np.kron(np.eye(experts)[e], np.ones(ranks)) for e in range(experts)]
    # equally many
    rows += [np.kron(np.ones(experts), np.eye(ranks)[r]) for r in range(ranks)]
    rows += [np.kron(load, np.eye(ranks)[r]) for r in range(ranks)]
    low = [1] * experts + [experts // ranks] * ranks + [-np.inf] * ranks
    high = [1] * experts + [experts // ranks] * ranks + [0] * ranks
    table = np.column_stack((np.array(rows), [0] * (experts + ranks) + [-1] * ranks))
    on = [1] * experts * ranks
    found = milp(np.array([0.0] * len(on) + [1.0]), constraints=LinearConstraint(table, low, high),
                 bounds=Bounds(0, [*on, np.inf]), integrality=[*on, 0])  # fmt: skip
    assert found.success
    return float(found.fun * ranks / load.sum())


def test_loads_are_levelled_where_they_count() -> None:
    chosen, _ = planted(4, 8, 2, 5)
    steps = steps_between(chosen, [8] * 4)
    loads = [
        np.random.default_rng(layer).permutation(1000 / np.arange(1, 9) ** 1.2)
        for layer in range(4)
    ]
    found = {
        level: place_experts(steps, loads, 2, level) for level in (0.0, 3.0, 1000.0)
    }
    stays = [share_that_stays(steps, owners) for owners in found.values()]
    most = [largest_load(loads, owners) for owners in found.values()]
    assert stays[0] >= stays[1] >= stays[2] and most[0] > most[1] >= most[2]
    assert most[2] <= 1.02 * max(least_largest_load(load, 2) for load in loads)
