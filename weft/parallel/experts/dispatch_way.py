"""The interface of ways to bring tokens to the experts of other ranks, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from weft.models.experts import Dispatcher
    from weft.parallel.experts.expert_ranks import ExpertRanks


class DispatchWay:
    """Makes the dispatcher of a mixture of experts.

    ``by_node``: the way treats ranks of a node in a way of their own, and is drawn only where nodes are known.
    ``copies``: ranks may give each other the weights of their experts.
    """

    by_node: ClassVar[bool] = False
    copies: ClassVar[bool] = False

    def make(self, ranks: ExpertRanks) -> Dispatcher:
        """Return the dispatcher among ``ranks``."""
        raise NotImplementedError
