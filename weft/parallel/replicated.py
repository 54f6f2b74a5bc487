"""State that every data-parallel replica holds whole: gradients are summed while backward runs, without a copy.

A large gradient is summed where autograd has left it, and only small ones are joined for a common sum. All ranks start
the sums in one order, and wait for a sum when its gradient is first read. PyTorch's
``DistributedDataParallel`` (Li et al. 2020, 2006.15704) copies every gradient into a bucket. Where ranks divide the
state, :mod:`weft.parallel.sharded` takes the place of this module.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from weft.errors import WeftError
from weft.layout.axes import FOLDED
from weft.parallel.state import Held, State, Unit, by_block

if TYPE_CHECKING:
    from weft.layout.mesh import Mesh
    from weft.models.transformer import Transformer
    from weft.recipe import Memory, Train

T = torch.Tensor

#: Bytes from which a gradient is summed alone. Smaller ones are joined, as each sum costs a round trip.
ALONE = 1 << 20


class Parcel:
    """Parameters of one unit (parameters updated together) whose gradients are summed over replicas by one all-reduce.

    ``parameters``: these parameters, at least one. Their gradients are complete as soon as the last backward pass of a
    step has reached every one of them.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self.missing = 0
        self.launched = True
        self.work: Any = None
        self.joined: T | None = None

    def expect(self, last: bool) -> None:
        """Prepare for a pass. If the sum of an earlier step is still under way, because that step was given up, wait
        for it and drop it.

        ``last``: whether this pass is the last of the step, after whose backward the gradients are complete and are
        summed.
        """
        if self.work is not None:
            self.work.wait()
            self.work = self.joined = None
        self.launched = not last
        self.missing = len(self.parameters) if last else 0

    @torch.no_grad()
    def launch(self, group: dist.ProcessGroup) -> None:
        """Start the sum over ``group``. A parameter without a gradient counts as zeros."""
        self.launched = True
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        grads = [p.grad for p in self.parameters if p.grad is not None]
        if len(grads) > 1:
            self.joined = torch.cat([grad.flatten() for grad in grads])
            self.work = dist.all_reduce(self.joined, group=group, async_op=True)
            return
        parameter = self.parameters[0]
        # as collectives ask for
        parameter.grad = grads[0].contiguous()
        self.work = dist.all_reduce(parameter.grad, group=group, async_op=True)

    def wait(self) -> None:
        """Wait for the sum, if one is under way, and make its parts the gradients of the parameters."""
        work, self.work = self.work, None
        if work is None:
            return
        work.wait()
        joined, self.joined = self.joined, None
        if joined is None:
            return
        pieces = joined.split([p.numel() for p in self.parameters])
        for parameter, piece in zip(self.parameters, pieces, strict=True):
            parameter.grad = piece.view(parameter.shape)


class Parcels:
    """The parcels of all units of a state, in the order in which every rank launches them.

    Gradients can become complete in another order on another rank. A parcel is therefore launched only after those
    before it. ``ordered``: the parcels in the order in which backward usually completes them. ``group``: the replicas.
    """

    def __init__(self, ordered: Sequence[Parcel], group: dist.ProcessGroup) -> None:
        self.ordered, self.group = list(ordered), group
        self.next = len(self.ordered)
        # Weak references: a cycle through PyTorch's hooks would keep parameters and process groups alive.
        owner = weakref.ref(self)
        for parcel in self.ordered:
            for parameter in parcel.parameters:
                parameter.register_post_accumulate_grad_hook(
                    partial(_arrived, owner, weakref.ref(parcel))
                )

    def regroup(self, group: dist.ProcessGroup) -> None:
        """Sum over ``group`` from now on. Sums that were under way in the group before are forgotten."""
        self.group, self.next = group, len(self.ordered)
        for parcel in self.ordered:
            parcel.work = parcel.joined = None
            parcel.launched, parcel.missing = True, 0

    def restart(self) -> None:
        """Start again with the first parcel, at the beginning of a pass whose gradients are to be summed."""
        self.next = 0

    def launch_complete(self) -> None:
        """Start the sums of the next parcels in order, up to the first parcel that still lacks a gradient."""
        while self.next < len(self.ordered) and not self.ordered[self.next].missing:
            self._launch_next()

    def launch_until(self, parcel: Parcel) -> None:
        """Start the sums of all parcels up to and including ``parcel``, whose sums are about to be read.

        The caller must have finished backward for all of them.
        """
        while not parcel.launched:
            self._launch_next()

    def _launch_next(self) -> None:
        parcel = self.ordered[self.next]
        self.next += 1
        if not parcel.launched:
            parcel.launch(self.group)


