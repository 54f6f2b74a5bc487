"""Aggregates gradients of replicas by rules that tolerate faulty ones.

The gradients of ``p`` replicas are never all on one rank. Each rank gets one chunk of all gradients (all_to_all) and
computes the chunk's part of the ``p x p`` matrix of inner products, which is summed over ranks (all_reduce). From that
matrix follow the weights of every rule that is not coordinate-wise. The rank then applies the rule to its chunk and
gives the outcome to all (all_gather). So a rank sends as much as in a ring all-reduce, and ``p^2`` numbers.

A gradient with a number that is not finite is left out before any rule, and counts as one of the faulty.
"""

from math import inf

import torch
import torch.distributed as dist

from weft.parallel.units import all_gather
from weft.sync.aggregator import Aggregator

T = torch.Tensor

#: Elements of which products are made in float64 at a time.
PIECE = 1 << 20


@torch.no_grad()
def aggregated(
    vote: T, rule: Aggregator, faulty: int, group: dist.ProcessGroup
) -> tuple[T, list[bool]]:
    """Combine the gradients of all ranks of ``group`` by ``rule``; return the combined gradient and whose were used.

    ``vote``: this rank's gradient, ``[elements]``; ``faulty``: how many gradients may be faulty. A gradient with an
    element that is not finite is left out, and counts as one of the faulty ones. The second result says for each rank
    whether its gradient was used. The combined gradient is the same on all ranks to the last bit. Its elements are NaN
    if no rank's gradient was finite. Collective.
    """
    ranks, size = group.size(), vote.numel()
    padded = vote.new_zeros(ranks * -(-size // ranks))
    padded[:size] = vote
    chunks = torch.empty_like(padded)
    dist.all_to_all_single(chunks, padded, group=group)
    chunks = chunks.view(ranks, -1)
    gram = torch.zeros(ranks, ranks, dtype=torch.float64, device=vote.device)
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
        chunk = rule.combined(
            chunks[whole], gram[whole][:, whole].cpu(), max(0, faulty - left_out)
        )
    all_gather(padded, chunk.contiguous(), group=group)
    return padded[:size], whole.tolist()


def squared_distances(gram: T) -> T:
    """Return the squared distances between all pairs of gradients, ``[replicas, replicas]``.

    ``gram``: the inner products of the gradients, ``[replicas, replicas]``.
    """
    norms = gram.diag()
    return (norms[:, None] + norms[None] - 2 * gram).clamp(min=0)


def krum_scores(distances: T, faulty: int) -> T:
    """Return Krum's score of each gradient, ``[replicas]``; a small score means trustworthy (Blanchard et al. 2017).

    The score is the sum of the squared distances to the ``replicas - faulty - 2`` nearest gradients (at least one).
    ``distances``: squared distances, ``[replicas, replicas]``; ``faulty``: how many replicas may be faulty.
    """
    near = max(1, len(distances) - faulty - 2)
    others = distances + torch.diag(
        torch.full((len(distances),), inf, dtype=distances.dtype)
    )
    return others.sort(dim=1).values[:, :near].sum(1)


def mean_of(chosen: T, count: int) -> T:
    """Return weights ``[count]`` that average the gradients with the indices ``chosen``, and are 0 for all others."""
    return torch.zeros(count, dtype=torch.float64).index_fill_(
        0, chosen, 1 / len(chosen)
    )
