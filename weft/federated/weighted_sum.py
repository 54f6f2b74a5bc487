"""The weighted sum of clients' updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def weighted_sum(
    differences: Sequence[Mapping[str, torch.Tensor]], weights: Sequence[float]
) -> dict[str, torch.Tensor]:
    """Return ``sum_i weights_i differences_i`` by name of the parameter, added up in the given order.

    ``differences``: tensors of the same names and shapes for each update; ``weights``: one number for each update.
    Raises :class:`ValueError` if there are none.
    """
    if not differences:
        raise ValueError("there is no update to add up")
    total = {name: tensor * weights[0] for name, tensor in differences[0].items()}
    for difference, weight in zip(differences[1:], weights[1:], strict=True):
        for name, tensor in difference.items():
            total[name].add_(tensor, alpha=weight)
    return total
