"""Places experts on ranks so that few tokens move, from the experts that tokens have chosen before.

A token moves between two layers only if their chosen experts are on different ranks (ExFlow, Yao et al. 2024,
2401.08383). From the counts of such steps follows a table for each layer, as for any placement: the expert of each
slot, the slots of the first rank first. With ``level`` above 0 ranks also get similar loads (after MoETuner, Go and
Mahajan 2025, 2502.06643).
"""

from collections.abc import Sequence
from itertools import pairwise
from math import prod

import numpy as np

#: Of each layer, the rank of every expert.
Owners = list[np.ndarray]


def steps_between(
    chosen: Sequence[np.ndarray], experts: Sequence[int]
) -> list[np.ndarray]:
    """Count the transitions of tokens between experts of adjacent layers, for the placement of experts on ranks.

    A transition leads from an expert that a token is routed to in a layer to one in the next layer. The result has one
    table ``[experts, experts of the next layer]`` for each pair of adjacent layers. ``chosen``: for each layer the
    experts that tokens are routed to, ``[tokens, k]``; ``experts``: the number of experts of each layer.
    """
    steps = []
    for (here, there), sizes in zip(pairwise(chosen), pairwise(experts), strict=True):
        cells = here[:, :, None] * sizes[1] + there[:, None, :]  # [tokens, k, k]
        steps.append(np.bincount(cells.ravel(), minlength=prod(sizes)).reshape(sizes))
    return steps


def loads_of(chosen: Sequence[np.ndarray], experts: Sequence[int]) -> list[np.ndarray]:
    """Count how many tokens are routed to each expert: ``[experts]`` for each layer.

    ``chosen``: for each layer the experts that tokens are routed to, ``[tokens, k]``; ``experts``: number of experts of
    each layer.
    """
    return [
        np.bincount(ids.ravel(), minlength=count)
        for ids, count in zip(chosen, experts, strict=True)
    ]


def share_that_stays(steps: Sequence[np.ndarray], owners: Owners) -> float:
    """Return the share of tokens' transitions between experts of adjacent layers that stay on one rank.

    ``steps``: counts of transitions (:func:`steps_between`); ``owners``: the rank of every expert, for each layer.
    """
    stays = sum(
        counts[here[:, None] == there].sum()
        for counts, (here, there) in zip(steps, pairwise(owners), strict=True)
    )
    return float(stays / sum(counts.sum() for counts in steps))


def largest_load(loads: Sequence[np.ndarray], owners: Owners) -> float:
    """Return the largest load of a rank in any layer, relative to the mean load of ranks in that layer.

    ``loads``: for each layer, how many tokens are routed to each expert; ``owners``: for each layer, the rank of every
    expert.
    """
    by_rank = map(np.bincount, owners, loads)
    return max(float(load.max() / load.mean()) for load in by_rank)


def random_owners(experts: Sequence[int], ranks: int, seed: int = 0) -> Owners:
    """Assign the experts of each layer to random ranks; the numbers of experts on two ranks differ by one at most.

    ``experts``: the number of experts of each layer; ``ranks``: number of ranks; ``seed``: seed of the random numbers.
    Returns the rank of every expert, for each layer.
    """
    rng = np.random.default_rng(seed)
    split = (np.array_split(np.arange(count), ranks) for count in experts)
    return [
        rng.permutation(np.repeat(np.arange(ranks), [*map(len, parts)]))
        for parts in split
    ]


def place_experts(
    steps: Sequence[np.ndarray],
    loads: Sequence[np.ndarray],
    ranks: int,
    level: float = 0.0,
    starts: int = 4,
) -> Owners:
    """Assign equally many experts to each rank, so that a token's experts in adjacent layers often share a rank.

    Returns the rank of every expert, for each layer.

    A local search begins at each of ``starts`` random assignments. It goes through the layers back and forth and swaps
    two experts of a layer, as long as a swap makes the assignment better. An assignment is better if more transitions
    stay on a rank. A transition leads from an expert of a token to its expert in the next layer.

    Args:
        ``steps``: counts of tokens' transitions between experts of adjacent layers (:func:`steps_between`).
        ``loads``: for each layer, the number of tokens routed to each expert (:func:`loads_of`).
        ``ranks``: number of ranks.
        ``level``: weight of even loads. The variance of the ranks' loads, relative to the mean load, counts against an
            assignment, multiplied by ``level``. 0: loads do not matter.
        ``starts``: number of random assignments to begin at.
    """
    total = sum(counts.sum() for counts in steps)
    # What the square of a rank's load costs, in steps.
    costs = [
        level * float(total) * ranks / len(loads) / float(load.sum()) ** 2
        for load in loads
    ]

    def merit(owners: Owners) -> float:
        layers = zip(costs, owners, loads, strict=True)
        uneven = sum(
            cost * np.square(np.bincount(owner, load, ranks)).sum()
            for cost, owner, load in layers
        )
        return share_that_stays(steps, owners) * float(total) - float(uneven)

    def improved(owners: Owners) -> Owners:
        layers, before = range(len(owners)), -np.inf
        while (now := merit(owners)) > before + 1e-9 * total:
            before = now
            for layer in (*layers, *reversed(layers)):
                # in steps, of each expert on each rank
                gain = np.zeros((len(loads[layer]), ranks))
                if layer:
                    gain += steps[layer - 1].T @ np.eye(ranks)[owners[layer - 1]]
                if layer < len(steps):
                    gain += steps[layer] @ np.eye(ranks)[owners[layer + 1]]
                _swap(owners[layer], gain, loads[layer], costs[layer])
        return owners

    experts = [*map(len, loads)]
    optima = (improved(random_owners(experts, ranks, seed)) for seed in range(starts))
    return max(optima, key=merit)


def _swap(owner: np.ndarray, gain: np.ndarray, load: np.ndarray, cost: float) -> None:
    """Swap experts of one layer in place, the best two first, until no two gain."""
    more = load[:, None] - load  # of the first over the second
    while True:
        at_second = gain[:, owner]  # [first, second]
        gains = at_second - at_second.diagonal()[:, None]
        gains = gains + gains.T
        of_rank = np.bincount(owner, load, gain.shape[1])[owner]
        uneven = more * (more + of_rank - of_rank[:, None])
        gains -= 2 * cost * uneven * (owner[:, None] != owner)
        first, second = np.unravel_index(gains.argmax(), gains.shape)
        if gains[first, second] <= 1e-9 * max(1.0, gain.max()):
            return
        owner[[first, second]] = owner[[second, first]]


def experts_by_slot(owners: Owners) -> list[list[int]]:
    """List the expert in every slot, for each layer: first the slots of rank 0, then those of rank 1, and so on.

    A slot is a position in a rank's stack of expert weights; a rank's slots hold the experts it owns, in ascending
    order. ``owners``: the rank of every expert, for each layer.
    """
    return [np.argsort(owner, kind="stable").tolist() for owner in owners]
