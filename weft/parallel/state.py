"""Parameters of a pipeline rank: whole for compute, this rank's rows as state, gathered and reduced when told.

FSDP2 gathers and reduces from inside autograd, which a split backward and interleaved microbatches keep from working.
Here the schedule says when: its ``GATHER``, ``RELEASE`` and ``REDUCE`` actions call these methods.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from weft.layout.dims import Logical, ceil_part
from weft.layout.mesh import Mesh

# PyTorch 2.13 renamed these two and warns at every call by the old name, the only one that 2.11 has.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass
class Held:
    """One parameter. ``rows``: this rank's share of dimension 0, as FSDP2 cuts it."""

    name: str
    logical: Logical
    full: nn.Parameter
    shard: nn.Parameter
    rows: tuple[int, int]


class Unit:
    """Parameters that are gathered and reduced together, over the data axes of ``mesh``.

    ``compute``: type of the gathered parameters; the state is float32 (float64 if that is what is computed in).
    ``offload``: the state is on the host.
    """

    def __init__(
        self, named: Sequence[tuple[str, Logical, nn.Parameter]], mesh: Mesh, compute: torch.dtype, offload: bool
    ) -> None:
        self.mesh, self.size, self.compute = mesh, mesh.size("state"), compute
        self.wide = torch.promote_types(compute, torch.float32)
        # Whether state and parameters are different tensors.
        self.apart = self.size > 1 or self.wide != compute or offload
        rank = mesh.rank("state")
        self.held = []
        for name, logical, full in named:
            lo, hi = ceil_part(full.shape[0], self.size, rank)
            shard = full
            if self.apart:
                place = torch.device("cpu") if offload else full.device
                rows = torch.empty((hi - lo, *full.shape[1:]), dtype=self.wide, device=place)
                shard = nn.Parameter(rows.pin_memory() if offload and full.is_cuda else rows)
                full.data = full.data.to(compute)
            self.held.append(Held(name, logical, full, shard, (lo, hi)))
        # Every rank's share of a parameter takes as much room in a message as the largest.
        self.chunks = [-(-h.full.shape[0] // self.size) * h.full[:1].numel() for h in self.held]
        self.shapes = [h.full.shape for h in self.held]
        self.live = not self.apart
        self.near: torch.Tensor | None = None  # this rank's share of what the nearest ranks hold together
        self.sums: dict[str, torch.Tensor] = {}  # gradients in the wide type, until they are reduced

    @torch.no_grad()
    def gather(self) -> None:
        """Make the full parameters from all ranks' rows."""
        if self.live:
            return
        self.live = True
        whole = torch.empty(self.size, sum(self.chunks), dtype=self.compute, device=self.mesh.device)
        near = self.mesh.near_mesh
        if self.near is not None and near is not None:
            all_gather(whole.view(-1), self.near, group=near.get_group("near"))
        else:
            self._gather_all(whole)
            if near is not None:
                self.near = whole.view(near.size(1), -1)[near.get_local_rank("near")].clone()
        for h, shape, pieces in zip(self.held, self.shapes, whole.split(self.chunks, dim=1), strict=True):
            storage, numel = h.full.untyped_storage(), shape.numel()
            storage.resize_(numel * h.full.element_size())
            # Through .data: what autograd saved of the parameter stays valid, as the values are the same.
            h.full.data.copy_(pieces.reshape(-1)[:numel].view(shape))

    def _gather_all(self, whole: torch.Tensor) -> None:
        mine = whole.new_zeros(sum(self.chunks))
        for h, piece in zip(self.held, mine.split(self.chunks), strict=True):
            piece[: h.shard.numel()].copy_(h.shard.to(whole.device, non_blocking=True).flatten())
        if self.size > 1:
            all_gather(whole.view(-1), mine, group=self._group("state"))
        else:
            whole[0] = mine

    def release(self, drop: bool) -> None:
        """Forget the full parameters, before the rows change; ``drop``: free their memory too."""
        if self.apart:
            self.live = False
            if drop:
                for h in self.held:
                    h.full.untyped_storage().resize_(0)

    @torch.no_grad()
    def fold(self) -> None:
        """Add the last backward's gradients to the sums in the wide type, if parameters are kept in a narrower one."""
        if self.wide == self.compute:
            return
        for h in self.held:
            if h.full.grad is not None:
                seen = self.sums.get(h.name)
                self.sums[h.name] = h.full.grad.to(self.wide) if seen is None else seen.add_(h.full.grad)
                h.full.grad = None

    @torch.no_grad()
    def reduce(self) -> None:
        """Sum the gradients so far over the ranks that hold the state; each adds its rows to its ``shard.grad``."""
        if not self.apart:
            return
        whole = torch.zeros(self.size, sum(self.chunks), dtype=self.wide, device=self.mesh.device)
        for h, pieces, chunk in zip(self.held, whole.split(self.chunks, dim=1), self.chunks, strict=True):
            grad = self.sums.pop(h.name, None) if self.wide != self.compute else h.full.grad
            h.full.grad = None
            if grad is not None:
                flat = grad.new_zeros(self.size * chunk)
                flat[: grad.numel()] = grad.flatten()
                pieces.copy_(flat.view(self.size, chunk))
        mine = whole[0]
        if self.size > 1:
            mine = torch.empty_like(whole[0])
            reduce_scatter(mine, whole.view(-1), group=self._group("state"))
        for h, piece in zip(self.held, mine.split(self.chunks), strict=True):
            share = piece[: h.shard.numel()].view(h.shard.shape)
            share = share.to(h.shard.device, copy=True)
            h.shard.grad = share if h.shard.grad is None else h.shard.grad.add_(share)

    def _group(self, name: str) -> dist.ProcessGroup:
        assert self.mesh.data_mesh is not None
        return self.mesh.data_mesh.get_group(name)


@torch.no_grad()
def sum_over_replicas(units: Iterable[Unit], mesh: Mesh) -> None:
    """Add up the reduced gradients of all replicas (``dp``), in one call."""
    if mesh.size("dp") == 1:
        return
    assert mesh.data_mesh is not None
    held = [h for unit in units for h in unit.held]
    for h in held:
        if h.shard.grad is None:
            h.shard.grad = torch.zeros_like(h.shard)
    if held:
        flat = torch.cat([h.shard.grad.flatten() for h in held if h.shard.grad is not None]).to(mesh.device)
        dist.all_reduce(flat, group=mesh.data_mesh.get_group("replica"))
        flat = flat.to(held[0].shard.device)
        for h, piece in zip(held, flat.split([h.shard.numel() for h in held]), strict=True):
            h.shard.grad = piece.view(h.shard.shape)
