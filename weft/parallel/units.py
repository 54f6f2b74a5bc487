"""Units whose parameters are gathered and reduced when a schedule says so: the state of a pipeline rank.

Hooks of autograd (:mod:`weft.parallel.sharded`) work neither with a split backward nor with interleaved microbatches.
Here the schedule says when: its ``GATHER``, ``RELEASE`` and ``REDUCE`` actions call these methods.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from weft.layout.dims import Logical, extents
from weft.parallel.state import Held, Unit

if TYPE_CHECKING:
    from weft.layout.mesh import Mesh
    from weft.layout.placement import Placement
    from weft.memory.on_device import OnDevice

# PyTorch 2.13 renamed these two and warns at every call by the old name, the only one that 2.11 has.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


def exchanged_rows(
    rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
) -> tuple[torch.Tensor, Any]:
    """Rows from every rank, so many of ``rows`` to each rank in turn and so many from each, and what to wait for."""
    found = rows.new_empty(sum(received), *rows.shape[1:])
    return found, dist.all_to_all_single(
        found, rows.contiguous(), received, sent, group=group, async_op=True
    )


class Full(NamedTuple):
    """A parameter as this rank computes with it, and what of its state the rank holds."""

    name: str
    logical: Logical
    parameter: nn.Parameter
    placement: Placement


class TableUnit(Unit):
    """Parameters whose full form exists between :meth:`gather` and :meth:`release` only.

    The rows of what a rank holds are in full precision, on the host if they are offloaded. ``compute``: type of the
    gathered parameters; the state is float32 (float64 if that is what is computed in). Of frozen parameters, which a
    unit has none or nothing else of, the state is in the type of compute, as no small updates get lost.
    """

    visited = True

    def __init__(
        self, named: Sequence[Full], mesh: Mesh, compute: torch.dtype, tiers: OnDevice
    ) -> None:
        self.mesh, self.compute, self.tiers = mesh, compute, tiers
        self.replicas, self.sharing = mesh.sharing(named[0].logical)  # the same of all
        self.size = mesh.size(self.sharing)
        self.learns = any(f.parameter.requires_grad for f in named)
        self.wide = (
            torch.promote_types(compute, torch.float32) if self.learns else compute
        )
        # Whether state and parameters are different tensors.
        self.place = tiers.places.get("weights", "device")
        self.apart = self.size > 1 or self.wide != compute or self.place != "device"
        self.full = [f.parameter for f in named]
        self.held = [self._hold(f) for f in named]
        # Every rank's share of a parameter takes as much room in a message as the largest.
        self.chunks = [
            -(-full.shape[0] // self.size) * full.shape[1:].numel()
            for full in self.full
        ]
        self.shapes = [full.shape for full in self.full]
        self.live = not self.apart
        tiers.rest(self, "weights", [h.local for h in self.held])
        for h in self.held:
            h.parameter.data = h.local.data  # which is elsewhere now
        # Where reduced gradients go, if they do not stay in memory.
        away = self.learns and tiers.places.get("gradients") == "file"
        self.reduced = {h.name: torch.zeros_like(h.local) for h in self.held if away}
        tiers.rest(self, "gradients", self.reduced.values())
        self.release(drop=True)
        # this rank's share of what the nearest ranks hold together
        self.near: torch.Tensor | None = None
        # The gradients that rest in a file by now, for an update that does not wait; nothing else keeps them.
        self.fresh: dict[str, torch.Tensor] | None = None
        # gradients in the wide type, until they are reduced
        self.sums: dict[str, torch.Tensor] = {}
        self.at: list[list[torch.Tensor]] = []  # the full parameters at several points

    def _hold(self, f: Full) -> Held:
        full = shard = f.parameter
        if full.dtype != self.compute:
            held = full.untyped_storage().nbytes() > 0
            full.data = (
                full.data.to(self.compute)
                if held
                else torch.empty_like(full, dtype=self.compute)
            )
        if self.apart:
            away = self.place != "device"
            place = torch.device("cpu") if away else full.device
            rows = torch.zeros(extents(f.placement.box), dtype=self.wide, device=place)
            shard = nn.Parameter(
                rows.pin_memory() if away and full.is_cuda else rows, self.learns
            )
        return Held(f.name, f.logical, f.placement, shard.detach(), shard)

    @torch.no_grad()
    def gather(
        self, values: Callable[[Held], torch.Tensor] = attrgetter("local")
    ) -> None:
        """Make the full parameters from all ranks' rows, or from what is to be there in the place of these."""
        if self.live:
            return
        self.live = True
        if self.size == 1:
            with self.tiers.at_hand(self, "weights"):
                for full, h in zip(self.full, self.held, strict=True):
                    full.untyped_storage().resize_(full.numel() * full.element_size())
                    # Through .data: what autograd saved of the parameter stays valid, as the values are the same.
                    full.data.copy_(values(h), non_blocking=True)
            return
        whole = torch.empty(
            self.size, sum(self.chunks), dtype=self.compute, device=self.mesh.device
        )
        if self.near is not None:
            all_gather(whole.view(-1), self.near, group=self.mesh.group("near"))
        else:
            self._gather_all(whole, values)
            neighbours = self.mesh.size("near")
            if neighbours and self.sharing == "state":
                self.near = whole.view(neighbours, -1)[
                    self.mesh.group("near").rank()
                ].clone()
        for full, shape, pieces in zip(
            self.full, self.shapes, whole.split(self.chunks, dim=1), strict=True
        ):
            storage, numel = full.untyped_storage(), shape.numel()
            storage.resize_(numel * full.element_size())
            full.data.copy_(pieces.reshape(-1)[:numel].view(shape))

    def gather_at(self, points: Sequence[Callable[[Held], torch.Tensor]]) -> None:
        """Gather once for each of several points, from rows that are brought in once; :meth:`show` says which is there.

        The rows stay as they are. A unit that does not learn is the same at all points.
        """
        with self.tiers.at_hand(self, "weights"):
            for values in points if self.learns else ():
                self.live, self.near = False, None
                for full in self.full:
                    full.data = torch.empty_like(full)
                self.gather(values)
                self.at.append([full.data for full in self.full])
            self.gather()

    def show(self, point: int) -> None:
        """Have the full parameters be those of this point."""
        for full, values in zip(
            self.full, self.at[point] if self.at else (), strict=bool(self.at)
        ):
            full.data = values

    def _gather_all(
        self, whole: torch.Tensor, values: Callable[[Held], torch.Tensor]
    ) -> None:
        mine = whole.new_zeros(sum(self.chunks))
        with self.tiers.at_hand(self, "weights"):
            for h, piece in zip(self.held, mine.split(self.chunks), strict=True):
                piece[: h.local.numel()].copy_(
                    values(h).to(whole.device, non_blocking=True).flatten()
                )
        all_gather(whole.view(-1), mine, group=self.mesh.group(self.sharing))

    def release(self, drop: bool) -> None:
        """Forget the full parameters, before the rows change; ``drop``: free their memory too."""
        if self.apart:
            self.live, self.at = False, []
            if drop:
                for full in self.full:
                    full.untyped_storage().resize_(0)

    def forget_near(self) -> None:
        """Forget what the nearest ranks hold together, before the rows change."""
        self.near = None

    @torch.no_grad()
    def fold(self) -> None:
        """Add the last backward's gradients to the sums in the wide type, if parameters are kept in a narrower one."""
        if self.wide == self.compute:
            return
        for h, full in zip(self.held, self.full, strict=True):
            if full.grad is not None:
                seen = self.sums.get(h.name)
                self.sums[h.name] = (
                    full.grad.to(self.wide) if seen is None else seen.add_(full.grad)
                )
                full.grad = None

    @torch.no_grad()
    def reduce(self) -> None:
        """Sum the gradients so far over the ranks that hold the state; each adds its rows to what it has."""
        if not (self.apart and self.learns):
            return
        shares = [
            self._taken(h, full) for h, full in zip(self.held, self.full, strict=True)
        ]
        if self.size > 1:
            shares = self._scattered(shares)
        if self.reduced:
            self._put_away(shares)
            return
        for h, share in zip(self.held, shares, strict=True):
            if share is not None:
                share, seen = share.to(h.local.device), h.parameter.grad
                h.parameter.grad = share if seen is None else seen.add_(share)

    def _taken(self, h: Held, full: nn.Parameter) -> torch.Tensor | None:
        """The gradient of a whole parameter so far, in the wide type; it is not there any more."""
        grad = self.sums.pop(h.name, None) if self.wide != self.compute else full.grad
        full.grad = None
        return grad

    def _scattered(
        self, grads: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """The rows that are held here of the sums over the ranks that share the state."""
        whole = torch.zeros(
            self.size, sum(self.chunks), dtype=self.wide, device=self.mesh.device
        )
        for grad, pieces, chunk in zip(
            grads, whole.split(self.chunks, dim=1), self.chunks, strict=True
        ):
            if grad is not None:
                flat = grad.new_zeros(self.size * chunk)
                flat[: grad.numel()] = grad.flatten()
                pieces.copy_(flat.view(self.size, chunk))
        mine = torch.empty_like(whole[0])
        reduce_scatter(mine, whole.view(-1), group=self.mesh.group(self.sharing))
        pieces = mine.split(self.chunks)
        return [
            p[: h.local.numel()].view(h.local.shape).clone()
            for h, p in zip(self.held, pieces, strict=True)
        ]

    def _put_away(self, shares: Sequence[torch.Tensor | None]) -> None:
        """Let the step's reduced gradients rest in their tier, summed over all replicas; keep their norms."""
        # two stages use a tied embedding
        again = self.held[0].parameter.grad is not None
        with self.tiers.at_hand(self, "gradients", changes=True, read=again):
            for h, share in zip(self.held, shares, strict=True):
                share = (
                    torch.zeros_like(h.local, device=self.mesh.device)
                    if share is None
                    else share
                )
                if self.mesh.size(self.replicas) > 1:
                    dist.all_reduce(share, group=self.mesh.group(self.replicas))
                place = self.reduced[h.name]
                h.parameter.grad = place.add_(share) if again else place.copy_(share)
                h.norm = torch.linalg.vector_norm(place)
                if self.fresh is not None:
                    self.fresh[h.name] = (
                        place.clone() if again else share.to(place.device)
                    )


@torch.no_grad()
def sum_over_replicas(units: Iterable[TableUnit], mesh: Mesh) -> None:
    """Add up the reduced gradients of all replicas, in one call for those that have the same."""
    by_group: dict[str, list[Held]] = {}
    for unit in units:
        if unit.learns and mesh.size(unit.replicas) > 1 and not unit.reduced:
            by_group.setdefault(unit.replicas, []).extend(unit.held)
    for name, held in by_group.items():
        for h in held:
            if h.parameter.grad is None:
                h.parameter.grad = torch.zeros_like(h.local)
        flat = torch.cat(
            [h.parameter.grad.flatten() for h in held if h.parameter.grad is not None]
        ).to(mesh.device)
        dist.all_reduce(flat, group=mesh.group(name))
        flat = flat.to(held[0].local.device)
        for h, piece in zip(
            held, flat.split([h.local.numel() for h in held]), strict=True
        ):
            h.parameter.grad = piece.view(h.local.shape)
