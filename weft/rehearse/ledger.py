"""Counts the bytes of all living tensors, and their peak."""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode


def tensors_in(values: Iterable[Any]) -> list[torch.Tensor]:
    """Return all tensors of ``values`` in order, also those in lists and tuples."""
    tensors: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, list | tuple):
            tensors += tensors_in(value)
    return tensors


class Ledger:
    """Counter of the bytes of living tensors: ``level`` at present, and ``peak``, the highest level so far.

    Tensors that share memory count once.
    """

    def __init__(self) -> None:
        self.level = self.peak = 0
        self.known: dict[int, int] = {}  # bytes by storage

    def hold(self, values: Iterable[Any]) -> None:
        """Count the memory of all tensors in ``values`` until it is freed.

        Of a distributed tensor this rank's shard counts.
        """
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
        """Replace the counted size of ``storage``, whose memory is counted already, by its present size."""
        size = storage.nbytes()
        self.level += size - self.known[storage._cdata]
        self.known[storage._cdata] = size
        self.peak = max(self.peak, self.level)

    def _drop(self, key: int) -> None:
        self.level -= self.known.pop(key)


class AllocationWatch(TorchDispatchMode):
    """Context in which ``ledger`` counts the bytes of every tensor that is created.

    ``inside``: whether temporary tensors inside Weft's own operators count too. Sharded parameters are gathered and
    freed without a new tensor, by a change of their storage's size. Such changes count only inside a second context,
    which the method ``resizes`` returns.
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
