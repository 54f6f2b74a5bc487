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
import torch.nn.functional as F
from torch import nn

from weft.layout.dims import Logical, extents
from weft.layout.flights import all_gather, reduce_scatter
from weft.parallel.replicated import parcels_of
from weft.parallel.state import Held, Unit

if TYPE_CHECKING:
    from weft.layout.mesh import Mesh
    from weft.layout.placement import Placement
    from weft.memory.on_device import OnDevice


def exchanged_rows(
    rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
) -> tuple[torch.Tensor, Any]:
    """Start an all-to-all exchange of ``rows``; return the buffer of received rows, and a work handle to wait for.

    The first ``sent[0]`` of ``rows`` go to rank 0 of ``group``, the next ``sent[1]`` to rank 1, and so on;
    ``received[i]`` rows come from rank ``i``.
    """
    arriving = rows.new_empty(sum(received), *rows.shape[1:])
    work = dist.all_to_all_single(
        arriving, rows.contiguous(), received, sent, group=group, async_op=True
    )
    return arriving, work


#: The values of the state.
OWN: Callable[[Held], torch.Tensor] = attrgetter("local")


class Full(NamedTuple):
    """A whole parameter that this rank computes with.

    Attributes:
        ``name``: the parameter's name.
        ``logical``: the same parameter as the one-device model has it, and the part that this rank computes with.
        ``parameter``: the PyTorch parameter.
        ``placement``: which rows of the parameter this rank holds as state.
    """

    name: str
    logical: Logical
    parameter: nn.Parameter
    placement: Placement


