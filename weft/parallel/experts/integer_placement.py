"""Places experts on ranks by integer programs: equal loads first, then routing between layers (after MoETuner).

The first program finds for each layer the smallest load that the most loaded rank can have. The second chooses, among
assignments that stay within a factor of these loads, one in which most of tokens' transitions between experts of
adjacent layers stay on a rank. It is solved layer by layer, to its optimum given the layers around it, back and forth
from several assignments until no layer can gain. HiGHS solves all programs (Go and Mahajan 2025, 2502.06643).
"""

from collections.abc import Sequence
from math import factorial
from typing import NamedTuple

import numpy as np

from weft.errors import UsageError
from weft.parallel.experts.affinity import (
    Owners,
    place_experts,
    random_owners,
    share_that_stays,
)

#: Share of the objective by which a program's answer may be off, and seconds that it may take.
GAP, LIMIT_S = 1e-3, 20.0


#: Of up to so many groupings of a layer's experts all are compared.
FEW = 150


class ProgrammedPlacement(NamedTuple):
    """An assignment of experts to ranks that integer programs have chosen.

    ``owners``: the rank of every expert, for each layer; ``least``: for each layer the smallest possible load of the
    most loaded rank, in tokens; ``stays``: share of transitions between adjacent layers that stay on a rank.
    """

    owners: Owners
    least: list[float]
    stays: float


def place_by_programs(
    steps: Sequence[np.ndarray],
    loads: Sequence[np.ndarray],
    ranks: int,
    most_load: float = 1.05,
    starts: int = 12,
) -> ProgrammedPlacement:
    """Assign the experts of each layer to ranks by integer programs: nearly equal loads, and few tokens that change
    rank between layers.

    Each rank gets equally many experts of a layer.

    Args:
        ``steps``: counts of transitions between experts of adjacent layers
            (:func:`weft.parallel.experts.affinity.steps_between`).
        ``loads``: for each layer, the number of tokens routed to each expert.
        ``ranks``: number of ranks.
        ``most_load``: bound on the load of every rank; at least 1. It is a multiple of the load that the layer's most
            loaded rank has if the experts are balanced as well as possible.
        ``starts``: number of assignments from each of which the search for few changes of rank is run, at least 2.

    Raises :class:`UsageError` without scipy.
    """
    balanced = [balanced_owners(load, ranks) for load in loads]
    pairs = [*zip(balanced, loads, strict=True)]
    least = [float(np.bincount(owner, load, ranks).max()) for owner, load in pairs]
    limits = [most_load * load + 1e-9 for load in least]

    pool: list[dict[bytes, np.ndarray]] = [{} for _ in loads]

    def improved(owners: Owners) -> Owners:
        before, layers = -1.0, range(len(loads))
        while (now := _stays(steps, owners)) > before + 1e-9:
            before = now
            # an assignment to begin at may have larger loads than allowed: its first layers are replaced at once
            for layer in (*layers, *reversed(layers[:-1])):
                gain = _gains(steps, owners, layer, ranks)
                chosen = best_owner(gain, loads[layer], limits[layer])
                owners[layer] = balanced[layer] if chosen is None else chosen
                pool[layer][_group_names(owners[layer]).tobytes()] = owners[layer]
        return owners

    experts = [*map(len, loads)]
    begins = [place_experts(steps, loads, ranks), [*balanced]]
    begins += [random_owners(experts, ranks, seed) for seed in range(starts - 2)]
    every = [
        all_groupings(load, ranks, limit)
        if _grouping_count(len(load), ranks) <= FEW
        else []
        for load, limit in zip(loads, limits, strict=True)
    ]
    # the best of all needs no search
    optima = [] if all(every) else [improved(owners) for owners in begins]
    groups = [each or [*some.values()] for each, some in zip(every, pool, strict=True)]
    optima.append(improved(best_path(steps, groups, ranks)))
    owners = max(optima, key=lambda each: _stays(steps, each))
    return ProgrammedPlacement(owners, least, _stays(steps, owners))


def best_path(
    steps: Sequence[np.ndarray], groups: Sequence[Sequence[np.ndarray]], ranks: int
) -> Owners:
    """Choose a grouping of the experts of each layer, and a rank for each group, such that most transitions stay on a
    rank.

    Returns the rank of every expert, for each layer. ``steps``: counts of tokens' transitions between experts of
    adjacent layers. ``groups``: for each layer the groupings to choose from; a grouping is the group of each expert,
    ``[experts]``. ``ranks``: number of ranks, and of groups. The choice is optimal, by dynamic programming over the
    layers.
    """
    from scipy.optimize import linear_sum_assignment

    value = np.zeros(len(groups[0]))
    come_from: list[np.ndarray] = []
    matches: list[dict[tuple[int, int], np.ndarray]] = []
    for layer, counts in enumerate(steps):
        here = [np.eye(ranks)[group] for group in groups[layer]]
        there = [np.eye(ranks)[group] for group in groups[layer + 1]]
        total, match = np.empty((len(here), len(there))), {}
        for i, j in np.ndindex(total.shape):
            between = here[i].T @ counts @ there[j]  # [group, group of the next layer]
            rows, columns = linear_sum_assignment(between, maximize=True)
            match[i, j] = columns.argsort()
            total[i, j] = value[i] + between[rows, columns].sum()
        come_from.append(total.argmax(0))
        matches.append(match)
        value = total.max(0)
    path = [int(value.argmax())]
    for best in reversed(come_from):
        path.append(int(best[path[-1]]))
    path.reverse()
    owners, rank_of = [groups[0][path[0]]], np.arange(ranks)
    for layer, match in enumerate(matches):
        # of each group of the next layer, the group of this layer that shares its rank
        rank_of = rank_of[match[path[layer], path[layer + 1]]]
        owners.append(rank_of[groups[layer + 1][path[layer + 1]]])
    return owners


