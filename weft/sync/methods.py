"""How islands agree on one model: what each sends at the end of a round, and what it does with the result.

Every method is a row of :data:`METHODS`: two functions on flat vectors. Parameters are ``theta``. What outlasts a round
is in slots, such as ``anchor``, the parameters that all islands had when the round began. The *difference* is
``anchor`` minus ``theta``: what the island has learned since, with the sign of a gradient. An *answer* is the mean of
what was sent, over the islands that took part. :mod:`weft.train.islands` decides when rounds begin and end.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from weft.recipe import Sync
from weft.sync.compress import shared_permutation

T = torch.Tensor
Slots = Mapping[str, T]


class Method(NamedTuple):
    """``sent(theta, slots)`` is what an island sends at the end of a round; ``applied(theta, slots, answer, how,
    islands)`` returns its next parameters.

    ``slots`` names the slots that the method needs, which ``applied`` changes in place. The answer comes as many steps
    later as the recipe says. That of a ``late`` method is applied when the next round ends; in the first it is zeros.
    ``shares``: all islands have the same anchor and momentum between two rounds.
    """

    slots: tuple[str, ...]
    sent: Callable[[T, Slots], T]
    applied: Callable[[T, Slots, T, Sync, int], T]
    late: bool = False
    shares: bool = True


def difference(theta: T, slots: Slots) -> T:
    """How far the parameters have come in this round, with the sign of a gradient."""
    return slots["anchor"] - theta


def average(theta: T, slots: Slots, answer: T, how: Sync, islands: int) -> T:
    """The mean of all parameters."""
    slots["anchor"].sub_(answer)
    return slots["anchor"]


def gossip(theta: T, slots: Slots, answer: T, how: Sync, islands: int) -> T:
    """The mean of the parameters of some islands, who need not have begun with the same."""
    return answer


def nesterov(theta: T, slots: Slots, answer: T, how: Sync, islands: int) -> T:
    """Stochastic gradient descent with Nesterov's momentum by the mean difference (DiLoCo, Douillard et al. 2023)."""
    slots["outer"].mul_(how.momentum).add_(answer)
    slots["anchor"].sub_(how.lr * (answer + how.momentum * slots["outer"]))
    return slots["anchor"]


def streaming(theta: T, slots: Slots, answer: T, how: Sync, islands: int) -> T:
    """The same for a fragment, mixed with what the island has learned meanwhile (Douillard et al. 2025)."""
    return torch.lerp(nesterov(theta, slots, answer, how, islands), theta, how.mix)


def eager(theta: T, slots: Slots, answer: T, how: Sync, islands: int) -> T:
    """The same by the own difference of this round and those of the others in the last (Kale et al. 2025)."""
    own = difference(theta, slots)
    both = answer + (own - slots["own"]) / islands
    slots["own"].copy_(own)
    return nesterov(theta, slots, both, how, islands)


def co2(theta: T, slots: Slots, answer: T, how: Sync, islands: int) -> T:
    """Momentum on the last round's differences, made smaller for being late and clipped (CO2, Sun et al. 2024)."""
    slots["outer"].mul_(how.momentum).add_(answer / how.penalty).clamp_(
        -how.clip, how.clip
    )
    slots["anchor"].sub_(how.lr * slots["outer"])
    return slots["anchor"]


def difference_and_anchor(theta: T, slots: Slots) -> T:
    return torch.cat((difference(theta, slots), slots["anchor"]))


def noloco(theta: T, slots: Slots, answer: T, how: Sync, islands: int) -> T:
    """Momentum by what two islands have learned, and how far their anchors are (NoLoCo, Kolehmainen et al. 2025)."""
    learned, anchor = answer.chunk(2)
    slots["outer"].mul_(how.momentum).sub_(how.lr * learned).add_(
        how.lr * (anchor - slots["anchor"])
    )
    slots["anchor"].add_(slots["outer"])
    return slots["anchor"]


METHODS = {
    "average": Method(("anchor",), difference, average),
    "gossip": Method((), lambda theta, slots: theta.clone(), gossip, shares=False),
    "nesterov": Method(("anchor", "outer"), difference, nesterov),
    "streaming": Method(("anchor", "outer"), difference, streaming),
    "eager": Method(
        ("anchor", "outer", "own"), difference, eager, late=True, shares=False
    ),
    "co2": Method(("anchor", "outer"), difference, co2, late=True),
    "noloco": Method(("anchor", "outer"), difference_and_anchor, noloco, shares=False),
}


def method_of(how: Sync) -> Method:
    return METHODS[
        "gossip" if how.update == "average" and how.partner != "all" else how.update
    ]


def begins(step: int, fragment: int, how: Sync) -> bool:
    """Whether a round of a fragment ends, and the next begins, after ``step`` (from 1)."""
    return step > 0 and (step - how.every * fragment // how.fragments) % how.every == 0


def fragment_of(name: str, count: int) -> int:
    """Which of ``count`` fragments a parameter is in. Blocks take turns: each fragment has early and late ones."""
    kind, _, rest = name.partition(".")
    return (int(rest.partition(".")[0]) + 1) % count if kind == "blocks" else 0


def partners(island: int, among: Sequence[int], how: Sync, number: int) -> list[int]:
    """The islands with which ``island`` exchanges in exchange ``number``, itself included.

    ``among``: the islands that are there. Random pairs follow from the number, so that all islands draw the same.
    """
    count, me = len(among), list(among).index(island)
    if how.partner == "ring":
        return sorted({among[(me + step) % count] for step in (-1, 0, 1)})
    if how.partner == "graph":
        return sorted(
            {
                island,
                *(
                    one
                    for edge in how.graph
                    if island in edge
                    for one in edge
                    if one in among
                ),
            }
        )
    if how.partner != "pairs" and how.update != "noloco":
        return list(among)
    order = shared_permutation(count, number).tolist()
    first = order.index(me) // 2 * 2
    return sorted(among[i] for i in order[first : first + 2])


def shares(island: int, members: Sequence[int], how: Sync) -> list[float]:
    """The weights of ``members`` in the mean that ``island``, one of them, computes; they add up to 1.

    In a graph they are Metropolis weights: both ends of an edge give each other the same weight, so that the mean over
    all islands does not change, however many edges each has (Xiao & Boyd 2004).
    """
    if how.partner != "graph":
        return [1 / len(members)] * len(members)
    degree = Counter(
        one for edge in {tuple(sorted(edge)) for edge in how.graph} for one in edge
    )
    found = {
        one: 1 / (1 + max(degree[island], degree[one]))
        for one in members
        if one != island
    }
    return [found.get(one, 1 - sum(found.values())) for one in members]


def shared_slots(how: Sync) -> tuple[str, ...]:
    """Which slots are the same on all islands between two rounds; none where no two need to have the same."""
    method = method_of(how)
    return (
        tuple(name for name in method.slots if name in ("anchor", "outer"))
        if method.shares
        else ()
    )
