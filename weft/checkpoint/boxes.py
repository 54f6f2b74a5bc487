"""Boxes of logical tensors in PyTorch's distributed checkpoint (DCP).

DCP knows DTensor, whose placements cannot say "heads 3 and 4 of 7" or "these ranks hold the same key/value heads".
It also knows any tensor with the three methods below (``torch.distributed._checkpointable``, a private protocol and
the reason for this file): which boxes of which logical tensor it holds. Replicas save a box once; readers get
just the elements they need, however the writer had cut them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from weft.layout.dims import Box


class BoxTensor(torch.Tensor):
    """Local elements that are ``box`` of a logical tensor of ``logical_shape``; the storage is shared."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    box: Box
    logical_shape: torch.Size

    @classmethod
    def wrap(cls, local: torch.Tensor, box: Box, shape: tuple[int, ...]) -> BoxTensor:
        tensor = local.detach().as_subclass(cls)
        tensor.box, tensor.logical_shape = box, torch.Size(shape)
        return tensor

    def size(self, *dim: Any) -> Any:
        """The logical size: DCP compares it with what is stored."""
        return torch.Tensor.size(self, *dim) if dim else self.logical_shape

    def _chunk(self) -> ChunkStorageMetadata:
        offsets = torch.Size(lo for lo, _ in self.box)
        return ChunkStorageMetadata(offsets, torch.Size(hi - lo for lo, hi in self.box))

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self._chunk()] if self.numel() else []

    def __create_write_items__(self, fqn: str, tensor: Any) -> list[WriteItem]:
        if not self.numel():
            return []
        chunk = self._chunk()
        data = TensorWriteData(chunk, TensorProperties.create_from_tensor(self), self.logical_shape)
        return [WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD, tensor_data=data)]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)
