"""The bytes of all tensors that are alive, and the most that they were."""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode


def tensors_in(values: Iterable[Any]) -> list[torch.Tensor]:
    """Return all tensors of ``values``, also those in lists and tuples, in order."""
    tensors: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, list | tuple):
            tensors += tensors_in(value)
    return tensors


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
            if (
                storage.nbytes()
                and storage._cdata not in self.known
                and local.device.type != "meta"
            ):
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


class AllocationWatch(TorchDispatchMode):
    """Enters every tensor made within in the ledger; units gather and free parameters by the size of their storage.

    ``inside``: also what our own operators make while they run.
    """

    def __init__(self, ledger: Ledger, inside: bool = False) -> None:
        super().__init__()
        self.ledger, self.inside = ledger, inside

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        run = func
        if self.inside and func.namespace == "weft":
            run = OPDEFS[f"weft::{func.overloadpacket.__name__}"]._init_fn
        with self if run is not func else nullcontext():
            result = run(*args, **(kwargs or {}))
        self.ledger.hold((result,))
        return result

    @contextmanager
    def resizes(self) -> Iterator[None]:
        real = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            result = real(storage, size)
            if storage._cdata in self.ledger.known:
                self.ledger.resize(storage)
            return result

        with mock.patch.object(torch.UntypedStorage, "resize_", resize):
            yield
