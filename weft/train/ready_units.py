"""Detection, during backward, of units (mostly blocks of the model) whose gradients are all complete."""

import weakref
from collections.abc import Callable, Iterable
from functools import partial

from torch import nn

from weft.parallel.state import Unit


class ReadyUnits:
    """Calls ``complete(unit)`` during backward as soon as every trained parameter of a unit has its gradient.

    A unit is a group of parameters that are updated together, usually those of a block. Gradients are watched from
    :meth:`expect` to :meth:`end`, during one backward pass. If a unit is sharded, its gradients are already summed over
    the data ranks when ``complete`` is called.
    """

    def __init__(self, units: Iterable[Unit], complete: Callable[[Unit], None]) -> None:
        # Weak references: a reference cycle would keep the parameters, and process groups, alive.
        self.complete, self.watching = weakref.WeakMethod(complete), False
        self.names = {
            unit: [h.parameter for h in unit.held if h.learns] for unit in units
        }
        self.missing: dict[Unit, int] = {}
        owner = weakref.ref(self)
        for unit, parameters in self.names.items():
            for parameter in parameters:
                parameter.register_post_accumulate_grad_hook(
                    partial(_arrived, owner, unit)
                )

    def expect(self) -> None:
        """Begin to watch the gradients of all units.

        Call this before the last backward pass of a step: the next gradient that autograd accumulates for a parameter
        counts as the last one of the step.
        """
        self.missing = {
            unit: len(parameters) for unit, parameters in self.names.items()
        }
        self.watching = True

    def end(self) -> list[Unit]:
        """Stop watching. Returns the units that are not complete because some of their parameters took no part in the
        loss.
        """
        self.watching = False
        return [unit for unit, missing in self.missing.items() if missing]


def _arrived(
    watching: weakref.ref[ReadyUnits], unit: Unit, parameter: nn.Parameter
) -> None:
    if (owner := watching()) is not None and owner.watching:
        owner.missing[unit] -= 1
        if not owner.missing[unit] and (complete := owner.complete()) is not None:
            complete(unit)
