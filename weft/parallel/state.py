"""The state of the model on one rank: parameters in units, with their gradients and slots.

The step, the proof, checkpoints and moves between layouts read and change the state through :class:`State`. Units own
the memory and gather it: those of :mod:`weft.parallel.sharded` from hooks of autograd, those of
:mod:`weft.parallel.units` when a pipeline's table says so.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import islice
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import nn

from weft.layout.dims import Box, Logical, Tensor
from weft.layout.parts import NAMES, Part
from weft.memory.on_device import OnDevice

if TYPE_CHECKING:
    from weft.layout.placement import Placement
    from weft.models.values import Values

T = torch.Tensor


@dataclass
class Held:
    """The part of a parameter that this rank holds, with its optimizer state.

    A frozen parameter (``parameter.requires_grad`` is false) has no gradient, slots or updates.

    Attributes:
        ``name``, ``logical``: the parameter's name, and the whole tensor of which ranks hold parts.
        ``placement``: which part this rank holds: the elements ``placement.box`` of the logical tensor.
        ``local``: these elements, as the state keeps them.
        ``parameter``: the PyTorch parameter that these elements are, or are this rank's shard of.
        ``gradient``: function that reads the reduced gradient of the elements from ``parameter``.
        ``slots``: tensors that the optimizer keeps beside the value, such as moments, by name.
        ``updates``: the number of updates, as a tensor for fused kernels.
        ``rows``: the rows held, as indices along dimension 0, where experts have moved; None: those of the box.
        ``norm``: norm of the gradient, if it was computed before the gradient went to a file; else None.
    """

    name: str
    logical: Logical
    placement: Placement
    local: T
    parameter: nn.Parameter
    gradient: Callable[[nn.Parameter], T | None] = attrgetter("grad")
    slots: dict[str, Part] = field(default_factory=dict)
    updates: T = field(default_factory=lambda: torch.zeros(()))
    rows: tuple[int, ...] | None = None
    norm: T | None = None

    @property
    def grad(self) -> T | None:
        """The reduced gradient of the elements that this rank holds; None if backward has left none."""
        return self.gradient(self.parameter)

    @property
    def learns(self) -> bool:
        return self.parameter.requires_grad

    @property
    def box(self) -> Box:
        return self.placement.box

    def part(self, values: T) -> Part:
        """Return ``values``, a tensor shaped like ``local``, as a part that knows its box in the whole tensor."""
        dims = tuple(d.name for d in self.logical.dims)
        tensor = Tensor(self.logical.shape, NAMES[values.dtype], dims)
        at = self.placement
        return Part(values, at.box, tensor, at.replica, at.replicas, self.rows)


@dataclass(eq=False)
class Unit:
    """Parameters that are gathered, reduced and updated together, usually those of one block.

    This class is for parameters that are always whole on this rank, and that no rank with other data shares. Its
    methods therefore do nothing; subclasses gather and reduce. ``held``: the parameters. ``visited``: whether
    :meth:`State.visit` is called for the unit before each use of its weights, so that its update can be postponed until
    then.
    """

    held: list[Held]
    #: Whether every use follows :meth:`State.visit`, so that an update can wait until then.
    visited: ClassVar[bool] = False

    @property
    def pieces(self) -> Sequence[Unit]:
        """The units by which parameters are updated: this one, unless a subclass is updated piece by piece."""
        return (self,)

    def share_of(self, grads: Mapping[str, T]) -> Mapping[str, T]:
        """Return the gradients among ``grads`` that update this unit, by parameter name.

        In this class these are all of ``grads``. A unit that is a tile of a weight takes only the tile's rows.
        """
        return grads

    def update(
        self, optimizer: Updater, grads: Mapping[str, T], lr: float, scale: float
    ) -> None:
        """Update the unit's trained parameters by ``optimizer`` and the gradients ``grads``, by name. Collective.

        ``lr``: learning rate. ``scale``: factor by which the gradients are multiplied, in place.
        """
        held = [h for h in self.held if h.learns]
        grads = self.share_of(grads)
        reduced = [grads[h.name] for h in held]
        if scale != 1.0:
            torch._foreach_mul_(reduced, scale)
        optimizer(held, reduced, lr)

    def make_slots(self, optimizer: Updater, tiers: OnDevice) -> None:
        """Make the slots of ``optimizer`` for every parameter that learns, and let them rest in ``tiers``."""
        for h in self.held:
            if h.learns:
                h.slots |= optimizer.slots(h)
                h.updates = torch.zeros((), device=h.local.device)
        moments = [part.values for h in self.held for part in h.slots.values()]
        tiers.rest(self, "moments", moments)

    def gather(self) -> None:
        """Make the whole parameters ready for compute. In this class they always are."""

    def prefetched(self) -> Sequence[str]:
        """Return the kinds of tensors to fetch before the next gather, such as "weights"; :meth:`State.fetch` reads
        them.

        A subclass may instead start to read single rows itself, and return no kinds.
        """
        return ("weights",)

    def release(self, drop: bool) -> None:
        """Forget the whole parameters, so that their next use gathers them again; ``drop``: free their memory too."""

    def reduce(self) -> None:
        """Sum the gradients so far over the ranks that compute different data; keep the rows of the sum that this rank
        holds.
        """

    def begin_pass(self, last: bool) -> None:
        """Prepare for a forward and backward pass; ``last``: whether it is the last pass of the step."""

    def catch_up(self) -> None:
        """Apply the updates that parts of the unit have missed. In this class none are missed, so nothing is done."""


def by_block(held: Mapping[str, Held]) -> dict[str, list[Held]]:
    """Group parameters by the index of their block, as text; embedding, norm and head are under "".

    ``held``: parameters by name.
    """
    units: dict[str, list[Held]] = {}
    for name, h in held.items():
        kind, _, rest = name.partition(".")
        block = rest.partition(".")[0] if kind == "blocks" else ""
        units.setdefault(block, []).append(h)
    return units


class Updater(Protocol):
    """An optimizer's rule: updates parameters in place, and names the slots (such as moments) of each."""

    def slots(self, held: Held) -> dict[str, Part]:
        """Return the initial optimizer slots (such as moments) of the parameter ``held``, by name."""

    def __call__(self, held: Sequence[Held], grads: Sequence[T], lr: float) -> None:
        """Update parameters and their slots in place by the gradients ``grads``. Collective. ``lr``: learning rate."""


