"""The interface of techniques that add up tensors over ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from weft.net.rank_links import RankLinks


class AllReduce:
    """Interface of the technique kind ``sum``: an all-reduce over the ranks of ``tp``, by messages on the host.

    An implementation decides which rank sends which values to which other ranks. Its methods get ``links``, the
    connections between the ranks.
    """

    def fits(self, links: RankLinks) -> bool:
        """Return whether ``layout.sum = "auto"`` measures this all-reduce between the ranks of ``links``.

        An implementation returns False where it would send the same messages as another all-reduce.
        """
        return True

    def add(self, x: torch.Tensor, links: RankLinks) -> torch.Tensor:
        """Return the sum over all ranks of ``x``, a flat tensor in host memory, which stays unchanged.

        The result has the same bits on all ranks. ``links``: connections to the other ranks.
        """
        raise NotImplementedError
