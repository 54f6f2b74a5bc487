"""Whether a tensor has values at all: in a rehearsal, which only counts what a step would hold, it has none."""

import torch

# Fake tensors have a device like real ones and nothing behind it. That they are fake is all that tells them apart, and
# PyTorch has no public name for it: torch.compiler knows only of what is being compiled.
from torch._subclasses.fake_tensor import FakeTensor


def has_numbers(x: torch.Tensor) -> bool:
    """Whether there is anything to read in ``x``: not on the meta device, nor in a fake tensor."""
    return not (x.is_meta or isinstance(x, FakeTensor))