class DueUpdate(NamedTuple):
    """A postponed update of a unit of parameters.

    ``grads``: function that returns the gradients of a unit by name; ``lr``: learning rate; ``scale``: factor that
    multiplies the gradients.
    """

    grads: Callable[[Unit], Mapping[str, T]]
    lr: float
    scale: float


class State:
    """All parameters that this rank holds, with their gradients and slots (such as moments), in units.

    The step, the proof, checkpoints and moves between layouts read and change the model's state through this class.

    Attributes:
        ``units``: the units, each with parameters that are updated together.
        ``held``, ``learning``: the parameters of all units, and those of them that are not frozen.
        ``copies``: names of parameters that ranks of other pipeline stages hold too, by process group of these ranks.
        ``tiers``: where tensors rest; they are brought in while their unit is updated.
        ``base_elsewhere``: whether checkpoints leave out frozen parameters.
        ``optimizer``: the update rule; None in a state that is never updated.
        ``due``: updates postponed until their unit is used next (:meth:`visit`); readers of tensors, such as
            checkpoints and proofs, call :meth:`settle` first.
        ``failed``: error of an update that may have left some units unchanged; :meth:`settle` raises it again.
        ``beside``: further models of the run with states of their own, by name. Checkpoints hold their tensors too,
            with this name and a dot before the tensors' names.

    ``go_home`` (argument): a collective function for rows, such as experts, that have moved to other ranks than the
    layout gives. It moves them back, and returns whether any had moved.
    """

    def __init__(
        self,
        units: Iterable[Unit],
        copies: Mapping[dist.ProcessGroup, Sequence[str]] | None = None,
        tiers: OnDevice | None = None,
        base_elsewhere: bool = False,
        go_home: Callable[[], bool] = lambda: False,
        optimizer: Updater | None = None,
    ) -> None:
        self.tiers, self.base_elsewhere = tiers or OnDevice(), base_elsewhere
        self._go_home = go_home
        self.units: list[Unit] = list(units)
        self.held = [held for unit in self.units for held in unit.held]
        self.learning = [held for held in self.held if held.learns]
        self.copies = dict(copies or {})
        self.due: dict[Unit, DueUpdate] = {}
        self.optimizer = optimizer
        self.failed: BaseException | None = None
        self.beside: dict[str, Any] = {}

    def make_slots(self) -> None:
        """Make the optimizer's slots for every parameter that learns, from the parameters' values."""
        if self.optimizer is not None:
            for unit in self.units:
                unit.make_slots(self.optimizer, self.tiers)

    def gather(self) -> None:
        """Make the whole parameters of all units ready for compute. Collective."""
        for unit in self.units:
            unit.gather()

    def release(self, drop: bool = True) -> None:
        """Forget the gathered whole parameters of all units, so that their next use gathers them again.

        ``drop``: whether their memory is freed too.
        """
        for unit in self.units:
            unit.release(drop)

    def begin_pass(self, last: bool) -> None:
        for unit in self.units:
            unit.begin_pass(last)

    def gradients(self, settled: bool = True) -> dict[str, T]:
        """Return this rank's gradient of each parameter that learns, by name; zeros where backward left none.

        Postponed updates are run first. A gradient that rests in a file may still be on its way there. With ``settled``
        the call waits for such transfers, so that all results can be read. Without it the call does not wait, and
        gradients that rest in files may not be read yet.
        """
        self._make_due()
        if settled:
            self.tiers.settle()
        grads = {h.name: (h, h.grad) for h in self.learning}
        return {
            name: torch.zeros_like(h.local) if grad is None else grad
            for name, (h, grad) in grads.items()
        }

    def clear_gradients(self) -> None:
        """Drop the gradients of all parameters, so that the next backward starts from zero."""
        for h in self.held:
            h.parameter.grad = None

    def update(
        self,
        unit: Unit,
        grads: Mapping[str, T],
        lr: float,
        scale: float = 1.0,
        revocable: bool = False,
    ) -> None:
        """Update the parameters and slots of ``unit`` by its reduced gradients, times ``scale``. Collective.

        ``grads``: gradients by parameter name, which are scaled in place; ``lr``: learning rate. Transfers to tiers go
        on until :meth:`settle`. A ``revocable`` update can be undone by
        :class:`weft.parallel.revocable_updates.RevocableUpdates`.
        """
        if any(h.learns for h in unit.held):
            brought = self.tiers.trying if revocable else self.tiers.updating
            for piece in unit.pieces:
                with brought(piece):
                    self._update(piece, grads, lr, scale)

    def _update(
        self, unit: Unit, grads: Mapping[str, T], lr: float, scale: float = 1.0
    ) -> None:
        assert self.optimizer is not None, "a state that only computes"
        unit.update(self.optimizer, grads, lr, scale)

    def update_later(
        self,
        grads: Callable[[Unit], Mapping[str, T]],
        lr: float,
        scale: float = 1.0,
        but: Container[Unit] = (),
    ) -> None:
        """Postpone the update of every unit until its weights are used next (:meth:`visit`), or until :meth:`settle`.

        ``grads``: function that returns a unit's gradients, by parameter name; ``scale``: factor by which gradients are
        multiplied; ``lr``: learning rate; ``but``: units that are not updated. Units for which :meth:`visit` is never
        called are updated in this call.
        """
        self._make_due()
        for unit in self.units:
            if unit in but:
                continue
            if unit.visited and any(h.learns for h in unit.held):
                due = DueUpdate(grads, lr, scale)
                self.due |= dict.fromkeys(unit.pieces, due)
            else:
                self.update(unit, grads(unit), lr, scale)

    def fetch(self, unit: Unit) -> None:
        """Start to fetch the tensors that the next :meth:`visit` of ``unit`` needs from the host or from files.

        If :meth:`update_later` has postponed the unit's update, these are all tensors of the unit, because the visit
        runs the update. Otherwise they are the unit's weights alone. The tensors of the unit whose postponed update has
        waited longest are fetched after them.
        """
        groups = self.tiers.groups
        kinds = groups.get(unit, ()) if unit in self.due else unit.prefetched()
        self.tiers.fetch(unit, *kinds)
        for late in islice(self.due, 1):
            self.tiers.fetch(late, *groups.get(late, ()))

    def visit(self, unit: Unit) -> None:
        """Run the postponed update of ``unit``, if there is one; called before a pass uses the unit's weights.

        The unit's weights then stay in memory for the pass that follows.
        """
        if due := self.due.pop(unit, None):
            grads, lr, scale = due
            # alone: the rest leaves before anything is made of them
            self.tiers.keep(unit, "weights")
            # what is computed in between gives the unit before time to leave
            with self.tiers.updating(unit, behind=0):
                self._update(unit, grads(unit), lr, scale)

    def settle(self) -> None:
        """Run all postponed updates, and wait until all tensors are back in their tiers. Collective."""
        self._make_due()
        for unit in self.units:
            unit.catch_up()
        self.tiers.settle()

    def _make_due(self) -> None:
        if self.failed is not None:
            raise self.failed
        self.tiers.restart()
        for unit in list(self.due):
            grads, lr, scale = self.due.pop(unit)
            self.update(unit, grads(unit), lr, scale)

    def expose(self) -> None:
        """Prepare the state's tensors for changes by code outside of this class.

        Postponed updates are run, and checksums of tensors that rest in files are dropped.
        """
        self.settle()
        self.tiers.forget_sums()

    def averaged(self) -> AbstractContextManager[None]:
        """Return a context in which moving averages (``optimizer.ema``) replace the trained parameters.

        Nothing may save or update the state meanwhile. Afterwards every bit is as before.
        """
        return self.swapped("ema")

    @contextmanager
    def swapped(self, slot: str) -> Iterator[None]:
        """Return a context in which the slot named ``slot``, such as ``ema``, replaces each trained parameter.

        Parameters without the slot stay. Nothing may save or update the state meanwhile. Afterwards every bit is as
        before.
        """
        self._swap(slot)
        try:
            yield
        finally:
            self._swap(slot)

    @torch.no_grad()
    def _swap(self, slot: str) -> None:
        self.expose()
        for h in self.learning:
            if slot in h.slots:
                other, now = h.slots[slot].values, h.local.clone()
                h.local.copy_(other)
                other.copy_(now)
        self.release()  # what was gathered is of other values

    @property
    def updates(self) -> int:
        """The number of updates that each parameter has had. A postponed update counts as done."""
        if not self.learning:
            return 0
        first = self.learning[0]
        return int(first.updates.item()) + any(
            h.updates is first.updates for unit in self.due for h in unit.held
        )

    @updates.setter
    def updates(self, count: int) -> None:
        for h in self._held_in_pieces():
            h.updates.fill_(count)

    def _held_in_pieces(self) -> Iterator[Held]:
        pieces = (piece for unit in self.units for piece in unit.pieces)
        return (h for piece in pieces for h in piece.held)

    def bring_home(self) -> None:
        """Move all rows (such as experts that have moved) back to the ranks whose boxes contain them. Collective."""
        if self._go_home():
            self.release()  # what was gathered is of other rows

    def tensors(self) -> dict[str, Part]:
        """Return this rank's part of every tensor of the state by name; the caller may change the tensors. Collective.

        Names are ``model.PARAMETER`` for values and ``optimizer.SLOT.PARAMETER`` for slots such as moments. Experts
        that have moved to other ranks are moved back first, and postponed updates are run.
        """
        self.bring_home()
        self.expose()
        return self.parts()

    def parts(self) -> dict[str, Part]:
        """Return this rank's part of every tensor of the state by name, for reading between two steps.

        Nothing is waited for. Names are ``model.PARAMETER`` for values and ``optimizer.SLOT.PARAMETER`` for slots such
        as moments. Experts that have moved to other ranks are left there.
        """
        slots = {
            f"optimizer.{slot}.{h.name}": part
            for h in self.held
            for slot, part in h.slots.items()
        }
        others = {
            f"{name}.{tensor}": part
            for name, built in self.beside.items()
            for tensor, part in built.state.parts().items()
        }
        return {f"model.{h.name}": h.part(h.local) for h in self.held} | slots | others

    def saved(self) -> dict[str, Part]:
        """Return this rank's part of every tensor that a checkpoint holds, by name. Collective.

        If the state was made with ``base_elsewhere``, frozen parameters are left out. Tensors that rest in files are
        first compared with their checksums.
        """
        self.bring_home()
        self.settle()
        self.tiers.check()
        for built in self.beside.values():
            built.state.settle()
        parts = self.tensors()
        for h in self.held:
            if self.base_elsewhere and not h.learns:
                del parts[f"model.{h.name}"]
        return parts

    @torch.no_grad()
    def fill(self, values: Values) -> None:
        """Write initial ``values`` into all parameters, and make the optimizer's slots from them."""
        self.expose()
        for h in self._held_in_pieces():
            if h.local.numel():
                h.local.copy_(values(h.name, h.logical, h.box))
        self.make_slots()
