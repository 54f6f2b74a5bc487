"""The numbers of a tensor: their precision, and whether it has any; in a rehearsal, which only counts memory, it has
none.
"""

import torch

# Fake tensors have a device like real ones but no memory. Only their class tells them apart, for which PyTorch has no
# public name: torch.compiler knows only of what is being compiled.
from torch._subclasses.fake_tensor import FakeTensor


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the precision of sums over numbers of ``dtype``: float64 for float64, else float32."""
    return torch.promote_types(dtype, torch.float32)


def has_numbers(x: torch.Tensor) -> bool:
    """Return whether the values of ``x`` can be read: not if ``x`` is on the meta device or a fake tensor."""
    return not (x.is_meta or isinstance(x, FakeTensor))
