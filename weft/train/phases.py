"""The phases of a training step: an object with these methods can fill them."""

from __future__ import annotations

from enum import Flag, auto
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from weft.data.batch import Batch
    from weft.train.step_values import Agreed, StepInput, StepResult


class Phase(Flag):
    """A part of a training step; its name in lower case is the method that fills it."""

    #: Passes over the batches leave gradients on this rank.
    GRADIENTS = auto()
    #: Ranks combine their gradients, and learn loss, norm and whether a rank wishes to stop.
    AGREE = auto()
    #: Parameters and optimizer state change.
    UPDATE = auto()
    #: Something happens between this step and the next one.
    AFTER = auto()

    def __str__(self) -> str:
        names = [(phase.name or "").lower() for phase in self]
        return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


STEP = Phase.GRADIENTS | Phase.AGREE | Phase.UPDATE


class GradientPhase(Protocol):
    """Passes over the batches leave gradients on this rank."""

    def gradients(self, given: StepInput, agree: AgreePhase) -> torch.Tensor:
        """Run the passes. Returns this rank's share of the mean loss, or of what the agree phase sums instead."""


class AgreePhase(Protocol):
    """Ranks combine their gradients, and learn the step's result."""

    def label_weight(self, batches: Sequence[Batch]) -> torch.Tensor | None:
        """See :meth:`weft.train.step.PhaseFiller.label_weight`; plain passes ask it."""

    def beyond(self, number: torch.Tensor) -> torch.Tensor:
        """See :meth:`weft.train.step.PhaseFiller.beyond`; plain passes ask it."""

    def agree(self, given: StepInput, shares: torch.Tensor) -> Agreed:
        """Combine gradients and sums. ``shares``: what the gradients phase has returned.

        Calls ``before_update`` before this rank's sums.
        """


class UpdatePhase(Protocol):
    """Parameters and optimizer state change, on all ranks alike."""

    def update(self, given: StepInput, agreed: Agreed) -> list[StepResult]:
        """Update, unless the step is skipped. Returns the results that are final now, oldest first."""


class AfterPhase(Protocol):
    """Something happens between this step and the next one."""

    def after(
        self, results: list[StepResult], finish: Callable[[], list[StepResult]]
    ) -> list[StepResult]:
        """Return the step's results. ``finish`` makes the step final, and returns the results that were still due."""

    def end(self, results: list[StepResult]) -> list[StepResult]:
        """Wait for work under way, as the run may end here. Returns the given results of the last steps."""
