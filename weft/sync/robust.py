"""Aggregate gradients of replicas of which some may send garbage, by rules that tolerate it.

The gradients of ``p`` replicas are never all on one rank. Each rank gets one chunk of all gradients (all_to_all) and
computes the chunk's part of the ``p x p`` matrix of inner products, which is summed over ranks (all_reduce). From that
matrix follow the weights of every rule that is not coordinate-wise. The rank then applies the rule to its chunk and
gives the outcome to all (all_gather). So a rank sends as much as in a ring all-reduce, and ``p^2`` numbers.

A gradient with a number that is not finite is left out before any rule, and counts as one of the faulty.
"""

from collections.abc import Callable
from math import inf

import torch
import torch.distributed as dist

from weft.parallel.units import all_gather

T = torch.Tensor

#: A rule makes a chunk of the outcome of the replicas' chunks ``[replicas, elements]``, the inner products
#: ``[replicas, replicas]`` of the whole gradients in float64, and how many of the replicas may be faulty.
Rule = Callable[[T, T, int], T]

#: Elements of which products are made in float64 at a time.
PIECE = 1 << 20
#: Turns of the flag aggregator's and of the geometric median's reweighting, and when the latter's weights stand.
FLAG_TURNS, MEDIAN_TURNS, MEDIAN_STANDS = 5, 2000, 1e-13
#: Weight of the differences between gradients in the flag aggregator's subspace.
DIFFERENCES = 1.0


