"""The precision in which values of a tensor are summed, and whether a tensor has values at all.

In a rehearsal, which only counts memory, tensors have none.
"""

import torch

# Fake tensors have a device like real ones but no memory. Only their class tells them apart, for which PyTorch has no
# public name: torch.compiler knows only of what is being compiled.
from torch._subclasses.fake_tensor import FakeTensor


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the precision for sums over values of type ``dtype``: float64 for float64, else float32."""
    return torch.promote_types(dtype, torch.float32)


def has_numbers(x: torch.Tensor) -> bool:
    """Return whether the values of ``x`` can be read: not if ``x`` is on the meta device or a fake tensor."""
    return not (x.is_meta or isinstance(x, FakeTensor))
