"""The interface of losses on pairs of answers, one of which is preferred."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    import torch

    from weft.data.batch import Pairs
    from weft.recipe import Loss

    T = torch.Tensor


class PairLoss:
    """Base class of losses of pairs of answers (``loss.kind``); a loss is built with the section ``[loss]``.

    A loss is a function of one value per answer: the sum of the log-probabilities of the answer's tokens, in float64. A
    subclass defines :meth:`of`, or :meth:`compared` in its place; all tensors are ``[pairs]``.

    Attributes:
        ``averaged``: whether the value of an answer is the mean over its tokens instead of the sum.
        ``has_reference``: whether the value that the reference model gives the answer is subtracted from its value.
        ``scores``: whether the value of an answer is a score from the model's scalar head, instead of a
            log-probability.
        ``smooths``: whether the loss uses ``loss.label_smoothing``.
        ``has_margin``: whether the loss uses ``loss.margin``.
        ``judged``: whether only the first answer of each pair is judged, as good (``margin`` 1) or bad (``margin`` -1).
            The second answer then belongs to another prompt.
        ``has_point``: whether the loss uses ``point``.
        ``point``: a number that the loss compares values with: the mean of :meth:`divergence` over the step's pairs, or
            0 if that mean is negative. If ``has_point`` is set, training sets it before the passes of each step.
    """

    averaged: ClassVar[bool] = False
    has_reference: ClassVar[bool] = True
    scores: ClassVar[bool] = False
    smooths: ClassVar[bool] = True
    has_margin: ClassVar[bool] = False
    judged: ClassVar[bool] = False
    has_point: ClassVar[bool] = False
    point: float = 0.0

    def __init__(self, settings: Loss) -> None:
        self.settings, self.beta = settings, settings.beta

    def __call__(self, sums: T, lengths: T, pairs: Pairs) -> T:
        """Return the losses of pairs.

        ``sums`` over the answers' tokens, and their ``lengths`` in tokens: ``[pairs, 2]``, with the chosen answer
        first.
        """
        import torch

        if self.has_reference:
            sums = sums - torch.from_numpy(pairs.reference).to(sums)
        if self.averaged:
            sums = sums / lengths
        margin = self.settings.margin + torch.from_numpy(pairs.margin).to(sums)
        return self.compared(sums[:, 0], sums[:, 1], margin)

    def compared(self, chosen: T, rejected: T, margin: T) -> T:
        """Return the loss of each pair from the values of the pair's two answers; all tensors are ``[pairs]``.

        ``margin``: by how much the chosen answer's value should be larger than the rejected one's.
        """
        return self.of(chosen - rejected, margin)

    def of(self, gap: T, margin: T) -> T:
        """Return the loss of each pair from the difference of its answers' values; all tensors are ``[pairs]``.

        ``gap``: the chosen answer's value minus the rejected one's. ``margin``: the gap that the pair should have.
        """
        raise NotImplementedError

    def smoothed(self, gap: T) -> T:
        """Return the logistic loss with smoothed labels, ``[pairs]``.

        ``gap``: the chosen answer's value minus the rejected one's. The loss is ``-(1 - s) log sigmoid(gap) - s log
        sigmoid(-gap)``, with ``s = loss.label_smoothing``.
        """
        from torch.nn.functional import logsigmoid

        wrong = self.settings.label_smoothing
        return -(1 - wrong) * logsigmoid(gap) - wrong * logsigmoid(-gap)

    def divergence(self, sums: T, lengths: T, pairs: Pairs) -> T:
        """Return the log-probability of each pair's second answer minus its log-probability under the reference model.

        ``sums`` and ``lengths``: log-probabilities and numbers of tokens of the answers, ``[pairs, 2]``. Returns
        ``[pairs]``.
        """
        import torch

        return (sums - torch.from_numpy(pairs.reference).to(sums))[:, 1]
