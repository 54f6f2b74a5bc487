"""When the gradient of a unit is complete, where autograd hooks compute it: after its last parameter's."""

import weakref
from collections.abc import Callable, Iterable
from functools import partial

from torch import nn

from weft.parallel.state import Unit


class Arrivals:
    """Calls ``complete`` with a unit when all gradients of it that a pass leaves have come, since :meth:`expect`.

    What comes is autograd's own sum, or what has been reduced over the ranks with other data.
    """

    def __init__(self, units: Iterable[Unit], complete: Callable[[Unit], None]) -> None:
        # Weak, as a circle with the parameters, or with who has process groups, would keep these alive.
        self.complete, self.watching = weakref.WeakMethod(complete), False
        self.names = {unit: [h.parameter for h in unit.held if h.learns] for unit in units}
        self.missing: dict[Unit, int] = {}
        mine = weakref.ref(self)
        for unit, parameters in self.names.items():
            for parameter in parameters:
                parameter.register_post_accumulate_grad_hook(partial(_arrived, mine, unit))

    def expect(self) -> None:
        """From now on gradients are the last ones of their parameters."""
        self.missing = {unit: len(parameters) for unit, parameters in self.names.items()}
        self.watching = True

    def end(self) -> list[Unit]:
        """Nothing more comes. Returns the units that are not complete: some parameter had no part in the loss."""
        self.watching = False
        return [unit for unit, missing in self.missing.items() if missing]


def _arrived(arrivals: weakref.ref[Arrivals], unit: Unit, parameter: nn.Parameter) -> None:
    if (mine := arrivals()) is not None and mine.watching:
        mine.missing[unit] -= 1
        if not mine.missing[unit] and (complete := mine.complete()) is not None:
            complete(unit)
