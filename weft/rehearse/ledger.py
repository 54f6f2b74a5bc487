"""The bytes of all tensors that are alive, and the most that they were."""

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from weft.rehearse.tensors import tensors_in


class Ledger:
    """``level``: bytes alive now; ``peak``: at most so far. Tensors that share memory count once."""

    def __init__(self) -> None:
        self.level = self.peak = 0
        self.known: dict[int, int] = {}  # bytes by storage

    def hold(self, values: Iterable[Any]) -> None:
        """Count the storages of these tensors until they are gone; of a spread tensor, this rank's part."""
        for tensor in tensors_in(values):
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            storage = local.untyped_storage()
            if storage.nbytes() and storage._cdata not in self.known and local.device.type != "meta":
                self.known[storage._cdata] = 0
                self.resize(storage)
                weakref.finalize(storage, self._drop, storage._cdata)

    def resize(self, storage: torch.UntypedStorage) -> None:
        """Count a storage that is held by the size that it has now."""
        size = storage.nbytes()
        self.level += size - self.known[storage._cdata]
        self.known[storage._cdata] = size
        self.peak = max(self.peak, self.level)

    def _drop(self, key: int) -> None:
        self.level -= self.known.pop(key)
