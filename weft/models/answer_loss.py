"""The loss of answers, whose factor at each token depends on the log-probabilities of the answer's tokens.

The output layer runs once for the log-probabilities. The gradients follow when the factor of every token is known: the
logits of one chunk of tokens are kept for them, and those of all others are computed again. Losses of pairs
(:mod:`weft.models.preference`) and policy losses (:mod:`weft.models.policy_loss`) are such losses.
"""

from collections.abc import Callable

import torch

from weft.data.batch import IGNORE, Batch
from weft.layout.boundary import BY_DATA, declare, untyped
from weft.layout.mesh import Mesh
from weft.models.logit_kernel import KeptLogits
from weft.models.loss import (
    labelled_rows,
    linear_cross_entropy,
    scale_of,
    with_gradient_of,
)
from weft.models.preference import PairObjective, pair_losses
from weft.models.token_objective import TokenObjective, Weighed
from weft.models.token_scores import token_scores

T = torch.Tensor

#: The loss of answers: of pairs, or a policy's.
Objective = PairObjective | TokenObjective

#: Function that gives known logits of tokens (:attr:`weft.models.token_objective.TokenObjective.known_logits`).
Known = Callable[[T | None], T | None] | None


def weigh(
    nll: T, batch: Batch, of: Objective | None, mesh: Mesh, entropy: T | None = None
) -> Weighed:
    """Return this rank's share of a batch's loss, and the loss's derivative by each element of ``nll``, ``[tokens]``.

    ``nll``: negative log-probabilities of the labels of this rank's tokens, ``[tokens]``, equal on all ranks of ``tp``;
    0 where there is no label. ``of``: the loss of answers. If it is None or the batch has no answers, the loss is the
    weighted sum of ``nll``. ``entropy``: entropies of the tokens' distributions, ``[tokens]``, which a policy loss
    needs. The loss is the sum of the shares of all ranks with different tokens.
    """
    if batch.rollout is not None and isinstance(of, TokenObjective):
        assert entropy is not None
        return of.weigh(nll, entropy, batch, mesh)
    counts = None if batch.weights is None else batch.weights.flatten()
    scale = scale_of(batch.labels.flatten(), counts, nll.dtype)[:, 0]
    if batch.paired is None or of is None:
        return Weighed((nll * scale).double().sum(), scale)
    assert batch.documents is not None and not isinstance(of, TokenObjective)
    loss, slopes = pair_losses(
        -nll.double(), scale.double(), batch.documents.flatten(), batch, of, mesh, "cp"
    )
    return Weighed(loss, -slopes)


def answer_loss(
    hidden: T,
    weight: T,
    batch: Batch,
    first: int,
    chunk: int,
    of: Objective,
    mesh: Mesh,
) -> T:
    """Return the loss of the answers in ``batch``, from the log-probabilities of their tokens: a float64 scalar.

    ``of``: a loss of pairs of answers, or the loss of a policy. The other arguments are those of
    :func:`weft.models.loss.linear_cross_entropy`.
    """
    labels = batch.labels.flatten()
    with_entropy = isinstance(of, TokenObjective)
    known: Known = None
    if isinstance(of, TokenObjective):
        known, of.known_logits = of.known_logits, None
        if of.temperature != 1:
            hidden = hidden / of.temperature
    learns = torch.is_grad_enabled()
    with torch.no_grad(), untyped():
        rows = labelled_rows(labels)
        some = slice(None) if rows is None else rows
        kept = KeptLogits()
        logits = known(rows) if known is not None else None
        scored = token_scores(
            hidden[some] if logits is None else logits, weight if logits is None else None, labels[some], first, chunk,
            mesh, with_entropy, kept if learns else None,
        )  # fmt: skip
        values = torch.zeros(
            len(labels), scored.shape[1], dtype=torch.float64, device=labels.device
        )
        values[some] = scored
        values = torch.where((labels != IGNORE)[:, None], values, 0)
        nll, entropy = -values[:, 0], values[:, 2] if with_entropy else None
    loss, scale, entropies = weigh(
        declare(nll, mesh, **BY_DATA), batch, of, mesh, entropy
    )
    return with_gradient_of(
        loss,
        lambda: linear_cross_entropy(
            hidden, weight, labels, first, chunk, mesh, scale, entropies, kept
        ),
    )
