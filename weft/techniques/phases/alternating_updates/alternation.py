"""Updates of an offloaded state that host and device share (:mod:`weft.parallel.alternating`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from weft.parallel.alternating import Alternating, update_alternating
from weft.train.step import PhaseFiller, StepContext, update_unless_skipped
from weft.train.step_values import Agreed, StepInput, StepResult

if TYPE_CHECKING:
    from weft.train.step import UnitGradients


class Alternation(PhaseFiller):
    """Updates some units of an offloaded state on the device, while the host updates the other units.

    A unit is a group of parameters that are updated together. ``share``: share of the units that the device updates (0
    to 1), or ``auto``: chosen by measured times.
    """

    def __init__(self, context: StepContext, share: float | str) -> None:
        self.context = context
        self.alternating = Alternating(context.mesh.device, share, self._report)

    def update(self, given: StepInput, agreed: Agreed) -> list[StepResult]:
        return [update_unless_skipped(self.context, given, agreed, self._update)]

    def _update(self, grads: UnitGradients, lr: float, scale: float) -> None:
        update_alternating(self.context.state, self.alternating, grads, lr, scale)

    def _report(self, chosen: dict[str, Any]) -> None:
        """Report how many units are updated on the device, with the time of every such number."""
        count, units, seconds = chosen["device"], chosen["units"], chosen["seconds"]
        line = (
            f"{count} of {units} units are updated on the device: {seconds[count]:.3g} s by measured rates, "
            f"{seconds[0]:.3g} on the host alone; memory.alternate sets it"
        )
        self.context.report("alternating", line, chosen)
