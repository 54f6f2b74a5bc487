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
    """Interface of the computation of a model's layers, over several ranks, in the decode steps of generation.

    In a decode step each text gets one token. Every rank that generates caches the keys and values of all tokens. The
    implementation decides which rank computes a token in a layer.
    """

    def takes(self, spans: Sequence[Span]) -> bool:
        """Return whether :meth:`run` can compute a step whose new tokens are ``spans``.

        The caller asks only for steps in which no text uses an adapter.
        """

    def run(self, row: Tensor, spans: Sequence[Span]) -> Tensor:
        """Compute the layers for the tokens of a step, and cache their keys and values on all ranks. Collective.

        ``row``: ids and positions, int64 ``[2, tokens]``; ``spans``: each token's text. Returns on the first rank the
        last block's output for all tokens, ``[1, tokens, embed]``; elsewhere it has no tokens.
        """

    def summary(self) -> str:
        """Return a line for the user about the bytes that have travelled between the ranks; "" if nothing was computed
        yet.
        """


class DispatchWay:
    """Interface of the technique kind ``dispatch``: makes the dispatcher of a mixture of experts.

    ``by_node``: whether the dispatcher treats ranks of the same node differently. ``weft verify --random`` then tries
    it only in layouts that state their nodes. ``copies``: whether ranks may lend each other the weights of their
    experts. ``unequal``: whether ranks may have different numbers of tokens in a pass, as they have in generation.
    ``whole_context``: whether each rank that generates caches the tokens of all ranks (:meth:`decode_pass`).
    """

    by_node: ClassVar[bool] = False
    copies: ClassVar[bool] = False
    unequal: ClassVar[bool] = False
    whole_context: ClassVar[bool] = False

    def make(self, ranks: ExpertRanks) -> Dispatcher:
        """Return the dispatcher that sends tokens to the experts on ``ranks``, and the experts' results back."""
        raise NotImplementedError

    def decode_pass(
        self, model: Transformer, pages: Sequence[Pages]
    ) -> DecodePass | None:
        """Return the object that computes the decode steps of ``model``, if every rank caches the tokens of all ranks.

        ``pages``: this rank's cache of each layer. Returns None if the ranks divide the cached tokens among them, and
        each rank computes its own tokens.
        """
        return None
