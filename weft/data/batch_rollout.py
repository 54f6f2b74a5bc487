"""Numbers of the tokens of sampled answers, as rows and batches carry them for a policy loss."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Self

import torch


@dataclass(frozen=True)
class RolloutTokens:
    """Numbers of the tokens of sampled answers that a policy loss reads, float64 tensors with the shape of the labels.

    Each entry belongs to the token that is the label at its position. NaN stands for a number that is not known.

    Attributes:
        ``advantage``: by how much the token was better than expected.
        ``scale``: factor of the token's loss before losses are summed.
        ``divisor``: the token's summand of the divisor of the loss. The summed loss of a step is divided by the sum of
            all these entries over all ranks.
        ``sampler``: log-probability with which the token was sampled.
        ``old``: log-probability under the policy before the update; NaN: the present log-probability.
        ``reference``: log-probability under the reference model.
        ``returns``: sum of rewards from the token on, which a critic should predict.
        ``values``: what the critic predicted at sampling.
    """

    advantage: torch.Tensor
    scale: torch.Tensor
    divisor: torch.Tensor
    sampler: torch.Tensor
    old: torch.Tensor
    reference: torch.Tensor
    returns: torch.Tensor
    values: torch.Tensor

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """Apply ``change`` to each of the tensors, and return the results."""
        return type(self)(*(change(x) for x in vars(self).values()))

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Return the concatenated tensors of all ``parts``, each ``[n]``, field by field and in the order of
        the parts.
        """
        columns = zip(*(vars(part).values() for part in parts), strict=True)
        return cls(*map(torch.cat, columns))

    def write(self, part: Self, row: int, columns: slice) -> None:
        """Copy the tensors of ``part``, each ``[n]``, into ``columns`` of row ``row`` of these tensors, each ``[rows,
        seq]``.
        """
        for name, column in vars(self).items():
            column[row, columns] = getattr(part, name)


def blank_numbers(*shape: int) -> RolloutTokens:
    """Return :class:`RolloutTokens` whose tensors are all zeros of ``shape``, the values that padding has."""
    count = len(fields(RolloutTokens))
    return RolloutTokens(*torch.zeros(count, *shape, dtype=torch.float64))
