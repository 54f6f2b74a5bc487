"""Which rank should have which experts, from what tokens have chosen before.

A token that stays where its last layer's expert was goes on to the next layer's for nothing if that is on the same rank
(ExFlow, Yao et al. 2024, 2401.08383). What follows from a count of such steps is a table for each layer, the same as
any placement: which expert each slot has, the slots of the first rank first. With ``level`` above 0 ranks are to have
equal loads, too (after MoETuner, Go and Mahajan 2025, 2502.06643).
"""

from collections.abc import Sequence

import numpy as np

from weft.layout.dims import part

#: Of each layer, the rank of every expert.
Owners = list[np.ndarray]


def steps_between(
    chosen: Sequence[np.ndarray], experts: Sequence[int]
) -> list[np.ndarray]:
    """How often a token that chose one expert of a layer chose another of the next: ``[experts, experts of the next]``.

    ``chosen``: of each layer the experts of every token, ``[tokens, k]``; ``experts``: how many each layer has.
    """
    found = []
    for here, there, *sizes in zip(
        chosen, chosen[1:], experts, experts[1:], strict=False
    ):
        cells = here[:, :, None] * sizes[1] + there[:, None, :]
        found.append(
            np.bincount(cells.ravel(), minlength=sizes[0] * sizes[1]).reshape(sizes)
        )
    return found


def loads_of(chosen: Sequence[np.ndarray], experts: Sequence[int]) -> list[np.ndarray]:
    """How often each expert of every layer was chosen; arguments as of :func:`steps_between`."""
    return [
        np.bincount(ids.ravel(), minlength=count)
        for ids, count in zip(chosen, experts, strict=True)
    ]


def share_that_stays(steps: Sequence[np.ndarray], owners: Owners) -> float:
    """The share of ``steps`` that lead to an expert on the same rank."""
    stays = sum(
        one[a[:, None] == b].sum()
        for one, a, b in zip(steps, owners, owners[1:], strict=False)
    )
    return float(stays / sum(one.sum() for one in steps))


def largest_load(loads: Sequence[np.ndarray], owners: Owners) -> float:
    """The load of the most loaded rank over the mean, in the worst layer; ``loads``: of every expert of each layer."""
    by_rank = (
        np.bincount(owner, load) for owner, load in zip(owners, loads, strict=True)
    )
    return max(float(one.max() / one.mean()) for one in by_rank)


def random_owners(experts: Sequence[int], ranks: int, seed: int = 0) -> Owners:
    """Equally many experts on every rank, or all but."""
    rng = np.random.default_rng(seed)
    sizes = [
        [hi - lo for lo, hi in (part(count, ranks, rank) for rank in range(ranks))]
        for count in experts
    ]
    return [rng.permutation(np.repeat(np.arange(ranks), one)) for one in sizes]


def place_experts(
    steps: Sequence[np.ndarray],
    loads: Sequence[np.ndarray],
    ranks: int,
    level: float = 0.0,
    starts: int = 4,
) -> Owners:
    """The rank of every expert, of equally many on each rank, so that most of ``steps`` stay on a rank.

    From each of so many random ``starts``: layer by layer, to and fro, the best swaps of two experts while the other
    layers stay; until nothing is gained. ``level`` times the variance of the ranks' loads over their mean, as the mean
    over the layers, counts against the share of steps that stay.
    """
    total = sum(one.sum() for one in steps)
    # What the square of a rank's load costs, in steps.
    costs = [
        level * float(total) * ranks / len(loads) / float(load.sum()) ** 2
        for load in loads
    ]

    def merit(owners: Owners) -> float:
        squares = (
            np.square(np.bincount(o, w, ranks)).sum()
            for o, w in zip(owners, loads, strict=True)
        )
        return share_that_stays(steps, owners) * float(total) - float(
            np.dot(costs, list(squares))
        )

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

    tried = (
        improved(random_owners([len(one) for one in loads], ranks, seed))
        for seed in range(starts)
    )
    return max(tried, key=merit)


def _swap(owner: np.ndarray, gain: np.ndarray, load: np.ndarray, cost: float) -> None:
    """Swap experts of one layer in place, the best two first, until no two gain."""
    more = load[:, None] - load  # of the one over the other
    while True:
        at_others = gain[:, owner]  # [the one, the other]
        found = (
            at_others
            + at_others.T
            - at_others.diagonal()[:, None]
            - at_others.diagonal()
        )
        of_rank = np.bincount(owner, load, gain.shape[1])[owner]
        found -= (
            2
            * cost
            * more
            * (more + of_rank - of_rank[:, None])
            * (owner[:, None] != owner)
        )
        one, other = np.unravel_index(found.argmax(), found.shape)
        if found[one, other] <= 1e-9 * max(1.0, gain.max()):
            return
        owner[[one, other]] = owner[[other, one]]


def slots_of(owners: Owners) -> list[list[int]]:
    """Of each layer the expert that every slot has: those of the first rank, then those of the next."""
    return [np.argsort(owner, kind="stable").tolist() for owner in owners]