def _grouping_count(experts: int, ranks: int) -> int:
    """Return how many ways there are to divide a layer's experts in ``ranks`` groups of equal size; large if uneven."""
    each, rest = divmod(experts, ranks)
    if rest:
        return FEW + 1
    return factorial(experts) // factorial(each) ** ranks // factorial(ranks)


def all_groupings(load: np.ndarray, ranks: int, limit: float) -> list[np.ndarray]:
    """Return all divisions of a layer's experts into ``ranks`` groups of equal size, each with a load of at most
    ``limit``.

    A division is the group of every expert, ``[experts]``. ``load``: number of tokens routed to each expert.
    """
    experts, each = len(load), len(load) // ranks
    groupings = [np.zeros(0, int)]
    for _ in range(experts):
        # an expert begins no group before the one before it has begun
        groupings = [
            np.append(begun, group)
            for begun in groupings
            for group in range(min(ranks, 1 + begun.max(initial=-1) + 1))
            if (begun == group).sum() < each
        ]
    return [g for g in groupings if np.bincount(g, load, ranks).max() <= limit]


def _group_names(owner: np.ndarray) -> np.ndarray:
    """Return the same name for assignments that differ only in which rank has which group of experts."""
    _, first, at = np.unique(owner, return_index=True, return_inverse=True)
    return first.argsort().argsort()[at]


def _stays(steps: Sequence[np.ndarray], owners: Owners) -> float:
    return share_that_stays(steps, owners) if steps else 1.0


def _gains(
    steps: Sequence[np.ndarray], owners: Owners, layer: int, ranks: int
) -> np.ndarray:
    """Return how many transitions stay with each expert of ``layer`` on each rank, ``[experts, ranks]``."""
    gain = np.zeros((len(owners[layer]), ranks))
    if layer:
        gain += steps[layer - 1].T @ np.eye(ranks)[owners[layer - 1]]
    if layer < len(steps):
        gain += steps[layer] @ np.eye(ranks)[owners[layer + 1]]
    return gain


def balanced_owners(load: np.ndarray, ranks: int) -> np.ndarray:
    """Return the rank of each expert of a layer such that the most loaded rank has as little load as possible.

    ``load``: number of tokens routed to each expert; ``ranks``: number of ranks. The ranks' numbers of experts differ
    by one at most.
    """
    experts = len(load)
    # the last variable is the load of the most loaded rank
    objective = np.append(np.zeros(experts * ranks), 1.0)
    scale = float(max(load.sum(), 1)) / ranks
    by_rank = np.hstack([_of_rank(load / scale, ranks), -np.ones((ranks, 1))])
    on = _solution(objective, experts, ranks, by_rank, np.zeros(ranks))
    assert on is not None
    return on


def best_owner(gain: np.ndarray, load: np.ndarray, limit: float) -> np.ndarray | None:
    """Return the assignment of a layer's experts to ranks with the largest sum of ``gain``, as the rank of each expert.

    Returns None if no assignment keeps the load of every rank within the limit. ``gain``: value of having an expert on
    a rank, ``[experts, ranks]``; ``load``: number of tokens routed to each expert; ``limit``: largest load of a rank,
    in tokens.
    """
    experts, ranks = gain.shape
    scale = float(max(load.sum(), 1)) / ranks
    return _solution(
        -gain.ravel() / max(float(gain.sum()), 1.0),
        experts,
        ranks,
        _of_rank(load / scale, ranks),
        np.full(ranks, limit / scale),
    )


def _of_rank(weights: np.ndarray, ranks: int) -> np.ndarray:
    """Return the matrix that sums ``weights`` of the experts on each rank: ``[ranks, experts * ranks]``."""
    return np.hstack([weight * np.eye(ranks) for weight in weights])


def _solution(
    objective: np.ndarray, experts: int, ranks: int, rows: np.ndarray, most: np.ndarray
) -> np.ndarray | None:
    """Minimise ``objective`` over assignments of experts to ranks with ``rows @ variables <= most``.

    The variables say for each expert and rank whether the expert is there, and further ones may follow. Returns the
    rank of each expert, or None if there is no such assignment.
    """
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp
    except ImportError:
        raise UsageError(
            "integer programs need scipy; pip install scipy, or leave out --most-load"
        ) from None
    cells, more = experts * ranks, len(objective) - experts * ranks
    once = np.hstack(
        [np.kron(np.eye(experts), np.ones(ranks)), np.zeros((experts, more))]
    )
    count = np.hstack([_of_rank(np.ones(experts), ranks), np.zeros((ranks, more))])
    answer = milp(
        objective,
        integrality=np.append(np.ones(cells), np.zeros(more)),
        bounds=Bounds(0, np.append(np.ones(cells), np.full(more, np.inf))),
        constraints=[
            LinearConstraint(once, 1, 1),
            LinearConstraint(count, experts // ranks, -(-experts // ranks)),
            LinearConstraint(rows, -np.inf, most),
        ],
        options={"mip_rel_gap": GAP, "time_limit": LIMIT_S},
    )
    if answer.x is None:
        return None
    chosen: np.ndarray = answer.x[:cells].reshape(experts, ranks).argmax(1)
    return chosen