@torch.no_grad()
def aggregated(
    mine: T, rule: Rule, faulty: int, group: dist.ProcessGroup
) -> tuple[T, list[bool]]:
    """The outcome of ``rule`` for all ranks' gradients ``mine`` ``[elements]``, and which ranks' were used. Collective.

    The outcome is the same on all ranks to the last bit, and not a number if nobody's gradient was finite.
    """
    ranks, size = group.size(), mine.numel()
    padded = mine.new_zeros(ranks * -(-size // ranks))
    padded[:size] = mine
    chunks = torch.empty_like(padded)
    dist.all_to_all_single(chunks, padded, group=group)
    chunks = chunks.view(ranks, -1)
    gram = torch.zeros(ranks, ranks, dtype=torch.float64, device=mine.device)
    for piece in chunks.split(PIECE, dim=1):
        gram += piece.double() @ piece.double().T
    dist.all_reduce(gram, group=group)
    # so that who are each other's nearest are as good, and the first of them is chosen
    gram = (gram + gram.T) / 2
    whole = gram.diag().isfinite()
    left_out = int((~whole).sum())
    if left_out == ranks:
        chunk = torch.full_like(chunks[0], torch.nan)
    else:
        chunk = rule(
            chunks[whole], gram[whole][:, whole].cpu(), max(0, faulty - left_out)
        )
    all_gather(padded, chunk.contiguous(), group=group)
    return padded[:size], whole.tolist()


def weighted(weights: Callable[[T, int], T]) -> Rule:
    """The rule that is a weighted sum of the gradients, by weights that follow from their inner products."""

    def rule(chunks: T, gram: T, faulty: int) -> T:
        return weights(gram, faulty).to(chunks) @ chunks

    return rule


def squared_distances(gram: T) -> T:
    """The squared distances between all pairs of gradients, ``[replicas, replicas]``."""
    norms = gram.diag()
    return (norms[:, None] + norms[None] - 2 * gram).clamp(min=0)


def krum_scores(distances: T, faulty: int) -> T:
    """Krum's scores: for each gradient the sum of squared distances to its nearest ones, so many of them as are sure to
    be right (Blanchard et al. 2017)."""
    near = max(1, len(distances) - faulty - 2)
    others = distances + torch.diag(
        torch.full((len(distances),), inf, dtype=distances.dtype)
    )
    return others.sort(dim=1).values[:, :near].sum(1)


def mean_of(chosen: T, count: int) -> T:
    """The weights, of ``count`` gradients, that make the mean of the ``chosen`` ones."""
    return torch.zeros(count, dtype=torch.float64).index_fill_(
        0, chosen, 1 / len(chosen)
    )


def krum(gram: T, faulty: int) -> T:
    """The one gradient that is nearest to its neighbours."""
    return mean_of(
        krum_scores(squared_distances(gram), faulty).argmin()[None], len(gram)
    )


def multi_krum(gram: T, faulty: int) -> T:
    """The mean of the ``p - faulty - 2`` best of Krum's."""
    best = krum_scores(squared_distances(gram), faulty).argsort(stable=True)
    return mean_of(best[: max(1, len(gram) - faulty - 2)], len(gram))


def bulyan(chunks: T, gram: T, faulty: int) -> T:
    """Of what Krum chooses in turn, in each coordinate the mean of those around the median (El Mhamdi et al. 2018)."""
    distances, left, chosen = squared_distances(gram), list(range(len(gram))), []
    for _ in range(max(1, len(gram) - 2 * faulty)):
        best = int(krum_scores(distances[left][:, left], faulty).argmin())
        chosen.append(left.pop(best))
    among = chunks[chosen].sort(dim=0).values  # [chosen, elements]
    lower, upper = among[(len(among) - 1) // 2], among[len(among) // 2]
    nearest = (
        (among - (lower + upper) / 2)
        .abs()
        .argsort(dim=0, stable=True)[: max(1, len(among) - 2 * faulty)]
    )
    return among.gather(0, nearest).mean(0)


def trimmed_mean(chunks: T, gram: T, faulty: int) -> T:
    """In each coordinate the mean without the ``faulty`` largest and smallest (Yin et al. 2018)."""
    among = chunks.sort(dim=0).values
    return among[faulty : len(among) - faulty].mean(0)


def geometric_median(gram: T, faulty: int) -> T:
    """The point whose distances to all add up to the least, by Weiszfeld's turns (Pillutla et al. 2019).

    It is a weighted mean, and its distance to each gradient follows from the inner products.
    """
    count = len(gram)
    weights = torch.full((count,), 1 / count, dtype=torch.float64)
    least = 1e-12 * gram.diag().median().sqrt().clamp(min=1e-300)
    for _ in range(MEDIAN_TURNS):
        inner = gram @ weights
        distances = (
            (gram.diag() - 2 * inner + weights @ inner)
            .clamp(min=0)
            .sqrt()
            .clamp(min=least)
        )
        before, weights = weights, (1 / distances) / (1 / distances).sum()
        if (weights - before).abs().max() < MEDIAN_STANDS:
            break
    return weights


def flag(gram: T, faulty: int) -> T:
    """The mean of the gradients' directions within a subspace that most of them agree on (Almasi et al. 2024).

    The subspace has about half as many dimensions as there are gradients, and the least sum of roots of what it leaves
    out of each direction, and of each direction of a difference. It is found by weighting these again and again; its
    basis is a sum of gradients, so that inner products are all that is needed.

    The authors' program forgets how long gradients are, and divides by the number of dimensions: the outcome is no
    gradient any more. Here it has the gradients' median length, so that equal gradients come out as they went in, and a
    gradient that is scaled up does not count for more.
    """
    count, rank = len(gram), len(gram) // 2 + 1
    norms = gram.diag().sqrt()
    lengths = norms.clamp(min=1e-300)
    cosines = gram / lengths[:, None] / lengths[None]
    apart = squared_distances(cosines)  # between directions
    by_own, by_pair = torch.ones(count, dtype=torch.float64), torch.ones_like(cosines)
    sums = seen = torch.empty(0)
    for _ in range(FLAG_TURNS):
        pairs = (
            DIFFERENCES
            / (count * max(1, count - 1))
            * by_pair
            / apart.clamp(min=1e-300)
        )
        pairs = torch.where(apart > 1e-20, pairs, 0.0)
        spread = torch.diag(by_own + 2 * pairs.sum(1)) - 2 * pairs
        sums = subspace(cosines, spread, rank)
        # [replicas, rank], what the subspace has of each direction
        seen = cosines @ sums
        within = seen @ seen.T
        by_own = ((within.diag() - 1).abs() + 1e-7).rsqrt()
        by_pair = (
            (squared_distances(within) / apart.clamp(min=1e-300) - 1).abs() + 1e-7
        ).rsqrt()
    return sums @ seen.mean(0) * norms.median() / lengths


def subspace(inner: T, spread: T, rank: int) -> T:
    """An orthonormal basis of what some vectors with these ``inner`` products agree on, ``[vectors, rank]``.

    With the vectors as columns of ``X`` it is the first ``rank`` left singular vectors of ``X C``, where ``spread`` is
    ``C C^T``, and given as the sums of vectors that they are.
    """
    values, vectors = torch.linalg.eigh(spread)
    root = vectors * values.clamp(min=0).sqrt() @ vectors.T
    # squared singular values, the smallest first
    squares, turned = torch.linalg.eigh(root @ inner @ root)
    squares, turned = squares[-rank:], turned[:, -rank:]
    found = squares > 1e-12 * squares[-1]
    return root @ turned[:, found] / squares[found].sqrt()


#: By their names in a recipe; :attr:`weft.recipe.Resilience.replicas_needed` says from how many replicas on.
RULES: dict[str, Rule] = {
    "flag": weighted(flag),
    "krum": weighted(krum),
    "multi-krum": weighted(multi_krum),
    "bulyan": bulyan,
    "geometric-median": weighted(geometric_median),
    "trimmed-mean": trimmed_mean,
}
