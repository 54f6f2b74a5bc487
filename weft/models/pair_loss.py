"""The interface of losses of pairs of answers, of which one is preferred."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    import torch

    from weft.data.batch import Pairs
    from weft.recipe import Loss

    T = torch.Tensor


class PairLoss:
    """The loss of pairs of answers (``loss.kind``), by one number per answer. It is made with the section ``[loss]``.

    That number is the sum of the log-probabilities of the answer's tokens; it is a float64. A loss has :meth:`of`, or
    :meth:`compared` in its place; all tensors are ``[pairs]``.

    ``averaged``: answers count by the average over their tokens rather than the sum. ``has_reference``: what counts is
    by how much they are more likely than under the reference model. ``scores``: the model has a scalar head, and an
    answer's number is its score. ``smooths``: ``loss.label_smoothing`` says something. ``has_margin``: ``loss.margin``
    does. ``judged``: each pair is an answer that is good or bad (a ``margin`` of 1 or -1), and somebody else's.
    ``has_point``: ``point`` is set before the passes of a step, to the mean of :meth:`divergence`, and at least 0.
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

        ``sums`` over the answers' tokens, and how many these are: ``[pairs, 2]``, with the chosen answer first.
        """
        import torch

        if self.has_reference:
            sums = sums - torch.from_numpy(pairs.reference).to(sums)
        if self.averaged:
            sums = sums / lengths
        margin = self.settings.margin + torch.from_numpy(pairs.margin).to(sums)
        return self.compared(sums[:, 0], sums[:, 1], margin)

    def compared(self, chosen: T, rejected: T, margin: T) -> T:
        """Return the losses of pairs by both answers' numbers."""
        return self.of(chosen - rejected, margin)

    def of(self, gap: T, margin: T) -> T:
        """Return the losses of pairs whose chosen answer is ahead by ``gap``; it should be by ``margin``."""
        raise NotImplementedError

    def smoothed(self, gap: T) -> T:
        """Logistic loss of comparisons that are the wrong way round in the share ``loss.label_smoothing`` of them."""
        from torch.nn.functional import logsigmoid

        wrong = self.settings.label_smoothing
        return -(1 - wrong) * logsigmoid(gap) - wrong * logsigmoid(-gap)

    def divergence(self, sums: T, lengths: T, pairs: Pairs) -> T:
        """Return by how much each pair's second answer is more likely than under the reference model."""
        import torch

        return (sums - torch.from_numpy(pairs.reference).to(sums))[:, 1]
