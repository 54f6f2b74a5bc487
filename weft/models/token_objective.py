"""The interface of losses that are a function of all tokens of sampled answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

    from weft.data.batch import Batch
    from weft.layout.mesh import Mesh

    T = torch.Tensor


class Weighed(NamedTuple):
    """Loss of a batch and its derivatives.

    ``loss``: this rank's share of the loss. ``slopes``: derivative by each token's negative log-probability, or by each
    value of a critic, ``[tokens]``. ``entropies``: derivative by the entropy of each token's distribution,
    ``[tokens]``; None if the loss does not depend on it.
    """

    loss: T
    slopes: T
    entropies: T | None = None


class TokenObjective:
    """Base class of losses of sampled answers, for batches that have a :attr:`weft.data.batch.Batch.rollout`.

    Attributes:
        ``temperature``: number by which logits are divided before the softmax, as in sampling.
        ``known_logits``: function that gives the logits of tokens of the next batch, if they need not be computed;
            None: they must be. Its argument: indices of the tokens, int64 ``[rows]``, or None for all. It returns
            ``[rows, vocab]``, which may be overwritten, or None if a token has none.
    """

    temperature: float = 1.0
    known_logits: Callable[[T | None], T | None] | None = None

    @property
    def has_entropy(self) -> bool:
        """Whether the loss has a derivative by the entropies of the tokens' distributions."""
        return False

    @property
    def has_values(self) -> bool:
        """Whether the loss includes the loss of a critic's values, so that :meth:`weigh_values` is called."""
        return False

    def weigh(self, nll: T, entropy: T, batch: Batch, mesh: Mesh) -> Weighed:
        """Return this rank's share of the loss of ``batch``, and the loss's derivatives.

        ``nll``: negative log-probabilities of the labels of this rank's tokens, ``[tokens]``, equal on all ranks of
        ``tp``; 0 where there is no label. ``entropy``: entropies of the tokens' distributions, ``[tokens]``.
        """
        raise NotImplementedError

    def weigh_values(self, values: T, batch: Batch, mesh: Mesh) -> Weighed:
        """Return this rank's share of a critic's loss on ``batch``, and the loss's derivative by each value.

        ``values``: the critic's prediction before each label of this rank's tokens, float64 ``[tokens]``, equal on all
        ranks of ``tp``.
        """
        raise NotImplementedError
