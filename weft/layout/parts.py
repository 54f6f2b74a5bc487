"""A rank's part of a logical tensor: what checkpoints, proofs and moves between layouts read and write."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from weft.layout.dims import Box, Tensor, slices

#: PyTorch's types by the names that checkpoints give them, which are those of safetensors.
TORCH_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "I64": torch.int64,
    "I32": torch.int32, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


@dataclass(frozen=True)
class Part:
    """``values``: the elements ``box`` of the logical ``tensor``. Of ``replicas`` ranks that hold them this is one.

    ``rows``, if they are not those of the box, are those that ``values`` has along dimension 0.
    """

    values: torch.Tensor
    box: Box
    tensor: Tensor
    replica: int = 0
    replicas: int = 1
    rows: tuple[int, ...] | None = None

    def __reduce__(self) -> tuple[Callable[..., "Part"], tuple[Any, ...]]:
        """As an array of bytes: PyTorch pickles each tensor as a file of its own, which takes ten times as long."""
        values = self.values.detach().cpu().contiguous()
        array = values.view(-1).view(torch.uint8).numpy()
        return _unpickled, (
            array,
            values.dtype,
            values.shape,
            *(getattr(self, f.name) for f in fields(self)[1:]),
        )

    @property
    def index(self) -> tuple[list[int] | slice, ...]:
        """Where in the logical tensor the values are."""
        slices_of_box = slices(self.box)
        return (
            slices_of_box
            if self.rows is None
            else (list(self.rows), *slices_of_box[1:])
        )


def _unpickled(
    array: np.ndarray, dtype: torch.dtype, shape: torch.Size, *others: Any
) -> Part:
    return Part(torch.from_numpy(array).view(dtype).view(shape), *others)
