"""When rounds of islands begin and end, which parameters they exchange, and which islands exchange with each other."""

from collections import Counter
from collections.abc import Sequence

from weft.recipe import Sync
from weft.sync.payloads import shared_permutation


def begins(step: int, fragment: int, how: Sync) -> bool:
    """Return whether a round of the fragment with number ``fragment`` ends after ``step``, and a new one begins.

    A fragment is a subset of the parameters; fragments are exchanged one after another, after different steps. A round
    is the time between two exchanges of the same fragment. Steps are counted from 1. ``how``: the recipe's section
    ``[sync]``.
    """
    return step > 0 and (step - how.every * fragment // how.fragments) % how.every == 0


def fragment_of(name: str, count: int) -> int:
    """Return the number of the fragment of the model, of ``count`` fragments, to which the parameter ``name`` belongs.

    Blocks of the model are assigned in turn, so that each fragment has early and late blocks.
    """
    kind, _, rest = name.partition(".")
    return (int(rest.partition(".")[0]) + 1) % count if kind == "blocks" else 0


def partners(island: int, among: Sequence[int], how: Sync, number: int) -> list[int]:
    """Return the numbers of the islands with which ``island`` exchanges in exchange ``number``, itself included.

    ``among``: the islands that are present; ``how``: the recipe's section ``[sync]``. ``number``: the number of the
    exchange since the run began. If islands exchange in random pairs, the pairs follow from this number, so that all
    islands draw the same pairs.
    """
    count, me = len(among), list(among).index(island)
    if how.partner == "ring":
        return sorted({among[(me + step) % count] for step in (-1, 0, 1)})
    if how.partner == "graph":
        return sorted(
            {
                island,
                *(
                    other
                    for edge in how.graph
                    if island in edge
                    for other in edge
                    if other in among
                ),
            }
        )
    if how.partnership == "all":
        return list(among)
    order = shared_permutation(count, number).tolist()
    first = order.index(me) // 2 * 2
    return sorted(among[i] for i in order[first : first + 2])


def shares(island: int, members: Sequence[int], how: Sync) -> list[float]:
    """Return the weights of ``members`` in the mean that ``island``, one of them, computes; the weights add up to 1.

    ``how``: the recipe's section ``[sync]``. If islands exchange along the edges of a graph, they are Metropolis
    weights: both ends of an edge give each other the same weight. The mean of the parameters over all islands then
    stays the same, even if islands have different numbers of edges (Xiao & Boyd 2004).
    """
    if how.partner != "graph":
        return [1 / len(members)] * len(members)
    degree = Counter(
        other for edge in {tuple(sorted(edge)) for edge in how.graph} for other in edge
    )
    weights = {
        other: 1 / (1 + max(degree[island], degree[other]))
        for other in members
        if other != island
    }
    return [weights.get(other, 1 - sum(weights.values())) for other in members]
