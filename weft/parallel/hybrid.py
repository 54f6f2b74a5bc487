"""Attention in steps whose documents are placed by length: it runs only over the ranks that share a pass.

:mod:`weft.parallel.document_balance` makes the plan. Ranks run different passes, and unequal numbers of them
(ByteScale, Ge et al. 2025, 2502.21231), so no rank inside a pass may wait for a rank outside of it. Parameters are
gathered before the first pass, and gradients are reduced in the last pass, which no two ranks share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from weft.errors import WeftError
from weft.models.attention import Attend, T, local_attention
from weft.models.transformer import Block, Transformer
from weft.parallel.context.attend import across

if TYPE_CHECKING:
    from weft.data.batch import Batch, PassGroup
    from weft.layout.mesh import Mesh


class HybridAttention:
    """Attention whose ranks change from pass to pass, as a plan of document lengths says (``layout.balance``).

    The plan gives each pass a group of ranks, which compute it together. ``group`` (attribute): names these ranks;
    :func:`share_pass` sets it before each pass. If ``group`` is None, the pass is not planned. The attention ``static``
    computes it, over the ranks that the layout gives.
    """

    def __init__(self, mesh: Mesh, static: Attend) -> None:
        self.static, self.scheme = static, mesh.layout.context
        self.ranks = mesh.data_ranks
        self.group: PassGroup | None = None

    def __call__(self, q: T, k: T, v: T, cu_seqlens: T, window: int = 0) -> T:
        group = self.group
        if group is None:
            return self.static(q, k, v, cu_seqlens, window)
        if len(group.peers) == 1:
            return local_attention(q, k, v, cu_seqlens, window)
        peers = [self.ranks[p] for p in group.peers]
        return across(
            q, k, v, cu_seqlens, self.scheme, peers, group.index, group.lengths, window
        )


def share_pass(model: Transformer, group: PassGroup | None) -> None:
    """Set the ranks over which the model's attention runs from now on.

    ``group``: the ranks that share the next pass by the plan of document lengths; None: the ranks of the layout.
    """
    for block in model.blocks.values():
        assert isinstance(block, Block)
        if isinstance(block.attention.attend, HybridAttention):
            block.attention.attend.group = group
            return


@torch.no_grad()
def check_plan(batches: Sequence[Batch], mesh: Mesh) -> None:
    """Check that the ``batches`` of all ranks follow the same plan of a step, by the plans' checksums. Collective.

    Raises :class:`WeftError` on all ranks if plans differ, as ranks would otherwise wait for each other for ever.
    """
    group = batches[0].group
    assert group is not None
    both = torch.tensor([group.plan, -group.plan], device=mesh.device)
    dist.all_reduce(both, dist.ReduceOp.MAX, group=mesh.step_group)
    if both[0] != -both[1]:
        raise WeftError(
            "the ranks have planned the step differently: they see other data, or run other versions"
        )
