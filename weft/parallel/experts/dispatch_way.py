"""The interface of techniques that bring tokens to the experts of other ranks, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from weft.models.experts import Dispatcher
    from weft.parallel.experts.expert_ranks import ExpertRanks


class DispatchWay:
    """Interface of the technique kind ``dispatch``: makes the dispatcher of a mixture of experts.

    ``by_node``: whether the dispatcher treats ranks of the same node differently. ``weft verify --random`` then tries
    it only in layouts that state their nodes. ``copies``: whether ranks may lend each other the weights of their
    experts.
    """

    by_node: ClassVar[bool] = False
    copies: ClassVar[bool] = False

    def make(self, ranks: ExpertRanks) -> Dispatcher:
        """Return the dispatcher that brings tokens to the experts on ``ranks``, and results back."""
        raise NotImplementedError
