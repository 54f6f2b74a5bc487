"""The interface of losses on pairs of answers, one of which is preferred."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    import torch

    from weft.data.batch import Pairs
    from weft.recipe import Loss

    T = torch.Tensor


class PairLoss:
    """The loss of pairs of answers (``loss.kind``), by one number per answer. It is made with the section ``[loss]``.

    The number is the sum of the log-probabilities of the answer's tokens, in float64. A loss defines :meth:`of`, or
    :meth:`compared` in its place; all tensors are ``[pairs]``.

    ``averaged``: the number is the mean over the tokens instead of the sum. ``has_reference``: the number is the
    difference to that of the reference model. ``scores``: the model has a scalar head, and an answer's number is its
    score. ``smooths``: the loss uses ``loss.label_smoothing``. ``has_margin``: it uses ``loss.margin``. ``judged``:
    each pair is an answer that is good or bad (a ``margin`` of 1 or -1), and an answer to another prompt.
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
        """Return the losses of pairs by the numbers of both answers."""
        return self.of(chosen - rejected, margin)

    def of(self, gap: T, margin: T) -> T:
        """Return the losses of pairs whose chosen answer is ahead by ``gap``; it should be ahead by ``margin``."""
        raise NotImplementedError

    def smoothed(self, gap: T) -> T:
        """Return the logistic loss of comparisons; a share ``loss.label_smoothing`` of them counts in the other
        direction.
        """
        from torch.nn.functional import logsigmoid

        wrong = self.settings.label_smoothing
        return -(1 - wrong) * logsigmoid(gap) - wrong * logsigmoid(-gap)

    def divergence(self, sums: T, lengths: T, pairs: Pairs) -> T:
        """Return how much likelier each pair's second answer is than under the reference model."""
        import torch

        return (sums - torch.from_numpy(pairs.reference).to(sums))[:, 1]
