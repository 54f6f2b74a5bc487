"""The state of the model on one rank: parameters in units, their gradients, and whatever else belongs to a parameter.

Everything that reads or changes the state goes through :class:`State`: the step, the proof, checkpoints, moves between
layouts. Who holds the memory and when it is gathered is up to the units: those of :mod:`weft.parallel.sharded` do it
from hooks of autograd, those of :mod:`weft.parallel.units` when a pipeline's table says so.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from operator import attrgetter
from typing import TYPE_CHECKING, ClassVar, Protocol

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
    """One parameter as this rank holds it: ``local`` are the elements ``placement.box`` of the logical tensor.

    One that does not learn (``parameter.requires_grad`` is false) is frozen: it has no gradient, slots or updates.
    ``parameter`` is where reduced gradients are found, by ``gradient``. ``slots`` are parts of other tensors that
    belong to it, by name (moments, say), and ``updates`` counts its updates, as a tensor for the fused kernels.
    ``rows`` are those along dimension 0 that are held while they are not those of the box (experts that have moved).
    ``norm`` is that of the gradient, where it was taken before the gradient went to rest.
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
        """The reduced gradient of the elements that are held here, if there is one."""
        return self.gradient(self.parameter)

    @property
    def learns(self) -> bool:
        return self.parameter.requires_grad

    @property
    def box(self) -> Box:
        return self.placement.box

    def part(self, values: T) -> Part:
        """``values``, shaped like ``local``, as a part of a tensor like this parameter."""
        tensor = Tensor(
            self.logical.shape,
            NAMES[values.dtype],
            tuple(d.name for d in self.logical.dims),
        )
        return Part(
            values,
            self.box,
            tensor,
            self.placement.replica,
            self.placement.replicas,
            self.rows,
        )


@dataclass(eq=False)
class Unit:
    """Parameters that are gathered, reduced and updated together.

    These are whole on this rank all the time, and ranks with other data have no part in them; others derive from this.
    """

    held: list[Held]
    #: Whether it is used after :meth:`State.visit` alone, so that an update can wait until then.
    visited: ClassVar[bool] = False

    def gather(self) -> None:
        """Make the full parameters ready for compute."""

    def release(self, drop: bool) -> None:
        """Forget the full parameters, as what is held may change; ``drop``: free their memory too."""

    def reduce(self) -> None:
        """Sum the gradients so far over the ranks with other data, and keep what is held here."""

    def begin_pass(self, last: bool) -> None:
        """Get ready for a forward and backward pass, the ``last`` of a step or one before."""


def by_block(held: Mapping[str, Held]) -> dict[str, list[Held]]:
    """The parameters of every block, by its number, and under "" what is left: embedding, norm and head."""
    units: dict[str, list[Held]] = {}
    for name, h in held.items():
        kind, _, rest = name.partition(".")
        units.setdefault(rest.partition(".")[0] if kind == "blocks" else "", []).append(
            h
        )
    return units


class Updater(Protocol):
    """What updates parameters, and says what it keeps with each of them."""

    def slots(self, held: Held) -> dict[str, Part]:
        """What belongs to this parameter, as before the first update."""

    def __call__(self, held: Sequence[Held], grads: Sequence[T], lr: float) -> None:
        """Update these parameters and their slots in place, by these gradients, at this learning rate. Collective."""


