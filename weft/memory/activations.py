"""What backward needs of each block waits in the host's memory in between (vDNN, Rhu et al. 2016, 1602.08124).

Autograd's hooks hand over every tensor that a block saves. Whole storages travel, each once, so that views of one
activation cost nothing more; parameters, and what all blocks share, stay. On CUDA the storages of a block leave on a
stream of their own while the next blocks compute, and those of the block before come back while a block's backward
runs. On the CPU the same is done with plain copies.
"""

import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

T = torch.Tensor

#: Blocks at most whose storages are still on the device while their copies to the host may be on their way.
MOST_LEAVING = 2


class SavedStorage:
    """One storage that ``run`` has saved: its bytes on the ``host``, and ``here``, those on the device while there.

    ``users``: tensors that autograd has saved of it and backward has not asked for yet. Only these tensors refer to
    it, so that host memory is free again as soon as backward has passed.
    """

    def __init__(self, here: T, host: T, run: "BlockRun") -> None:
        self.here: T | None = here
        self.host, self.run, self.users = host, run, 0


class SavedView(NamedTuple):
    """A tensor that autograd has saved: where in a storage it lies."""

    stored: SavedStorage
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class BlockRun:
    """One forward run of a block, and what it has saved; ``before``: the run before it, backward's next one."""

    def __init__(self, before: "BlockRun | None") -> None:
        self.before = weakref.ref(before) if before is not None else None
        self.stored: weakref.WeakSet[SavedStorage] = weakref.WeakSet()
        self.on_host: torch.cuda.Event | None = None  # all of it is on the host
        self.on_device: torch.cuda.Event | None = None  # all of it is on the device again


class HostActivations:
    """Moves what blocks save for backward between ``device`` and host; ``sent`` counts the bytes to the host."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.sent = device, 0
        self.cuda = device.type == "cuda"
        self.to_host = torch.cuda.Stream(device) if self.cuda else None
        self.to_device = torch.cuda.Stream(device) if self.cuda else None
        self.leaving: deque[BlockRun] = deque()
        self.latest: tuple[object, BlockRun] | None = None

    @contextmanager
    def block(self, module: nn.Module, *shared: T) -> Iterator[None]:
        """In here ``module`` runs forward, and what it saves goes to the host, except its parameters and ``shared``.

        Runs with the same ``shared`` are of one pass: backward comes to them in the opposite order.
        """
        if not torch.is_grad_enabled():
            yield
            return
        key = shared[0] if shared else None
        run = BlockRun(self.latest[1] if self.latest is not None and self.latest[0] is key else None)
        self.latest = (key, run)
        while len(self.leaving) >= MOST_LEAVING:
            self._release(self.leaving.popleft())
        found: dict[int, SavedStorage | None] = {}  # by storage; None stays

        def pack(tensor: T) -> T | SavedView:
            if not found:  # now, when the gathered parameters are in place
                found.update({p.untyped_storage()._cdata: None for p in (*module.parameters(), *shared)})
            storage = tensor.untyped_storage()
            if tensor.device.type != self.device.type:
                return tensor
            if storage._cdata not in found:
                found[storage._cdata] = self._send(storage, run)
            stored = found[storage._cdata]
            if stored is None or not tensor.numel():
                return tensor
            stored.users += 1
            return SavedView(stored, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

        with saved_tensors_hooks(pack, self._unpack):
            yield
        if self.to_host is not None:
            run.on_host = self.to_host.record_event()
        self.leaving.append(run)

    def _send(self, storage: torch.UntypedStorage, run: BlockRun) -> SavedStorage:
        """Copy a storage to the host. It stays on the device until :meth:`_release`, so that nothing overwrites it."""
        here = torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)
        host = torch.empty(here.shape, dtype=torch.uint8, pin_memory=self.cuda)
        if self.to_host is not None:
            self.to_host.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.to_host):
            host.copy_(here, non_blocking=self.cuda)
        self.sent += host.numel()
        stored = SavedStorage(here, host, run)
        run.stored.add(stored)
        return stored

    def _release(self, run: BlockRun) -> None:
        """Free the device's copies of a run; what is computed from now on waits until they are on the host."""
        if run.on_host is not None:
            torch.cuda.current_stream(self.device).wait_event(run.on_host)
        for stored in run.stored:
            stored.here = None

    def _fetch(self, run: BlockRun) -> None:
        """Bring the storages of a run back, beside what is computed."""
        missing = [stored for stored in run.stored if stored.here is None]
        if self.to_device is not None and run.on_host is not None and missing:
            self.to_device.wait_event(run.on_host)
        with torch.cuda.stream(self.to_device):
            for stored in missing:
                stored.here = stored.host.to(self.device, non_blocking=True)
        if self.to_device is not None and missing:
            run.on_device = self.to_device.record_event()

    def _unpack(self, packed: T | SavedView) -> T:
        if not isinstance(packed, SavedView):
            return packed
        stored, run = packed.stored, packed.stored.run
        if run in self.leaving:  # backward has begun: nothing needs to make room for a forward any more
            self.leaving.remove(run)
        self._fetch(run)
        if self.cuda:
            now = torch.cuda.current_stream(self.device)
            if run.on_device is not None:
                now.wait_event(run.on_device)
        before = run.before() if run.before is not None else None
        if before is not None and before not in self.leaving:
            self._fetch(before)
        assert stored.here is not None
        if self.cuda:
            stored.here.record_stream(now)
        flat = stored.here
        stored.users -= 1
        if not stored.users:
            stored.here = None
        return torch.empty(0, dtype=packed.dtype, device=self.device).set_(
            flat.untyped_storage(), packed.offset, packed.size, packed.stride
        )
