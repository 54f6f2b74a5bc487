"""The interface of techniques that bring tokens to the experts of other ranks, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from weft.models.experts import Dispatcher
    from weft.models.paged import Pages
    from weft.models.spans import Span
    from weft.models.transformer import Transformer
    from weft.parallel.experts.expert_ranks import ExpertRanks


class DecodePass(Protocol):
    """Interface of what computes, on every rank that generates, the layers of steps in which texts get a token each.

    The ranks cache the keys and values of all tokens, each rank for itself. Where a token is computed in a layer is up
    to the pass.
    """

    def takes(self, spans: Sequence[Span]) -> bool:
        """Return whether the pass computes the new tokens ``spans`` of a step, all of them without adapters."""

    def run(self, row: Tensor, spans: Sequence[Span]) -> Tensor:
        """Compute the layers for the tokens of a step, and cache their keys and values on all ranks. Collective.

        ``row``: ids and positions, int64 ``[2, tokens]``; ``spans``: each token's text. Returns on the first rank the
        last block's output for all tokens, ``[1, tokens, embed]``; elsewhere it has no tokens.
        """

    def summary(self) -> str:
        """Return a line for the user about what has travelled between the ranks; "" if nothing was computed yet."""


class DispatchWay:
    """Interface of the technique kind ``dispatch``: makes the dispatcher of a mixture of experts.

    ``by_node``: whether the dispatcher treats ranks of the same node differently. ``weft verify --random`` then tries
    it only in layouts that state their nodes. ``copies``: whether ranks may lend each other the weights of their
    experts. ``unequal``: whether ranks may have different numbers of tokens in a pass, as they have in generation.
    ``whole_context``: whether ranks that generate cache all tokens each (:meth:`decode_pass`).
    """

    by_node: ClassVar[bool] = False
    copies: ClassVar[bool] = False
    unequal: ClassVar[bool] = False
    whole_context: ClassVar[bool] = False

    def make(self, ranks: ExpertRanks) -> Dispatcher:
        """Return the dispatcher that brings tokens to the experts on ``ranks``, and results back."""
        raise NotImplementedError

    def decode_pass(
        self, model: Transformer, pages: Sequence[Pages]
    ) -> DecodePass | None:
        """Return what computes the decode steps of ``model``, if every rank is to cache the tokens of all ranks.

        ``pages``: this rank's cache of each layer. None: the ranks share the tokens of the cache, and each computes its
        own.
        """
        return None