class TableUnit(Unit):
    """A unit (parameters updated together) that a pipeline's schedule gathers before use and reduces after backward.

    Each rank keeps some rows of every parameter. These rows are the unit's state, which rests on the device, on the
    host or in a file. A rank has whole parameters only between :meth:`gather` and :meth:`release`.

    ``named``: the parameters, all frozen or none. ``compute``: data type of the gathered parameters. ``tiers``: where
    tensors rest. The state is float32, or float64 if ``compute`` is. The state of frozen parameters has the type
    ``compute``, as they have no small updates that could get lost.
    """

    visited = True

    def __init__(
        self, named: Sequence[Full], mesh: Mesh, compute: torch.dtype, tiers: OnDevice
    ) -> None:
        self.mesh, self.compute, self.tiers = mesh, compute, tiers
        self.replicas, self.sharing = mesh.sharing(named[0].logical)  # the same of all
        self.size = mesh.size(self.sharing)
        self.learns = any(full.parameter.requires_grad for full in named)
        self.wide = (
            torch.promote_types(compute, torch.float32) if self.learns else compute
        )
        # Whether state and parameters are different tensors.
        self.place = tiers.places.get("weights", "device")
        self.apart = self.size > 1 or self.wide != compute or self.place != "device"
        self.full = [full.parameter for full in named]
        self.held = [self._hold(full) for full in named]
        # Every rank's share of a parameter takes as much room in a message as the largest.
        self.chunks = [
            -(-full.shape[0] // self.size) * full.shape[1:].numel()
            for full in self.full
        ]
        self.shapes = [full.shape for full in self.full]
        self.live = not self.apart
        self.rest()
        self.release(drop=True)
        # this rank's share of what the nearest ranks hold together
        self.near: torch.Tensor | None = None
        # The gradients that rest in a file by now, for an update that does not wait; nothing else keeps them.
        self.fresh: dict[str, torch.Tensor] | None = None
        # gradients in the wide type, until they are reduced
        self.sums: dict[str, torch.Tensor] = {}
        self.at: list[list[torch.Tensor]] = []  # the full parameters at several points

    def rest(self) -> None:
        """Move the state to the tiers (device, host or file) that the recipe chooses for it.

        If gradients do not stay on the device, room for reduced gradients is made there too.
        """
        self.tiers.rest(self, "weights", [h.local for h in self.held], self.piece)
        for h in self.held:
            h.parameter.data = h.local.data  # which is elsewhere now
        # Where reduced gradients go, if they do not stay in memory.
        away = self.learns and self.tiers.places.get("gradients") == "file"
        self.reduced = {h.name: torch.zeros_like(h.local) for h in self.held if away}
        self.tiers.rest(self, "gradients", self.reduced.values())

    @property
    def piece(self) -> int:
        """Bytes per transfer when weights are read from files or written to them; 0: the size that is fastest."""
        return 0

    def keep(self, updated: bool) -> None:
        """Keep the weights in memory between their next two uses, so that the second use need not fetch them again.

        ``updated``: whether the second use is an update; if not, it is a gather.
        """
        self.tiers.keep(self, "weights")

    def begin_step(self) -> None:
        """Prepare for a step. Nothing is done here; subclasses forget or note which parts the last step used."""

    def _hold(self, whole: Full) -> Held:
        full = shard = whole.parameter
        if full.dtype != self.compute:
            if full.untyped_storage().nbytes():
                full.data = full.data.to(self.compute)
            else:
                full.data = torch.empty_like(full, dtype=self.compute)
        if self.apart:
            away = self.place != "device"
            place = "cpu" if away else full.device
            rows = torch.zeros(
                extents(whole.placement.box), dtype=self.wide, device=place
            )
            if away and full.is_cuda:
                rows = rows.pin_memory()
            shard = nn.Parameter(rows, self.learns)
        return Held(whole.name, whole.logical, whole.placement, shard.detach(), shard)

    @torch.no_grad()
    def gather(self, values: Callable[[Held], torch.Tensor] = OWN) -> None:
        """Make the whole parameters from the rows of all ranks. Collective.

        ``values``: function from a parameter to the values of this rank's rows; by default the values of the state.
        """
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
                place = self.mesh.group("near").rank()
                self.near = whole.view(neighbours, -1)[place].clone()
        by_parameter = whole.split(self.chunks, dim=1)  # [ranks, chunk] each
        for full, shape, pieces in zip(
            self.full, self.shapes, by_parameter, strict=True
        ):
            storage, numel = full.untyped_storage(), shape.numel()
            storage.resize_(numel * full.element_size())
            full.data.copy_(pieces.reshape(-1)[:numel].view(shape))

    def gather_for_pass(self) -> None:
        """Make the parameters ready for a pass, from the values of the state; in this class, gather them whole.
        Collective.
        """
        self.gather()

    def gather_at(self, points: Sequence[Callable[[Held], torch.Tensor]]) -> None:
        """Gather the whole parameters with several sets of values, called points. Collective.

        Afterwards :meth:`show` picks one of the points. A point is a choice of values for all parameters, such as the
        weights plus a small random change. Each entry of ``points`` is a function that describes one point. It is
        called with each parameter, and returns the values of this rank's rows at the point. The stored rows stay
        unchanged. Rows that rest on the host or in a file are fetched once for all points. A unit that does not learn
        keeps its own values at all points.
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
        """Give the whole parameters the values of one point of the last :meth:`gather_at`. ``point``: index of the
        point.
        """
        for full, values in zip(self.full, self.at[point] if self.at else ()):  # noqa: B905
            full.data = values

    def _gather_all(
        self, whole: torch.Tensor, values: Callable[[Held], torch.Tensor]
    ) -> None:
        own = whole.new_zeros(sum(self.chunks))
        with self.tiers.at_hand(self, "weights"):
            for h, piece in zip(self.held, own.split(self.chunks), strict=True):
                rows = values(h).to(whole.device, non_blocking=True)
                piece[: h.local.numel()].copy_(rows.flatten())
        all_gather(whole.view(-1), own, group=self.mesh.group(self.sharing))

    def release(self, drop: bool) -> None:
        """Forget the whole parameters, so that their next use gathers them again; ``drop``: free their memory too."""
        if self.apart:
            self.live, self.at = False, []
            if drop:
                for full in self.full:
                    full.untyped_storage().resize_(0)

    @torch.no_grad()
    def fold(self) -> None:
        """Add the gradients of the latest backward to running sums in the data type of the state.

        Nothing is done where parameters compute in that type.
        """
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
        """Sum the whole parameters' gradients over the ranks that share the state; keep this rank's rows. Collective.

        If gradients are reduced several times in a step, the rows are added to those of the earlier reductions.
        """
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
        """Take away and return the gradient of a whole parameter so far, in the wide type."""
        grad = self.sums.pop(h.name, None) if self.wide != self.compute else full.grad
        full.grad = None
        return grad

    def _scattered(
        self, grads: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """Sum gradients over the ranks that share the state; return the rows that this rank holds."""
        whole = torch.zeros(
            self.size, sum(self.chunks), dtype=self.wide, device=self.mesh.device
        )
        by_parameter = whole.split(self.chunks, dim=1)
        for grad, pieces in zip(grads, by_parameter, strict=True):
            if grad is not None:
                flat = grad.flatten()
                padding = pieces.numel() - flat.numel()
                pieces.copy_(F.pad(flat, (0, padding)).view(pieces.shape))
        own = torch.empty_like(whole[0])
        reduce_scatter(own, whole.view(-1), group=self.mesh.group(self.sharing))
        return [
            piece[: h.local.numel()].view(h.local.shape).clone()
            for h, piece in zip(self.held, own.split(self.chunks), strict=True)
        ]

    def _put_away(self, shares: Sequence[torch.Tensor | None]) -> None:
        """Sum the step's reduced gradients over all replicas, and write them to their tier; keep their norms."""
        # two stages use a tied embedding
        again = self.held[0].parameter.grad is not None
        with self.tiers.at_hand(self, "gradients", changes=True, read=again):
            for h, share in zip(self.held, shares, strict=True):
                if share is None:
                    share = torch.zeros_like(h.local, device=self.mesh.device)
                if self.mesh.size(self.replicas) > 1:
                    dist.all_reduce(share, group=self.mesh.group(self.replicas))
                place = self.reduced[h.name]
                h.parameter.grad = place.add_(share) if again else place.copy_(share)
                h.norm = torch.linalg.vector_norm(place)
                if self.fresh is not None:
                    fresh = place.clone() if again else share.to(place.device)
                    self.fresh[h.name] = fresh


@torch.no_grad()
def sum_over_replicas(units: Iterable[TableUnit], mesh: Mesh) -> None:
    """Sum the reduced gradients of ``units`` over data-parallel replicas (``dp``). Collective.

    Gradients on the device are summed one by one if they are large, and small ones together. Gradients on the host are
    copied to the device and summed there in one message. Units with different replicas are summed separately.
    """
    by_group: dict[str, list[Held]] = {}
    for unit in units:
        if unit.learns and mesh.size(unit.replicas) > 1 and not unit.reduced:
            by_group.setdefault(unit.replicas, []).extend(unit.held)
    for name, held in by_group.items():
        group = mesh.group(name)
        if held[0].local.device == mesh.device:
            parcels = parcels_of(h.parameter for h in held)
            for parcel in parcels:
                parcel.launch(group)
            for parcel in parcels:
                parcel.wait()
            continue
        # they rest on the host
        grads = [
            torch.zeros_like(h.local) if h.parameter.grad is None else h.parameter.grad
            for h in held
        ]
        flat = torch.cat([grad.flatten() for grad in grads]).to(mesh.device)
        dist.all_reduce(flat, group=group)
        flat = flat.to(held[0].local.device)
        pieces = flat.split([grad.numel() for grad in grads])
        for h, piece in zip(held, pieces, strict=True):
            h.parameter.grad = piece.view(h.local.shape)
