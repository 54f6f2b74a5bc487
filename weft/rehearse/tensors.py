"""Tensors inside nested arguments and results."""

from collections.abc import Iterable
from typing import Any

import torch


def tensors_in(values: Iterable[Any]) -> list[torch.Tensor]:
    """All tensors of ``values``, also those in lists and tuples, in order."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += tensors_in(value)
    return found