class State:
    """All that this rank holds. ``copies``: parameters that ranks of other stages hold too, by the group of these.

    ``go_home`` brings all rows to where their boxes say, and returns whether any were elsewhere. Collective.
    ``learning`` are those of ``held`` that are not frozen; with ``base_elsewhere`` checkpoints leave out the others.
    What ``tiers`` keep of a unit is brought in while the unit is updated. ``due`` are updates that wait until a unit is
    visited: who looks at tensors, a checkpoint or a proof, has the state settle first. An update that has ``failed``
    may have left some units as they were, and is raised again by then. ``optimizer``: None in a state that is never
    updated.
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
        self.due: dict[
            Unit, tuple[Callable[[Unit], Mapping[str, T]], float, float]
        ] = {}
        self.optimizer = optimizer
        self.failed: BaseException | None = None

    def make_slots(self) -> None:
        """Make what the optimizer keeps with every parameter that learns, whose values are there."""
        if self.optimizer is None:
            return
        for unit in self.units:
            for h in unit.held:
                if h.learns:
                    h.slots |= self.optimizer.slots(h)
                    h.updates = torch.zeros((), device=h.local.device)
            self.tiers.rest(
                unit,
                "moments",
                [part.values for h in unit.held for part in h.slots.values()],
            )

    def gather(self) -> None:
        """Make all parameters ready for compute. Collective."""
        for unit in self.units:
            unit.gather()

    def release(self, drop: bool = True) -> None:
        for unit in self.units:
            unit.release(drop)

    def begin_pass(self, last: bool) -> None:
        for unit in self.units:
            unit.begin_pass(last)

    def gradients(self, settled: bool = True) -> dict[str, T]:
        """What backward left of each learning parameter's gradient on this rank; zeros where it left none.

        Unless they are ``settled`` nobody may look at those that rest in a file, as they may be on their way there.
        """
        self._make_due()
        if settled:
            self.tiers.settle()
        found = {h.name: h.grad for h in self.learning}
        return {
            h.name: torch.zeros_like(h.local) if (g := found[h.name]) is None else g
            for h in self.learning
        }

    def clear_gradients(self) -> None:
        for h in self.held:
            h.parameter.grad = None

    def update(
        self,
        unit: Unit,
        grads: Mapping[str, T],
        lr: float,
        scale: float = 1.0,
        tried: bool = False,
    ) -> None:
        """Update the parameters and slots of one unit by its reduced gradients, times ``scale``. Collective.

        The gradients are scaled in place. :meth:`settle` ends what this may have left under way. What is only ``tried``
        is taken back by :class:`weft.parallel.revocable_updates.RevocableUpdates`.
        """
        if any(h.learns for h in unit.held):
            with self.tiers.trying(unit) if tried else self.tiers.updating(unit):
                self._update(unit, grads, lr, scale)

    def _update(
        self, unit: Unit, grads: Mapping[str, T], lr: float, scale: float = 1.0
    ) -> None:
        assert self.optimizer is not None, "a state that only computes"
        held = [h for h in unit.held if h.learns]
        mine = [grads[h.name] for h in held]
        if scale != 1.0:
            torch._foreach_mul_(mine, scale)
        self.optimizer(held, mine, lr)

    def update_later(
        self,
        grads: Callable[[Unit], Mapping[str, T]],
        lr: float,
        scale: float = 1.0,
        but: Container[Unit] = (),
    ) -> None:
        """Update every unit by what ``grads`` says of it: when it is visited next, or else when the state settles.

        Units that nobody visits are updated now. Those in ``but`` have been.
        """
        self._make_due()
        for unit in self.units:
            if unit in but:
                continue
            if unit.visited and any(h.learns for h in unit.held):
                self.due[unit] = grads, lr, scale
            else:
                self.update(unit, grads(unit), lr, scale)

    def fetch(self, unit: Unit) -> None:
        """Begin to bring what the next visit of a unit needs, and then the next update that is due."""
        groups = self.tiers.groups
        self.tiers.fetch(
            unit, *(groups.get(unit, ()) if unit in self.due else ["weights"])
        )
        for late in islice(self.due, 1):
            self.tiers.fetch(late, *groups.get(late, ()))

    def visit(self, unit: Unit) -> None:
        """Have the unit be up to date, and its weights be at hand for the next use if it was not."""
        if due := self.due.pop(unit, None):
            grads, lr, scale = due
            # alone: the rest leaves before anything is made of them
            self.tiers.keep(unit, "weights")
            # what is computed in between gives the unit before time to leave
            with self.tiers.updating(unit, behind=0):
                self._update(unit, grads(unit), lr, scale)

    def settle(self) -> None:
        """Have all tensors up to date and where they rest, after some updates. Collective."""
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
        """From now on others may change the tensors."""
        self.settle()
        self.tiers.forget_sums()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """In here the parameters that learn are their averages, where the optimizer keeps such (``optimizer.ema``).

        Nothing may be saving or updating the state meanwhile. Afterwards every bit is as before.
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
                average = h.slots["ema"].values
                now = h.local.clone()
                h.local.copy_(average)
                average.copy_(now)
        self.release()  # what was gathered is of other values

    @property
    def updates(self) -> int:
        """How often the parameters have been updated, with what is due."""
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
        """Bring all rows to where their boxes say. Collective."""
        if self._go_home():
            self.release()  # what was gathered is of other rows

    def tensors(self) -> dict[str, Part]:
        """Every tensor of the state as this rank's part of a logical one; slots go by parameter name. Collective."""
        self.bring_home()
        self.expose()
        return self.parts()

    def parts(self) -> dict[str, Part]:
        """The same for who only reads, between two steps: rows stay where they are, and no rank waits for another."""
        found = {f"model.{h.name}": h.part(h.local) for h in self.held}
        for h in self.held:
            found |= {
                f"optimizer.{slot}.{h.name}": part for slot, part in h.slots.items()
            }
        return found

    def saved(self) -> dict[str, Part]:
        """Of :meth:`tensors` those that a checkpoint holds; what a disk has damaged is no such thing."""
        self.bring_home()
        self.settle()
        self.tiers.check()
        frozen = {
            f"model.{h.name}" for h in self.held if self.base_elsewhere and not h.learns
        }
        return {
            name: part for name, part in self.tensors().items() if name not in frozen
        }

    @torch.no_grad()
    def fill(self, values: Values) -> None:
        """Write initial ``values`` into all parameters, and make the optimizer's slots."""
        self.expose()
        for h in self.held:
            if h.local.numel():
                h.local.copy_(values(h.name, h.logical, h.box))
        self.make_slots()
