"""The interface of techniques that add up tensors over ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from weft.net.rank_links import RankLinks


class AllReduce:
    """Interface of the technique kind ``sum``: says which rank sends what to which others, so that all get the sum.

    Its methods get ``links``, the connections between the ranks.
    """

    def fits(self, links: RankLinks) -> bool:
        """Return whether ``layout.sum = "auto"`` measures this all-reduce between these ranks. It does not where
        another all-reduce sends the same.
        """
        return True

    def add(self, x: torch.Tensor, links: RankLinks) -> torch.Tensor:
        """Return the sum over all ranks of ``x``, a flat tensor in host memory that is not changed. All ranks get the
        same bits.
        """
        raise NotImplementedError
