"""Losses on pairs of answers, one of which is preferred, by log-probabilities or by a reward model's scores.

Every loss is a function of one value per answer, a sum over the answer's tokens. :func:`pair_losses` computes the sums,
on whatever ranks the tokens are, and returns the loss and its derivative by each token's value. The rest is an ordinary
weighted sum over tokens, as in cross entropy.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F

from weft.data.batch import IGNORE, Batch, Pairs
from weft.layout.boundary import BY_DATA, I, V, declare, share_of_sum, sum_over, untyped
from weft.layout.mesh import Mesh
from weft.models.loss import with_gradient_of
from weft.recipe import Loss

T = torch.Tensor

#: The loss of every pair, ``[pairs]``, from the sums over the answers' tokens and the numbers of these tokens, both
#: ``[pairs, 2]`` with the chosen answer first.
PairObjective = Callable[[T, T, Pairs], T]


def needs_reference(settings: Loss) -> bool:
    """Return whether the loss in ``settings`` compares with the log-probabilities of a reference model."""
    return settings.of_pairs and bool(settings.pair_loss.has_reference)


def objective(settings: Loss) -> PairObjective | None:
    """Return the loss of pairs of answers that ``loss.kind`` names; None if it names a loss of tokens.

    ``settings``: the section ``[loss]``.
    """
    loss: PairObjective | None = settings.pair_loss and settings.pair_loss(settings)
    return loss


def pair_losses(
    values: T,
    counts: T,
    documents: T,
    batch: Batch,
    of: PairObjective,
    mesh: Mesh,
    *axes: str,
) -> tuple[T, T]:
    """Return this rank's share of the loss of the pairs in ``batch``, and its derivative by each of ``values``.

    An answer's value is the sum of its tokens' ``values``, each times the token's factor in ``counts``.

    Args:
        ``values``: a number for each token of this rank, such as its log-probability: ``[tokens]``, float64.
        ``counts``: factor of each token, ``[tokens]``, float64.
        ``documents``: index of the document of each token, ``[tokens]``.
        ``batch``: the batch with the pairs.
        ``of``: function that computes the loss of pairs from the answers' values.
        ``mesh``: the layout over ranks.
        ``axes``: mesh axes over which the tokens of a row are cut, so that values are summed over their ranks.
    """
    rows = batch.paired
    assert rows is not None
    with untyped():
        # of all segments, and last of padding
        sums = values.new_zeros(len(batch.cu_seqlens), 2)
        segment = documents % len(sums)
        sums.index_add_(0, segment, torch.stack((values * counts, counts), dim=1))
        for axis in axes:
            if mesh.size(axis) > 1:
                dist.all_reduce(sums, group=mesh.group(axis))
        paired = torch.from_numpy(rows.segments).to(sums.device)
        summed, lengths = sums[paired].view(-1, 2, 2).unbind(-1)  # [pairs, 2] each
        weight = torch.from_numpy(rows.pairs.weight).to(sums)
        with torch.enable_grad():
            summed = summed.clone().requires_grad_()
            loss = (of(summed, lengths, rows.pairs) * weight).sum()
            (slopes,) = torch.autograd.grad(loss, summed)
        by_segment = sums.new_zeros(len(sums)).index_copy_(0, paired, slopes.flatten())
        shares = loss.detach() * rows.counted, by_segment[segment] * counts
    return declare(shares[0], mesh, **BY_DATA | {"tp": I}), declare(
        shares[1], mesh, **BY_DATA | dict.fromkeys(axes, V)
    )


def reward_loss(normed: T, head: T, batch: Batch, of: PairObjective, mesh: Mesh) -> T:
    """Return the loss of the pairs in ``batch``, from the score that the model's scalar head gives each answer.

    The score is read at the last token of the answer, the only token with a label. ``normed``: outputs of the final
    norm, ``[rows, seq/cp/tp, embed]``; ``head``: weight of the scalar head, ``[1, embed]``; ``of``: function that
    computes the loss of pairs; ``mesh``: ranks that share the model.
    """
    assert batch.documents is not None
    # of the tokens that are here between blocks
    scores = F.linear(normed.flatten(0, 1), head)[:, 0].double()
    with untyped():
        here = (
            x.chunk(mesh.size("tp"), dim=1)[mesh.rank("tp")].flatten()
            for x in (batch.labels, batch.documents)
        )
        labels, documents = here
        last = (labels != IGNORE).double()
    loss, slopes = pair_losses(
        scores.detach(), last, documents, batch, of, mesh, "cp", "tp"
    )
    return with_gradient_of(
        loss,
        lambda: sum_over("tp", share_of_sum((scores * slopes).sum(), mesh, tp=V), mesh),
    )
