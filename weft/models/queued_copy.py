"""Copies of small lists of numbers to a device, for which the host does not wait."""

from collections.abc import Sequence
from typing import Any

import torch


def queued_copy(
    values: Sequence[Any], device: torch.device, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """Return ``values``, a list or a list of equally long lists of numbers, as a tensor of type ``dtype`` on
    ``device``.

    A copy to a GPU is only queued: the numbers go through page-locked memory, which PyTorch keeps until the copy has
    been done.
    """
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(
        device, non_blocking=True
    )
