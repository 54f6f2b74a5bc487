"""The loss of a critic, which predicts at every token of an answer the rewards that follow (Schulman et al. 2017)."""

import torch
import torch.nn.functional as F

from weft.data.batch import Batch
from weft.layout.boundary import (
    BY_DATA,
    V,
    declare,
    gather_tokens,
    share_of_sum,
    sum_over,
    untyped,
)
from weft.layout.mesh import Mesh
from weft.models.answer_loss import Objective
from weft.models.loss import with_gradient_of
from weft.models.numbers import wide
from weft.models.token_objective import TokenObjective

T = torch.Tensor


def value_loss(normed: T, head: T, batch: Batch, of: TokenObjective, mesh: Mesh) -> T:
    """Return the loss of a critic on the answers in ``batch``, a float64 scalar.

    ``normed``: outputs of the final norm, ``[rows, seq/cp/tp, embed]``; ``head``: weight of the critic's output, ``[1,
    embed]``; ``of``: the loss as a function of the values; ``mesh``: ranks that share the model.
    """
    # of the tokens that are here between blocks: [rows, seq/cp/tp, 1]; bfloat16 has too few digits for values
    dtype = wide(normed.dtype)
    values = F.linear(normed.to(dtype), head.to(dtype)).double()
    with torch.no_grad():
        whole = gather_tokens(values.detach(), mesh)  # [rows, seq/cp, 1]
    loss, slopes, _ = of.weigh_values(whole.flatten(), batch, mesh)
    with untyped():
        chunks = slopes.view(whole.shape).chunk(mesh.size("tp"), dim=1)
        own = chunks[mesh.rank("tp")]
    declare(own, mesh, **BY_DATA | {"tp": V})
    return with_gradient_of(
        loss,
        lambda: sum_over("tp", share_of_sum((values * own).sum(), mesh, tp=V), mesh),
    )


def shared_value_loss(
    normed: T, head: T, batch: Batch, of: Objective | None, mesh: Mesh
) -> T:
    """Return the loss of a critic that shares the policy's trunk. The arguments are those of :func:`value_loss`. The
    loss is 0, with gradients of 0, if ``of`` has no critic or the batch has no sampled answers, as in supervised
    steps.
    """
    if batch.rollout is not None and isinstance(of, TokenObjective) and of.has_values:
        return value_loss(normed, head, batch, of, mesh)
    nothing = (F.linear(normed, head).double() * 0).sum()
    return sum_over("tp", share_of_sum(nothing, mesh, tp=V), mesh)
