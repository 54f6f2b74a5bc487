"""Numbers of the tokens of sampled answers, as rows and batches carry them for a policy loss."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Self

import torch


@dataclass(frozen=True)
class RolloutTokens:
    """Numbers of the tokens of sampled answers that a policy loss reads, float64, of the shape of the labels.

    A number stands where its token is the label. Where a number is not given it is NaN.

    Attributes:
        ``advantage``: by how much the token was better than expected.
        ``scale``: factor of the token's loss before losses are summed.
        ``divisor``: summands of the number by which the summed loss of a step is divided, over all ranks together.
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
        """Return the numbers with ``change`` applied to each of the tensors."""
        return type(self)(*(change(x) for x in vars(self).values()))

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Concatenate the numbers of all ``parts``, each ``[n]``."""
        columns = zip(*(vars(part).values() for part in parts), strict=True)
        return cls(*map(torch.cat, columns))

    def write(self, part: Self, row: int, columns: slice) -> None:
        """Write the numbers of ``part``, each ``[n]``, to ``columns`` of a row; here numbers are ``[rows, seq]``."""
        for name, column in vars(self).items():
            column[row, columns] = getattr(part, name)


def blank_numbers(*shape: int) -> RolloutTokens:
    """Return zeros of ``shape`` in place of every number, as padding has them."""
    count = len(fields(RolloutTokens))
    return RolloutTokens(*torch.zeros(count, *shape, dtype=torch.float64))
