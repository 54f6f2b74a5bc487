"""The state of the model on one rank: parameters in units, with their gradients and slots.

The step, the proof, checkpoints and moves between layouts read and change the state through :class:`State`. Units own
the memory and gather it: those of :mod:`weft.parallel.sharded` from hooks of autograd, those of
:mod:`weft.parallel.units` when a pipeline's table says so.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from operator import attrgetter
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

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
    """A parameter as this rank holds it: ``local`` are the elements ``placement.box`` of the logical tensor.

    A frozen parameter (``parameter.requires_grad`` is false) has no gradient, slots or updates. ``gradient`` reads the
    reduced gradient from ``parameter``. ``slots``: parts of other tensors that belong to the parameter, by name
    (moments, for example). ``updates`` counts updates, as a tensor for the fused kernels. ``rows``: the rows held along
    dimension 0, where they differ from the box (experts that have moved). ``norm``: the gradient's norm, where it was
    taken before the gradient went to a file.
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
        """The reduced gradient of the elements that this rank holds, if there is one."""
        return self.gradient(self.parameter)

    @property
    def learns(self) -> bool:
        return self.parameter.requires_grad

    @property
    def box(self) -> Box:
        return self.placement.box

    def part(self, values: T) -> Part:
        """Return ``values``, shaped like ``local``, as this rank's part of a tensor shaped like the parameter."""
        dims = tuple(d.name for d in self.logical.dims)
        tensor = Tensor(self.logical.shape, NAMES[values.dtype], dims)
        at = self.placement
        return Part(values, at.box, tensor, at.replica, at.replicas, self.rows)


@dataclass(eq=False)
class Unit:
    """Parameters that are gathered, reduced and updated together.

    The parameters of this class are always whole on this rank, and are not shared with ranks that have other data.
    Subclasses gather and reduce.
    """

    held: list[Held]
    #: Whether every use follows :meth:`State.visit`, so that an update can wait until then.
    visited: ClassVar[bool] = False

    def gather(self) -> None:
        """Make the full parameters ready for compute."""

    def release(self, drop: bool) -> None:
        """Forget the full parameters before the rows that this rank holds change; ``drop``: free their memory too."""

    def reduce(self) -> None:
        """Sum the gradients so far over the ranks with other data, and keep the rows that this rank holds."""

    def begin_pass(self, last: bool) -> None:
        """Prepare for a forward and backward pass; ``last``: whether it is the last of the step."""


def by_block(held: Mapping[str, Held]) -> dict[str, list[Held]]:
    """Group parameters by the number of their block, as text; embedding, norm and head are under ""."""
    units: dict[str, list[Held]] = {}
    for name, h in held.items():
        kind, _, rest = name.partition(".")
        block = rest.partition(".")[0] if kind == "blocks" else ""
        units.setdefault(block, []).append(h)
    return units


class Updater(Protocol):
    """An optimizer: updates parameters, and names the slots that it keeps with each."""

    def slots(self, held: Held) -> dict[str, Part]:
        """Return the initial optimizer slots of the parameter ``held``, by name."""

    def __call__(self, held: Sequence[Held], grads: Sequence[T], lr: float) -> None:
        """Update parameters and their slots in place by gradients, at learning rate ``lr``. Collective."""


class DueUpdate(NamedTuple):
    """A postponed update of a unit: its gradients, the learning rate, and the factor that multiplies the gradients."""

    grads: Callable[[Unit], Mapping[str, T]]
    lr: float
    scale: float


