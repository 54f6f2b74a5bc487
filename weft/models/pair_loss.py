"""The interface of losses on pairs of answers, one of which is preferred."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    import torch

    from weft.data.batch import Pairs
    from weft.recipe import Loss

    T = torch.Tensor


class PairLoss:
    """The loss of pairs of answers (``loss.kind``), a function of one value per answer.

    It is made with the section ``[loss]``. The value is the sum of the log-probabilities of the answer's tokens, in
    float64. A subclass defines :meth:`of`, or :meth:`compared` in its place; all tensors are ``[pairs]``.

    ``averaged``: the value is the mean over the tokens instead of the sum. ``has_reference``: the reference model's
    value is subtracted. ``scores``: the model has a scalar head, and the value of an answer is its score. ``smooths``:
    the loss uses ``loss.label_smoothing``. ``has_margin``: the loss uses ``loss.margin``. ``judged``: the first answer
    of each pair is judged as good or bad (a ``margin`` of 1 or -1), and the second belongs to another prompt.
    ``has_point``: before the passes of a step, ``point`` is set to the mean of :meth:`divergence`, but at least 0.
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
        """Return the loss of each pair, from the values of its chosen and its rejected answer; all are ``[pairs]``.

        ``margin``: by how much the chosen answer's value should be larger.
        """
        return self.of(chosen - rejected, margin)

    def of(self, gap: T, margin: T) -> T:
        """Return the loss of each pair.

        ``gap``: the chosen answer's value minus the rejected one's; ``margin``: the gap that the pair should have.
        """
        raise NotImplementedError

    def smoothed(self, gap: T) -> T:
        """Return the logistic loss of each ``gap`` between a chosen and a rejected answer, with smoothed labels.

        A share ``loss.label_smoothing`` of the loss is that of the opposite label.
        """
        from torch.nn.functional import logsigmoid

        wrong = self.settings.label_smoothing
        return -(1 - wrong) * logsigmoid(gap) - wrong * logsigmoid(-gap)

    def divergence(self, sums: T, lengths: T, pairs: Pairs) -> T:
        """Return the log-probability of each pair's second answer minus its log-probability under the reference model.

        ``sums`` and ``lengths``: log-probabilities and numbers of tokens of the answers, ``[pairs, 2]``.
        """
        import torch

        return (sums - torch.from_numpy(pairs.reference).to(sums))[:, 1]
