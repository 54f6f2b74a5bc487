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
        """Run forward and backward over the batches, and leave the gradients on this rank.

        Returns this rank's share of the mean loss, or shares of other sums if the filler of the agree phase (``agree``)
        sums those.
        """


class AgreePhase(Protocol):
    """Ranks combine their gradients, and learn the step's result."""

    def label_weight(self, batches: Sequence[Batch]) -> torch.Tensor | None:
        """See :meth:`weft.train.step.PhaseFiller.label_weight`; plain passes ask it."""

    def beyond(self, number: torch.Tensor) -> torch.Tensor:
        """See :meth:`weft.train.step.PhaseFiller.beyond`; plain passes ask it."""

    def agree(self, given: StepInput, shares: torch.Tensor) -> Agreed:
        """Combine the ranks' gradients, and sum the step's loss, norm and counts over the ranks.

        ``shares``: the tensor that the gradients phase has returned. Calls ``before_update`` of the context before this
        rank gives its shares to the sums.
        """


class UpdatePhase(Protocol):
    """Parameters and optimizer state change, on all ranks alike."""

    def update(self, given: StepInput, agreed: Agreed) -> list[StepResult]:
        """Update the state, unless the step is skipped. Returns the step results that are final now, oldest first."""


class AfterPhase(Protocol):
    """Something happens between this step and the next one."""

    def after(
        self, results: list[StepResult], finish: Callable[[], list[StepResult]]
    ) -> list[StepResult]:
        """Do the work between steps, and return the results that are final now.

        ``results``: those that the update phase has returned. ``finish`` completes the step's update, and returns the
        results that were still due.
        """

    def end(self, results: list[StepResult]) -> list[StepResult]:
        """Wait for work of this phase that is under way, as the run may end here.

        Returns ``results``, those of the last steps, perhaps changed.
        """
