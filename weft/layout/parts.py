"""Parts of logical tensors: what checkpoints, proofs and moves between layouts read and write."""

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
    """The part of a logical tensor that a rank holds, with its values; checkpoints and proofs read and write parts.

    A logical tensor is a whole tensor, as the model has it on one device.

    Attributes:
        ``values``: the elements of the part.
        ``box``: the range of indices of the part in the logical tensor, per dimension.
        ``tensor``: shape and type of the logical tensor.
        ``replica``: index of this copy among the ranks that hold the same elements.
        ``replicas``: number of these ranks.
        ``rows``: if ``values`` has only some rows of ``box``, their indices along dimension 0; None: it has all.
    """

    values: torch.Tensor
    box: Box
    tensor: Tensor
    replica: int = 0
    replicas: int = 1
    rows: tuple[int, ...] | None = None

    def __reduce__(self) -> tuple[Callable[..., "Part"], tuple[Any, ...]]:
        """Pickle as an array of bytes: PyTorch pickles each tensor as a file, which takes ten times as long."""
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
        """Index that selects the elements of ``values`` in an array of the logical tensor."""
        slices_of_box = slices(self.box)
        if self.rows is None:
            return slices_of_box
        return (list(self.rows), *slices_of_box[1:])


def _unpickled(
    array: np.ndarray, dtype: torch.dtype, shape: torch.Size, *others: Any
) -> Part:
    return Part(torch.from_numpy(array).view(dtype).view(shape), *others)
