"""A multilayer perceptron from all inputs together to all outputs together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from weft.registry import register

if TYPE_CHECKING:
    from torch import nn


@register("surrogate", "mlp", title="Multilayer perceptron of arrays")
def mlp(
    inputs: Mapping[str, Sequence[int]],
    outputs: Mapping[str, Sequence[int]],
    width: int = 128,
    depth: int = 3,
) -> nn.Module:
    """Return a surrogate model of a simulation: a perceptron of ``depth`` hidden layers, ``width`` wide, with SiLU
    between the layers. ``inputs``, ``outputs``: shapes of a sample's arrays by name.
    """
    from itertools import pairwise
    from math import prod

    from torch import nn

    from weft.models.array_model import FlatArrays

    sizes = [sum(map(prod, inputs.values())), *[width] * depth]
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), nn.SiLU()]
    last = nn.Linear(sizes[-1], sum(map(prod, outputs.values())))
    return FlatArrays(nn.Sequential(*layers, last), inputs, outputs)