def _arrived(
    owner: weakref.ref[Parcels], which: weakref.ref[Parcel], _: nn.Parameter
) -> None:
    """Called by autograd when it has accumulated the gradient of a parameter."""
    parcels, parcel = owner(), which()
    if parcels is None or parcel is None or not parcel.missing:
        return
    if parcel.launched:
        raise WeftError(
            "a gradient came after its sum over replicas: this model's backward reaches its parameters in an order "
            "of its own; leave out optimizer.in_backward and memory.speculate, or set layout.shard, not layout.dp"
        )
    parcel.missing -= 1
    if not parcel.missing:
        parcels.launch_complete()


@dataclass(eq=False)
class ReplicaUnit(Unit):
    """A unit that every replica holds whole, whose gradients are summed over replicas during backward.

    ``own``: the unit's parcels (parameters whose gradients are summed in one message). ``parcels``: the parcels of all
    units.
    """

    own: Sequence[Parcel]
    parcels: Parcels

    def begin_pass(self, last: bool) -> None:
        for parcel in self.own:
            parcel.expect(last)
        self.parcels.restart()


def is_replicated(
    mesh: Mesh, train: Train, memory: Memory, summed: bool = True
) -> bool:
    """Return whether each replica of ``dp`` holds its part of the model whole, so that only gradients are exchanged.

    This is so if nothing else divides the state, and parameters are on the device in the type in which they compute.
    ``summed``: whether the state sums gradients over the replicas of ``dp``. ``train``, ``memory``: sections of the
    recipe.
    """
    if not summed or mesh.size("dp") == 1:
        return False
    divided = mesh.size("state") > 1 or mesh.size(FOLDED) > 1
    apart = train.dtype == "bfloat16" or memory.offloads_state
    return not (divided or apart)


def replicated_state(
    model: Transformer, mesh: Mesh, make: Callable[..., State] = State
) -> State:
    """Build the state of a model that each replica of ``dp`` holds whole; ``make`` creates the state from units.

    The model's parameters are themselves the state. Their gradients become sums over the replicas, as the loss is
    already divided by the global token count.
    """
    described = dict(model.logical_parameters())
    held: dict[str, Held] = {}
    own = list[Held]()
    for name, parameter in model.named_parameters():
        placement = mesh.place.hold(described[name])
        local = parameter.detach()
        each = Held(name, described[name], placement, local, parameter)
        if described[name].everywhere:
            own.append(each)
        else:
            held[name] = each
    blocks = by_block(held)
    cut = {
        block: parcels_of(h.parameter for h in of_block if h.learns)
        for block, of_block in blocks.items()
    }
    order = {id(h.parameter): index for index, h in enumerate(held.values())}

    def first(parcel: Parcel) -> int:
        return min(order[id(parameter)] for parameter in parcel.parameters)

    # backward reaches parameters from the model's end to its beginning
    every = [parcel for own_parcels in cut.values() for parcel in own_parcels]
    parcels = Parcels(sorted(every, key=first, reverse=True), mesh.group("dp"))
    for block, of_block in blocks.items():
        _read_sums(of_block, cut[block], parcels)
    units: list[Unit] = [Unit(own)] if own else []
    units += [
        ReplicaUnit(of_block, cut[block], parcels) for block, of_block in blocks.items()
    ]
    return make(units)


def parcels_of(parameters: Iterable[nn.Parameter]) -> list[Parcel]:
    """Divide parameters into parcels, whose gradients are summed in one message each.

    Each large parameter is a parcel of its own. All small ones together are the last parcel.
    """
    parcels, small = list[Parcel](), list[nn.Parameter]()
    for parameter in parameters:
        if parameter.nbytes >= ALONE:
            parcels.append(Parcel([parameter]))
        else:
            small.append(parameter)
    return [*parcels, Parcel(small)] if small else parcels


def _read_sums(held: Sequence[Held], own: Sequence[Parcel], parcels: Parcels) -> None:
    """Let the gradients of ``held`` be read only as sums over replicas."""
    parcel_of = {id(p): parcel for parcel in own for p in parcel.parameters}
    for h in held:
        if h.learns:
            h.gradient = partial(_summed, parcels, parcel_of[id(h.parameter)])


def _summed(parcels: Parcels, parcel: Parcel, parameter: nn.Parameter) -> T | None:
    """Return the sum over replicas of the gradient of ``parameter``, after waiting for it."""
    parcels.launch_until(parcel)
    parcel.wait()
    return parameter.grad
