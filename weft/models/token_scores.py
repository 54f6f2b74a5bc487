"""Scores of tokens' labels under the output layer, such as their log-probabilities, computed in chunks of tokens."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import TYPE_CHECKING

import torch

from weft.models.fused import times
from weft.models.invariant import is_invariant
from weft.models.logit_kernel import kernel_serves_logits, measured_logits
from weft.models.loss import (
    entropy_of_shares,
    from_shares,
    rows_in_cache,
    vocabulary_group,
)
from weft.models.numbers import wide

if TYPE_CHECKING:
    import torch.distributed as dist

    from weft.layout.mesh import Mesh

T = torch.Tensor


@torch.no_grad()
def token_scores(
    hidden: T,
    weight: T | None,
    labels: T,
    first: int,
    chunk: int,
    mesh: Mesh,
    with_entropy: bool = False,
    kept: MutableMapping[int, T] | None = None,
) -> T:
    """Return two scores of every token's label, float64 ``[tokens, 2]``.

    The first score is the label's log-probability; the second is 1 if no other token is likelier, else 0.
    ``with_entropy``: whether a third score is added, the entropy of the distribution. ``hidden``: ``[tokens, embed]``,
    or the logits if ``weight`` is None; ``weight``: rows of the output layer from row ``first`` on, ``[vocab/tp,
    embed]``; ``labels``: ``[tokens]``, none missing; ``chunk``: number of tokens whose logits are computed at a time;
    ``mesh``: ranks that share the model. ``kept``: mapping that gets the logits of the first chunk, under 0, for
    :func:`weft.models.loss.linear_cross_entropy`; those of all chunks, each under its first token, if ``weight`` is
    None.
    """
    group = vocabulary_group(mesh)
    columns = 3 if with_entropy else 2
    scores = torch.empty(
        len(hidden), columns, dtype=torch.float64, device=hidden.device
    )
    for start in range(0, len(hidden), chunk):
        at = slice(start, start + chunk)
        logits = hidden[at]
        if weight is not None:
            logits = times(logits, weight)
        logits = logits.to(wide(logits.dtype))  # [chunk, vocab/tp]
        scores[at] = _logit_scores(logits, labels[at], first, group, with_entropy)
        if kept is not None and (weight is None or not start):
            kept[start] = logits
        del logits  # before the next chunk's
    return scores


def _logit_scores(
    logits: T,
    labels: T,
    first: int,
    group: dist.ProcessGroup | None,
    with_entropy: bool,
) -> T:
    """Return the scores of :func:`token_scores` from ``logits`` ``[tokens, vocab/tp]``, the columns from ``first`` on
    of all logits. ``labels``: ``[tokens]``. ``group``: ranks that share the columns; None: they are all here.
    """
    whole = group is None and not first
    if whole and not is_invariant() and kernel_serves_logits(logits):
        measured = measured_logits(logits, labels)
        lse, mean, top, target = measured.unbind(1)
        columns = [target - lse, (target >= top).double(), lse - mean]
        return torch.stack(columns[: 2 + with_entropy], 1)
    here = ((labels >= first) & (labels < first + logits.shape[1]))[:, None]
    index = torch.where(here, labels[:, None] - first, 0)
    target = torch.where(here, logits.gather(1, index), 0)
    own = torch.cat(
        [softmax_statistics(logits[at]) for at in rows_in_cache(logits, group)]
    )
    shares = from_shares(torch.cat((own, target), dim=1), group)
    lses, means, tops, targets = shares.split(1, dim=-1)  # each [tp, tokens, 1]
    target = targets.sum(0)
    likelihood = target - lses.logsumexp(0)
    if group is None and is_invariant():  # in the sampler's order of additions
        likelihood = logits.log_softmax(-1).gather(1, index)
    scores = [likelihood, target >= tops.amax(0)]
    if with_entropy:
        scores.append(entropy_of_shares(lses, means))
    return torch.cat([each.double() for each in scores], dim=1)


def softmax_statistics(logits: T) -> T:
    """Return three numbers of each row of ``logits`` ``[rows, n]``: its log-sum-exp, the mean of its values under their
    softmax, and the largest value. ``[rows, 3]``.
    """
    top = logits.amax(-1, keepdim=True)
    below = logits - top
    weights = below.exp()
    total = weights.sum(-1, keepdim=True)
    mean = weights.mul_(below).sum(-1, keepdim=True) / total
    return torch.cat((top + total.log(), top + mean, top), dim=1)