class State:
    """All parameters that this rank holds, with their slots, in units.

    ``copies``: parameters that ranks of other stages hold too, by the group of these ranks. ``go_home`` moves all rows
    to the ranks that their boxes name, and returns whether any were elsewhere; it is collective. ``learning``: the
    parameters that are not frozen; with ``base_elsewhere`` checkpoints leave out the frozen ones. Tensors that
    ``tiers`` keep are brought in while their unit is updated. ``due``: updates that wait until their unit is visited;
    readers of tensors, such as checkpoints and proofs, call :meth:`settle` first. ``failed``: the error of an update
    that may have left some units unchanged; it is raised again then.
    ``optimizer``: None in a state that is never updated.
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

    def make_slots(self) -> None:
        """Make the optimizer's slots for every parameter that learns, from the parameters' values."""
        if self.optimizer is None:
            return
        for unit in self.units:
            for h in unit.held:
                if h.learns:
                    h.slots |= self.optimizer.slots(h)
                    h.updates = torch.zeros((), device=h.local.device)
            moments = [part.values for h in unit.held for part in h.slots.values()]
            self.tiers.rest(unit, "moments", moments)

    def gather(self) -> None:
        """Make all parameters ready for compute. Collective."""
        for unit in self.units:
            unit.gather()

    def release(self, drop: bool = True) -> None:
        """Forget the gathered full parameters of all units; ``drop``: free their memory too."""
        for unit in self.units:
            unit.release(drop)

    def begin_pass(self, last: bool) -> None:
        for unit in self.units:
            unit.begin_pass(last)

    def gradients(self, settled: bool = True) -> dict[str, T]:
        """Return the gradient of each learning parameter on this rank, by name; zeros where backward left none.

        With ``settled`` False, gradients that rest in a file may not be read yet, as they may still be on their way
        there.
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
        """Forget the gradients of all parameters."""
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
        """Update the parameters and slots of a unit by its reduced gradients, times ``scale``. Collective.

        The gradients are scaled in place. :meth:`settle` waits for the transfers. A ``revocable`` update can be undone
        by :class:`weft.parallel.revocable_updates.RevocableUpdates`.
        """
        if any(h.learns for h in unit.held):
            with self.tiers.trying(unit) if revocable else self.tiers.updating(unit):
                self._update(unit, grads, lr, scale)

    def _update(
        self, unit: Unit, grads: Mapping[str, T], lr: float, scale: float = 1.0
    ) -> None:
        assert self.optimizer is not None, "a state that only computes"
        held = [h for h in unit.held if h.learns]
        reduced = [grads[h.name] for h in held]
        if scale != 1.0:
            torch._foreach_mul_(reduced, scale)
        self.optimizer(held, reduced, lr)

    def update_later(
        self,
        grads: Callable[[Unit], Mapping[str, T]],
        lr: float,
        scale: float = 1.0,
        but: Container[Unit] = (),
    ) -> None:
        """Postpone the update of every unit to its next :meth:`visit`, or to :meth:`settle` if that comes first.

        ``grads``: function that returns a unit's gradients, which are multiplied by ``scale``; ``lr``: learning rate.
        Units that are never visited are updated now. Units in ``but`` are left out.
        """
        self._make_due()
        for unit in self.units:
            if unit in but:
                continue
            if unit.visited and any(h.learns for h in unit.held):
                self.due[unit] = DueUpdate(grads, lr, scale)
            else:
                self.update(unit, grads(unit), lr, scale)

    def fetch(self, unit: Unit) -> None:
        """Start to fetch from tiers the tensors that :meth:`visit` of ``unit`` will need.

        These are its weights, or all its tensors if :meth:`update_later` has postponed its update. The tensors of the
        unit whose update was postponed first follow.
        """
        groups = self.tiers.groups
        kinds = groups.get(unit, ()) if unit in self.due else ["weights"]
        self.tiers.fetch(unit, *kinds)
        for late in islice(self.due, 1):
            self.tiers.fetch(late, *groups.get(late, ()))

    def visit(self, unit: Unit) -> None:
        """Run the update of ``unit`` that :meth:`update_later` has postponed, if there is one.

        Its weights then stay in memory for the pass that follows.
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
        self.tiers.settle()

    def _make_due(self) -> None:
        if self.failed is not None:
            raise self.failed
        self.tiers.restart()
        for unit in list(self.due):
            grads, lr, scale = self.due.pop(unit)
            self.update(unit, grads(unit), lr, scale)

    def expose(self) -> None:
        """Prepare the tensors of the state for changes by code outside of this class."""
        self.settle()
        self.tiers.forget_sums()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Replace the learning parameters by their moving averages (``optimizer.ema``) inside of the ``with`` block.

        Nothing may save or update the state meanwhile. Afterwards every bit is as before.
        """
        self._swap_averages()
        try:
            yield
        finally:
            self._swap_averages()

    @torch.no_grad()
    def _swap_averages(self) -> None:
        self.expose()
        for h in self.learning:
            if "ema" in h.slots:
                average, now = h.slots["ema"].values, h.local.clone()
                h.local.copy_(average)
                average.copy_(now)
        self.release()  # what was gathered is of other values

    @property
    def updates(self) -> int:
        """The number of updates that the parameters have had, postponed updates included."""
        if not self.learning:
            return 0
        first = self.learning[0]
        return int(first.updates.item()) + any(
            h is first for unit in self.due for h in unit.held
        )

    @updates.setter
    def updates(self, count: int) -> None:
        for h in self.learning:
            h.updates.fill_(count)

    def bring_home(self) -> None:
        """Move all rows to the ranks that their boxes name. Collective."""
        if self._go_home():
            self.release()  # what was gathered is of other rows

    def tensors(self) -> dict[str, Part]:
        """Return this rank's part of every tensor of the state, by the tensor's name. Collective."""
        self.bring_home()
        self.expose()
        return self.parts()

    def parts(self) -> dict[str, Part]:
        """Return this rank's part of every tensor for reading between two steps: rows stay where they are, and no rank
        waits.
        """
        slots = {
            f"optimizer.{slot}.{h.name}": part
            for h in self.held
            for slot, part in h.slots.items()
        }
        return {f"model.{h.name}": h.part(h.local) for h in self.held} | slots

    def saved(self) -> dict[str, Part]:
        """Return the tensors that a checkpoint holds, by name. Collective.

        Tensors that rest in files are first compared with their checksums.
        """
        self.bring_home()
        self.settle()
        self.tiers.check()
        parts = self.tensors()
        for h in self.held:
            if self.base_elsewhere and not h.learns:
                del parts[f"model.{h.name}"]
        return parts

    @torch.no_grad()
    def fill(self, values: Values) -> None:
        """Write initial ``values`` into all parameters, and make the optimizer's slots."""
        self.expose()
        for h in self.held:
            if h.local.numel():
                h.local.copy_(values(h.name, h.logical, h.box))
        self.make_slots()
